"""Scheduled fine-tuning of a sharded model is that of one process, through phases and restores.

Lightning's DDP is no reference: it averages only what required a gradient when it was built.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness.checks import assert_close_in_float64
from tests.harness.ranks import float64_by_default

pytest.importorskip("lightning", reason="the extra [lightning] is not installed")
pytest.importorskip("finetuning_scheduler", reason="the extra [lightning] is not installed")

import lightning.pytorch as pl
from finetuning_scheduler import (
    FinetuningScheduler,
    FTSCheckpoint,
    FTSEarlyStopping,
    fts_supporters,
)
from lightning.pytorch.callbacks import Callback
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.tensor.parallel import parallelize_module

from layerzero import BackwardPrefetch, OffloadPolicy, ZeRO3, units
from layerzero.flat.parameter_info import get_info
from layerzero.integrations.finetuning_scheduler import ZeRO3StrategyAdapter
from layerzero.integrations.lightning import ZeRO3Strategy
from tests.harness.checks import assert_same_parameters
from tests.harness.internals import inner_units, root_state
from tests.harness.ranks import on_ranks, run_ranks
from tests.integrations.test_lightning_parallel import loader, styles
from tests.integrations.trainers import (
    NUM_BATCHES,
    RANKS,
    Regression,
    full,
    rows,
    seeded,
    trainer,
    zero3_strategy,
)

REPOSITORY = Path(__file__).resolve().parents[2]

# Units are whole blocks: each of them holds parameters of two phases.
PHASES = [
    ["head.weight", "head.bias", "blocks.1.down.weight"],
    ["blocks.1.up.weight", "blocks.1.down.bias", "blocks.0.down.weight"],
    ["stem.weight", "blocks.1.up.bias", "blocks.0.up.weight", "blocks.0.up.bias"],
]
ENDS = [1, 3, 6]
"""Epochs after which the phases end."""


def _schedule() -> dict[int, Any]:
    return {
        depth: {"params": list(names), "max_transition_epoch": end, "lr": 0.05 / (depth + 1)}
        for depth, (names, end) in enumerate(zip(PHASES, ENDS, strict=True))
    }


def _scheduler(**arguments: Any) -> FinetuningScheduler:
    adapter = "layerzero.integrations.finetuning_scheduler:ZeRO3StrategyAdapter"
    is_sharded = torch.distributed.is_initialized()
    if "ft_schedule" in arguments:
        arguments |= {"epoch_transitions_only": True, "restore_best": False}
    return FinetuningScheduler(
        allow_untested=True,
        custom_strategy_adapters={"layerzero": adapter} if is_sharded else None,
        **arguments,
    )


_Epoch = tuple[int, list[str], list[list[str]], list[float]]
"""Depth of the schedule, names that are trained, those of each optimizer group, learning rates."""


class _Watch(Callback):
    """What is trained in each epoch, and how."""

    def __init__(self) -> None:
        self.epochs: list[_Epoch] = []
        self.val_losses: list[float] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any
    ) -> None:
        if len(self.epochs) > trainer.current_epoch - self.first_epoch:
            return
        name_of = {id(p): name for name, p in module.named_parameters()}
        (optimizer,) = trainer.optimizers
        groups = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        thawed = sorted(name for name, p in module.named_parameters() if p.requires_grad)
        rates = [group["lr"] for group in optimizer.param_groups]
        self.epochs.append((self.scheduler_of(trainer).curr_depth, thawed, groups, rates))

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.first_epoch = trainer.current_epoch

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.val_losses.append(float(trainer.callback_metrics["val_loss"]))

    @staticmethod
    def scheduler_of(trainer: pl.Trainer) -> FinetuningScheduler:
        return next(c for c in trainer.callbacks if isinstance(c, FinetuningScheduler))


def _fit(
    folder: Path,
    callbacks: list[Any],
    max_epochs: int,
    strategy: Any = None,
    model: Regression | None = None,
    data: Callable[[], Any] = rows,
    **arguments: Any,
) -> tuple[Regression, _Watch]:
    model = model or seeded()
    watch = _Watch()
    own = trainer(
        strategy,
        max_epochs=max_epochs,
        callbacks=[*callbacks, watch],
        default_root_dir=folder,
        enable_checkpointing=True,
    )
    own.fit(model, data(), data(), **arguments)
    return model, watch


def _three_phases(
    folder: Path, strategy: Any = None, callbacks: Sequence[Callback] = (), **arguments: Any
) -> tuple[Regression, _Watch]:
    scheduler = _scheduler(ft_schedule=_schedule())
    checkpoints = FTSCheckpoint(folder / "checkpoints", monitor="val_loss", save_top_k=1)
    return _fit(folder, [scheduler, checkpoints, *callbacks], ENDS[-1], strategy, **arguments)


class _Stop(Callback):
    """Saves after so many epochs, and ends the run; the scheduler would go on to its last phase."""

    def __init__(self, path: Path, num_epochs: int) -> None:
        self.path = path
        self.num_epochs = num_epochs

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.num_epochs - 1:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def _assert_phases(watch: _Watch, first_epoch: int = 0) -> None:
    """Each epoch trains what its phase and those before name, in groups one a phase."""
    for epoch, (depth, thawed, groups, _) in enumerate(watch.epochs, start=first_epoch):
        expected_depth = sum(epoch >= end for end in ENDS[:-1])
        assert depth == expected_depth, epoch
        wanted = [sorted(names) for names in PHASES[: depth + 1]]
        assert [sorted(group) for group in groups] == wanted, epoch
        assert thawed == sorted(name for names in PHASES[: depth + 1] for name in names), epoch


def _restored(tmp_path: Path, kind: str, whole: Regression, watch: _Watch, stop: int) -> None:
    """Stop after `stop` epochs, inside a phase or at its end, and go on from the checkpoint."""
    folder = tmp_path / f"{kind}_{stop}"
    path = folder / "stopped.ckpt"
    stopping = [_Stop(path, stop)]
    first, first_watch = _three_phases(folder, zero3_strategy(state_dict_type=kind), stopping)
    assert len(first_watch.epochs) == stop
    strategy = zero3_strategy(state_dict_type=kind)
    model = seeded(seed=7)
    _, again_watch = _three_phases(folder / "again", strategy, model=model, ckpt_path=path)
    assert first.losses + model.losses == whole.losses, (kind, stop)
    assert watch.epochs[stop:] == again_watch.epochs, (kind, stop)
    assert_same_parameters(full(model), full(whole))


def _phases_on_ranks(tmp_path: Path) -> tuple[list[float], dict[str, Tensor], list[_Epoch]]:
    model, watch = _three_phases(tmp_path / "whole")
    _assert_phases(watch)
    frozen = seeded().stem.bias
    assert torch.equal(full(model)["stem.bias"], frozen), "no phase names it"
    for kind, stop in (("full", 3), ("sharded", 4)):
        _restored(tmp_path, kind, model, watch, stop)
    return model.losses, full(model), watch.epochs


@pytest.mark.slow
@float64_by_default()  # sums of one process and of two ranks have other orders
def test_three_phases_are_those_of_one_process_with_restores_inside_phases(tmp_path: Path) -> None:
    results = run_ranks(RANKS, _phases_on_ranks, tmp_path, in_float64=True)
    (losses, parameters, epochs), (other_losses, _, _) = results
    model, alone = _three_phases(tmp_path / "alone")
    assert len(model.losses) == 6 * NUM_BATCHES
    assert epochs == alone.epochs
    mean = (torch.tensor(losses) + torch.tensor(other_losses)) / 2
    assert_close_in_float64(mean, torch.tensor(model.losses), "losses")
    assert_close_in_float64(parameters, full(model), "parameter")


def _implicit(
    folder: Path, kind: str | None = None
) -> tuple[list[float], dict[str, Tensor], list[_Epoch]]:
    """Phases of two parameters end when the loss stops falling fast; each starts from the best."""
    scheduler = _scheduler(max_depth=3, base_max_lr=0.05)
    stopping = FTSEarlyStopping(monitor="val_loss", patience=1, min_delta=0.05)
    checkpoints = FTSCheckpoint(folder / "checkpoints", monitor="val_loss", save_top_k=1)
    strategy = None if kind is None else zero3_strategy(state_dict_type=kind)
    model, watch = _fit(folder, [scheduler, stopping, checkpoints], 12, strategy)
    return watch.val_losses, full(model), watch.epochs


@float64_by_default()  # sums of one process and of two ranks have other orders
@pytest.mark.slow
def test_an_implicit_schedule_with_early_stopping_is_that_of_one_process(tmp_path: Path) -> None:
    (losses, parameters, epochs), _ = run_ranks(
        RANKS, _implicit, tmp_path / "ranks", "sharded", in_float64=True
    )
    alone_losses, alone_parameters, alone_epochs = _implicit(tmp_path / "alone")
    depths = [depth for depth, *_ in epochs]
    assert sorted(set(depths)) == [0, 1, 2, 3], depths
    assert max(depths.count(depth) for depth in range(4)) > 1, "some phase took its time"
    assert epochs == alone_epochs
    assert_close_in_float64(torch.tensor(losses), torch.tensor(alone_losses), "validation losses")
    assert_close_in_float64(parameters, alone_parameters, "parameter")


class _Own(Regression):
    """Shards a block itself."""

    def configure_model(self) -> None:
        if get_info(self.blocks[1].up.weight) is None:
            ZeRO3(self.blocks[1])


@on_ranks(RANKS)
def test_a_plan_in_the_configuration_shards_by_names_and_expressions(tmp_path: Path) -> None:
    def fit(strategy: ZeRO3Strategy, model: Regression | None = None, **cfg: Any) -> Regression:
        scheduler = _scheduler(ft_schedule=_schedule(), strategy_adapter_cfg=cfg)
        checkpoints = FTSCheckpoint(tmp_path / "planned", save_top_k=0)
        return _fit(tmp_path, [scheduler, checkpoints], 2, strategy, model)[0]

    plain = fit(zero3_strategy())
    plan = {
        r"blocks\.\d+": {"reshard_after_forward": False, "act_ckpt": "wrapped"},
        "blocks.1": {},
        r"blocks\.1\.(up|down)": None,
        "head": {"cpu_offload_policy": {"pin_memory": False}},
    }
    defaults = {"backward_prefetch": "backward_post", "num_to_forward_prefetch": 2}
    model = fit(ZeRO3Strategy(deterministic=True), zero3_plan=plan, zero3_defaults=defaults)
    assert model.losses == plain.losses
    found = {unit.fqn: unit for unit in inner_units(model)}
    assert sorted(found) == ["", "blocks.0", "blocks.1", "blocks.1.down", "blocks.1.up", "head"]
    # The last pattern that matches decides alone.
    assert not found["blocks.0"].options.reshard_after_forward
    assert found["blocks.1"].options.reshard_after_forward
    assert root_state(model).scheduler.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    # What configure_model sharded, and a list of modules, is skipped.
    overlapping = {"blocks": {}, r"blocks\.\d+": {"reshard_after_forward": False}, "head": {}}
    model = fit(ZeRO3Strategy(), seeded(_Own), zero3_plan=overlapping)
    assert model.losses == plain.losses
    found = {unit.fqn: unit for unit in inner_units(model)}
    assert sorted(found) == ["", "blocks.0", "blocks.1", "head"]
    assert [found[f"blocks.{i}"].options.reshard_after_forward for i in (0, 1)] == [False, True]
    with pytest.raises(ValueError, match=r"matches no.*near matches: 'blocks'"):
        fit(ZeRO3Strategy(), zero3_plan={"bloks": {}})
    with pytest.raises(ValueError, match="auto_wrap_policy is given, but strategy_adapter_cfg has"):
        fit(zero3_strategy(), zero3_plan={"head": {}})
    with pytest.raises(ValueError, match="unknown option 'reshard'"):
        fit(ZeRO3Strategy(), zero3_plan={"head": {"reshard": True}})


class _Changed(Regression):
    """Splits and wraps its layers, and makes a parameter anew, once the schedule is there."""

    def configure_model(self) -> None:
        if isinstance(self.blocks[0], CheckpointWrapper):
            return
        for block in self.blocks:
            parallelize_module(block, self.device_mesh["tensor_parallel"], styles())
        self.blocks[0] = checkpoint_wrapper(self.blocks[0])
        self.blocks[1] = torch.compile(self.blocks[1], backend="eager")
        self.stem.weight = nn.Parameter(self.stem.weight.detach())


class _Renamed(Regression):
    def configure_model(self) -> None:
        self.blocks = nn.ModuleList([nn.Sequential(*self.blocks)])


_SHORT = {
    depth: {"params": names, "max_transition_epoch": depth + 1}
    for depth, names in enumerate(PHASES)
}


def _short(folder: Path, strategy: Any = None, cls: Any = Regression, **cfg: Any) -> Any:
    scheduler = _scheduler(ft_schedule=_SHORT, **cfg)
    checkpoints = FTSCheckpoint(folder / "checkpoints", save_top_k=0)
    data = partial(loader, 1 if strategy is None else 2)
    return _fit(folder, [scheduler, checkpoints], 3, strategy, seeded(cls), data)


def _changed(tmp_path: Path) -> Any:
    cfg = {"zero3_plan": {r"blocks\.\d+": {"reshard_after_forward": False}, "head": {}}}
    strategy = ZeRO3Strategy(tensor_parallel_size=2)
    model, watch = _short(tmp_path, strategy, _Changed, strategy_adapter_cfg=cfg)
    assert isinstance(model, _Changed) and type(model).__name__ == "_Changed"
    assert sorted(unit.fqn for unit in units(model)) == ["", "blocks.0", "blocks.1", "head"]
    with pytest.raises(
        ValueError, match=r"phase 0 unfreezes 'blocks.1.down.weight', which .* no lon"
    ):
        _short(tmp_path, ZeRO3Strategy(), _Renamed)
    return model.losses, full(model), watch.epochs


@pytest.mark.slow
@float64_by_default()  # sums of one process and of two ranks have other orders
def test_wrapped_split_and_remade_layers_are_thawed_by_their_phases(tmp_path: Path) -> None:
    results = run_ranks(4, _changed, tmp_path, timeout=120, in_float64=True)
    model, alone = _short(tmp_path / "alone")
    losses = torch.tensor([losses for losses, _, _ in results]).view(2, 2, -1)
    assert torch.equal(losses[:, 0], losses[:, 1]), "tensor-parallel ranks have one batch"
    assert_close_in_float64(losses[:, 0].mean(0), torch.tensor(model.losses), "losses")
    assert_close_in_float64(results[0][1], full(model), "parameter")
    assert [epoch[1] for epoch in results[0][2]] == [epoch[1] for epoch in alone.epochs]
    assert len(alone.epochs) == 3


def _plan_of(model: Regression | None = None, **cfg: Any) -> Any:
    """What the adapter makes of a configuration, without any training."""
    strategy = ZeRO3Strategy()
    model = model or seeded()
    model._trainer = type("Trainer", (), {"strategy": strategy})()
    adapter = ZeRO3StrategyAdapter(**cfg)
    adapter.connect(type("Scheduler", (), {"pl_module": model})())
    adapter.on_before_init_fts()
    return strategy.plan


def test_wrappers_of_init_are_in_no_name_a_schedule_sees() -> None:
    model = seeded()
    names = [name for name, _ in model.named_parameters()]
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    plan = _plan_of(model, zero3_plan={"blocks.0": {}, r"blocks\.\d+\.up": {}})
    assert [name for name, _ in model.named_parameters()] == names
    assert type(model).__name__ == "Regression" and isinstance(model, Regression)
    assert list(plan.apply_modules) == ["blocks.0", r"re:blocks\.\d+\.up"]
    plan = _plan_of(zero3_plan={"head": {"cpu_offload_policy": {"pin_memory": False}}})
    expected = OffloadPolicy(params=True, pin_memory=False)
    assert plan.apply_modules["head"] == {"cpu_offload": expected}


def _example(tmp_path: Path) -> None:
    sys.path.insert(0, str(REPOSITORY / "examples"))
    import train_finetuning

    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    train_finetuning.main(["--folder", str(tmp_path)])


@pytest.mark.slow
def test_the_example_thaws_and_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(RANKS, _example, tmp_path)
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
