"""Lightning callbacks that look at parameters: groups, state, counts are those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.checks import assert_close_in_float64
from tests.harness.ranks import float64_by_default

pytest.importorskip("lightning", reason="the extra [lightning] is not installed")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, ModelSummary
from lightning.pytorch.utilities.model_summary import summarize

from tests.harness.ranks import run_ranks
from tests.integrations.trainers import Regression, full, rows, seeded, trainer


class _Net(Regression):
    """Its head trains from the start."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)


class _Thaw(BaseFinetuning):
    """The head at once, then a block in each epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module)
        self.make_trainable(pl_module.head)

    def finetune_function(
        self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch in (1, 2):
            block = pl_module.blocks[epoch - 1]
            self.unfreeze_and_add_param_group(block, optimizer, initial_denom_lr=2.0)
            # Asked for twice: it is in a group already.
            self.unfreeze_and_add_param_group(block.up, optimizer)


def _fit(epochs: int, **options: Any) -> tuple[Any, list[list[str]]]:
    thaw, model = _Thaw(), seeded(_Net)
    fitted = trainer(max_epochs=epochs, callbacks=[thaw])
    fitted.fit(model, rows(), **options)
    groups = [group["params"] for group in thaw._internal_optimizer_metadata[0]]
    held = {name: id(p) for name, p in model.named_parameters()}
    own = [[id(p) for p in group["params"]] for group in fitted.optimizers[0].param_groups]
    assert own == [[held[name] for name in names] for names in groups]
    return fitted, groups


def _thaws(folder: str) -> list[dict[str, Tensor]]:
    """Weights after three epochs, and after a fourth of a run that goes on from there."""
    fitted, groups = _fit(3)
    block = ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert groups == [
        ["head.weight", "head.bias"],
        *([f"blocks.{index}.{name}" for name in block] for index in (0, 1)),
    ]
    path = str(Path(folder, "third.ckpt"))
    fitted.save_checkpoint(path)
    again, resumed_groups = _fit(4, ckpt_path=path)
    assert resumed_groups == groups
    return [full(each.lightning_module) for each in (fitted, again)]


class _Kept(ModelSummary):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.kept = self._summary(trainer, pl_module)


def _counts() -> None:
    kept = _Kept(max_depth=2)
    expected = summarize(seeded(_Net), max_depth=2)
    fitted = trainer(max_epochs=1, callbacks=[kept])
    model = seeded(_Net)
    model.stem.requires_grad_(False)
    fitted.fit(model, rows())
    for got in (kept.kept, summarize(model, max_depth=2)):
        assert got.param_nums == expected.param_nums
        assert got.total_parameters == expected.total_parameters
        assert got.model_size == expected.model_size
        frozen = sum(p.numel() for p in seeded(_Net).stem.parameters())
        assert got.trainable_parameters == expected.trainable_parameters - frozen
    # Another module, beside: as ever.
    assert summarize(seeded(_Net)).total_parameters == expected.total_parameters


def _all(folder: str) -> list[dict[str, Tensor]]:
    _counts()
    return _thaws(folder)


@float64_by_default()
def test_thawed_groups_state_and_counts_are_those_of_one_process(tmp_path: Path) -> None:
    # Not of DDP, which reduces no gradient of what was frozen when it was made.
    (tmp_path / "alone").mkdir()
    expected = _thaws(str(tmp_path / "alone"))
    results = run_ranks(2, _all, str(tmp_path), timeout=120, in_float64=True)
    for own, whole in zip(results[0], expected, strict=True):
        # Batches of two ranks add up in another order.
        assert_close_in_float64(own, whole, "parameter")
