"""Scheduled fine-tuning of a sharded model is that of one process, through phases and restores.

Lightning's DDP is no reference: it averages only what required a gradient when it was built.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning", reason="the extra [lightning] is not installed")
pytest.importorskip("finetuning_scheduler", reason="the extra [lightning] is not installed")

import lightning.pytorch as pl
from finetuning_scheduler import FinetuningScheduler, FTSCheckpoint, fts_supporters
from lightning.pytorch.callbacks import Callback
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.parallel import parallelize_module

from layerzero import BackwardPrefetch, OffloadPolicy, ZeRO3
from layerzero.integrations.lightning import ZeRO3Strategy
from tests.harness.checks import assert_close_in_float64, assert_same_parameters
from tests.harness.internals import get_info, inner_units, root_state
from tests.harness.ranks import float64_by_default, on_ranks, run_ranks
from tests.integrations.test_lightning import loader, styles
from tests.integrations.trainers import (
    RANKS,
    REPOSITORY,
    Regression,
    full,
    rows,
    run_example,
    seeded,
    trainer,
    zero3_strategy,
)

# Units are whole blocks: each of them holds parameters of two phases.
PHASES = [
    ["head.weight", "head.bias", "blocks.1.down.weight"],
    ["blocks.1.up.weight", "blocks.1.down.bias", "blocks.0.down.weight"],
    ["stem.weight", "blocks.1.up.bias", "blocks.0.up.weight", "blocks.0.up.bias"],
]


class _Watch(Callback):
    """What each epoch trains: depth of the schedule, names, optimizer groups and their rates."""

    def __init__(self) -> None:
        self.epochs: list[tuple[int, list[str], list[list[str]], list[float]]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        scheduler = next(c for c in trainer.callbacks if isinstance(c, FinetuningScheduler))
        name_of = {id(p): name for name, p in module.named_parameters()}
        groups = trainer.optimizers[0].param_groups
        self.epochs.append(
            (
                scheduler.curr_depth,
                sorted(name for name, p in module.named_parameters() if p.requires_grad),
                [sorted(name_of[id(p)] for p in group["params"]) for group in groups],
                [group["lr"] for group in groups],
            )
        )


class _Stop(Callback):
    """Saves after so many epochs, and ends the run; the scheduler would go on to its last phase."""

    def __init__(self, path: Path, num_epochs: int) -> None:
        self.path, self.num_epochs = path, num_epochs

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.num_epochs - 1:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def _fit(
    folder: Path,
    strategy: Any = None,
    model: Regression | None = None,
    *,
    ends: Sequence[int] = (1, 2, 3),
    restore_best: bool = True,
    epochs: int | None = None,
    callbacks: Sequence[Callback] = (),
    data: Callable[[], Any] = rows,
    ckpt_path: Path | None = None,
    **adapter: Any,
) -> tuple[Regression, _Watch]:
    """Train through phases that end after these epochs. A phase begins with the best weights of the
    one before; the worst count as these, which are not the last ones."""
    model, watch = model or seeded(), _Watch()
    phases = enumerate(zip(PHASES, ends, strict=True))
    schedule = {
        depth: {"params": list(names), "max_transition_epoch": end, "lr": 0.05 / (depth + 1)}
        for depth, (names, end) in phases
    }
    place = "layerzero.integrations.finetuning_scheduler:ZeRO3StrategyAdapter"
    scheduler = FinetuningScheduler(
        ft_schedule=schedule,
        epoch_transitions_only=True,
        restore_best=restore_best,
        enforce_phase0_params=False,  # Else the scheduler itself repairs what is thawed too early.
        allow_untested=True,
        custom_strategy_adapters={"layerzero": place} if strategy is not None else None,
        **({"strategy_adapter_cfg": adapter} if adapter else {}),
    )
    best = FTSCheckpoint(folder / "checkpoints", monitor="val_loss", mode="max", save_top_k=1)
    own = trainer(
        strategy,
        max_epochs=epochs or ends[-1],
        callbacks=[scheduler, best, *callbacks, watch],
        default_root_dir=folder,
        enable_checkpointing=True,
    )
    own.fit(model, data(), data(), ckpt_path=ckpt_path)
    return model, watch


ENDS = (1, 3, 6)


def _phases_on_ranks(tmp_path: Path) -> tuple[list[float], dict[str, Tensor], Any]:
    def fit(
        folder: Path, kind: str = "full", restore_best: bool = False, **options: Any
    ) -> tuple[Regression, _Watch]:
        strategy = zero3_strategy(state_dict_type=kind)
        return _fit(folder, strategy, ends=ENDS, restore_best=restore_best, **options)

    whole, watch = fit(tmp_path / "whole")
    for epoch, (depth, thawed, groups, _) in enumerate(watch.epochs):
        assert depth == sum(epoch >= end for end in ENDS[:-1]), epoch
        assert groups == [sorted(names) for names in PHASES[: depth + 1]], epoch
        assert thawed == sorted(chain(*groups)), epoch
    assert torch.equal(full(whole)["stem.bias"], seeded().stem.bias), "no phase names it"
    for kind, stop in (("full", 3), ("sharded", 4)):  # At the end of a phase, and inside one.
        folder = tmp_path / kind
        stopping = [_Stop(folder / "stopped.ckpt", stop)]
        first, _ = fit(folder, kind, callbacks=stopping)
        options = {"model": seeded(seed=7), "ckpt_path": folder / "stopped.ckpt"}
        again, resumed = fit(folder, kind, **options)
        assert first.losses + again.losses == whole.losses, (kind, stop)
        assert watch.epochs[stop:] == resumed.epochs, (kind, stop)
        assert_same_parameters(full(again), full(whole))
    best, best_watch = fit(tmp_path / "best", "sharded", restore_best=True)
    assert best.losses != whole.losses and best_watch.epochs == watch.epochs
    return best.losses, full(best), watch.epochs


@pytest.mark.slow
@float64_by_default()  # sums of one process and of two ranks have other orders
def test_three_phases_are_those_of_one_process_with_restores_inside_phases(tmp_path: Path) -> None:
    results = run_ranks(RANKS, _phases_on_ranks, tmp_path, in_float64=True)
    alone, watch = _fit(tmp_path / "alone", ends=ENDS)
    losses = torch.tensor([losses for losses, _, _ in results]).mean(0)
    assert_close_in_float64(losses, torch.tensor(alone.losses), "losses")
    assert_close_in_float64(results[0][1], full(alone), "parameter")
    assert results[0][2] == watch.epochs


class _Own(Regression):
    def configure_model(self) -> None:
        if get_info(self.blocks[1].up.weight) is None:
            ZeRO3(self.blocks[1])


class _Changed(Regression):
    """One of its layers is wrapped from the beginning; once the schedule is there, it may split
    them, wraps another, and makes a parameter anew."""

    def make_layers(self) -> None:
        super().make_layers()
        self.blocks[0] = checkpoint_wrapper(self.blocks[0])

    def configure_model(self) -> None:
        if isinstance(self.blocks[1], OptimizedModule):
            return
        for block in self.blocks if self.device_mesh is not None else ():
            parallelize_module(block, self.device_mesh["tensor_parallel"], styles())
        self.blocks[1] = torch.compile(self.blocks[1], backend="eager")
        self.stem.weight = nn.Parameter(self.stem.weight.detach())


class _Renamed(Regression):
    def configure_model(self) -> None:
        self.blocks = nn.ModuleList([nn.Sequential(*self.blocks)])


@on_ranks(RANKS)
def test_a_plan_in_the_configuration_shards_by_names_and_expressions(tmp_path: Path) -> None:
    def fit(
        cls: type[Regression] = Regression, strategy: Any = None, **options: Any
    ) -> tuple[dict[str, Any], Regression]:
        strategy = strategy or ZeRO3Strategy(deterministic=True)
        model, watch = _fit(tmp_path, strategy, seeded(cls), epochs=2, **options)
        assert type(model).__name__ == cls.__name__
        assert [thawed for _, thawed, *_ in watch.epochs] == [
            sorted(chain(*PHASES[:count])) for count in (1, 2, 3)
        ]
        return {unit.fqn: unit for unit in inner_units(model)}, model

    plan = {
        r"blocks\.\d+": {"reshard_after_forward": False, "act_ckpt": "wrapped"},
        "blocks.1": {},
        r"blocks\.1\.(up|down)": None,
        "head": {"cpu_offload_policy": {"pin_memory": False}},
    }
    defaults = {"backward_prefetch": "backward_post", "num_to_forward_prefetch": 2}
    _, plain = fit()
    strategy = ZeRO3Strategy(deterministic=True)
    found, model = fit(strategy=strategy, zero3_plan=plan, zero3_defaults=defaults)
    assert model.losses == plain.losses
    assert sorted(found) == ["", "blocks.0", "blocks.1", "blocks.1.down", "blocks.1.up", "head"]
    # The last pattern that matches decides alone.
    reshards = {name: unit.options.reshard_after_forward for name, unit in found.items()}
    assert not reshards["blocks.0"] and reshards["blocks.1"]
    head = OffloadPolicy(params=True, pin_memory=False)
    assert strategy.plan.apply_modules["head"] == {"cpu_offload": head}
    assert root_state(model).scheduler.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    # What configure_model sharded, and a list of modules, is skipped.
    overlapping = {"blocks": {}, r"blocks\.\d+": {"reshard_after_forward": False}, "head": {}}
    found, model = fit(_Own, zero3_plan=overlapping)
    assert model.losses == plain.losses
    assert [found[f"blocks.{i}"].options.reshard_after_forward for i in (0, 1)] == [False, True]
    # No wrapper is in a name of the schedule, or of the plan.
    found, model = fit(_Changed, zero3_plan={r"blocks\.\d+": {}})
    assert sorted(found) == ["", "blocks.0", "blocks.1"] and model.losses == plain.losses
    splits = {"strategy": ZeRO3Strategy(tensor_parallel_size=2), "data": loader}
    found, model = fit(_Changed, zero3_plan={r"blocks\.\d+": {}}, **splits)
    assert sorted(found) == ["", "blocks.0", "blocks.1"]
    for text, cls, strategy, adapter in (
        (r"matches no.*near matches: 'blocks'", Regression, None, {"bloks": {}}),
        ("auto_wrap_policy is given, but", Regression, ZeRO3Strategy({nn.Linear}), {"head": {}}),
        ("unknown option 'reshard'", Regression, None, {"head": {"reshard": True}}),
        (r"phase 0 unfreezes 'blocks.1.down.weight', which .* no lon", _Renamed, None, {}),
    ):
        with pytest.raises(ValueError, match=text):
            fit(cls, strategy, zero3_plan=adapter)


@pytest.mark.slow
def test_the_example_thaws_and_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(RANKS, run_example, "train_finetuning", tmp_path)
    lines = re.findall(r"epoch (\d): (\d+) parameters, loss ([0-9.]+)", capsys.readouterr().out)
    assert [int(thawed) for _, thawed, _ in lines] == [2] * 3 + [20] * 3 + [21] * 3
    losses = [float(loss) for _, _, loss in lines]
    assert losses[2] < losses[0] and losses[5] < losses[2] and losses[8] < 1.8, losses


def test_the_entry_point_is_found_by_the_strategys_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=60)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fts_supporters, "STRATEGY_ADAPTERS", {})
    fts_supporters._discover_strategy_adapters()
    found = fts_supporters.STRATEGY_ADAPTERS["layerzero"]
    assert found.__module__ == "layerzero.integrations.finetuning_scheduler"
