"""Training under Lightning's Trainer equals DDP and one process, whatever the Trainer does."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.checks import assert_close_in_float64
from tests.harness.ranks import float64_by_default

pytest.importorskip("lightning", reason="the extra [lightning] is not installed")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from lightning.pytorch.plugins import DeepSpeedPrecision, FSDPPrecision, MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment

from layerzero import GradScaler, ShardingPlan, ZeRO3, units
from layerzero import MixedPrecision as EngineMixedPrecision
from layerzero.checkpoint import CheckpointError
from layerzero.integrations.lightning import ZeRO3Strategy
from layerzero.optim import WholeTensorOptimizer
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.models import Block
from tests.harness.ranks import on_ranks, run_ranks
from tests.harness.recording import recorded_operations, reduced
from tests.integrations.trainers import (
    NUM_BATCHES,
    RANKS,
    Regression,
    ddp,
    full,
    quiet,
    rows,
    seeded,
    trainer,
    zero3_strategy,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _fit(strategy: Any = None, **arguments: Any) -> Regression:
    model = seeded()
    trainer(strategy, **arguments).fit(model, rows())
    return model


def _assert_same_run(ours: Regression, theirs: Regression) -> None:
    assert ours.losses == theirs.losses
    assert_same_parameters(full(ours), full(theirs))


class _Operations(Callback):
    """Names of the units whose gradients were reduced, in each training step."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.recording = recorded_operations(trainer.model)
        self.operations = self.recording.__enter__()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.recording.__exit__(None, None, None)


def _train_in_float64() -> tuple[list[float], dict[str, Tensor]]:
    """Clipped by a norm that is summed in another order than DDP's."""
    clip = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"}
    ours, theirs = _fit(**clip), _fit(ddp(), **clip)
    assert_close_in_float64(full(ours), full(theirs), "clipped")
    return ours.losses, full(ours)


def _accumulation_reduces_once() -> None:
    operations = _Operations()
    strategy = zero3_strategy(accumulation="unsharded")
    ours = _fit(strategy, accumulate_grad_batches=2, callbacks=[operations])
    num_steps = 2 * NUM_BATCHES // 2
    assert len(reduced(operations.operations)) == 3 * num_steps
    _assert_same_run(ours, _fit(ddp(), accumulate_grad_batches=2))


def _many_uses_of_one_model() -> None:
    model, theirs = seeded(), seeded()
    ours_trainer, theirs_trainer = trainer(), trainer(ddp())
    results = []
    for each, own in ((ours_trainer, model), (theirs_trainer, theirs)):
        before = each.validate(own, rows(), verbose=False)
        each.fit(own, rows(), rows())
        again = each.test(own, rows(), verbose=False)
        other = trainer(ddp() if each is theirs_trainer else None)
        predicted = torch.cat(other.predict(own, rows()))
        own.losses.clear()
        each.fit_loop.max_epochs = 3
        each.fit(own, rows())
        results.append((before, again, predicted, list(own.losses)))
    (*ours, ours_predicted, ours_losses), (*expected, expected_predicted, losses) = results
    assert ours == expected
    assert_bitwise(ours_predicted, expected_predicted, "predictions")
    assert ours_losses == losses and losses


@on_ranks(RANKS)
def test_training_equals_ddp() -> None:
    model = _fit()
    _assert_same_run(model, _fit(ddp()))
    assert sorted(unit.fqn for unit in units(model)) == ["", "blocks.0", "blocks.1"]
    plan = ShardingPlan(apply_modules=["blocks.{*}"], defaults={"outer": "replicate"})
    for each in ("layerzero", zero3_strategy(plan=plan)):
        _assert_same_run(_fit(each), model)
    _accumulation_reduces_once()
    clip = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    clipped = _fit(**clip)
    _assert_same_run(clipped, _fit(ddp(), **clip))
    assert clipped.losses != model.losses
    _many_uses_of_one_model()


@float64_by_default()
def test_training_equals_one_process() -> None:
    """Batches of two ranks add up in another order than one batch of both."""
    results = run_ranks(RANKS, _train_in_float64, in_float64=True)
    (losses, parameters), (other_losses, _) = results
    model = _fit(gradient_clip_val=0.1, gradient_clip_algorithm="norm")
    mean = (torch.tensor(losses) + torch.tensor(other_losses)) / 2
    assert_close_in_float64(mean, torch.tensor(model.losses), "losses")
    assert_close_in_float64(parameters, full(model), "parameter")


class _Unmade(Regression):
    """Its layers are made in `configure_model`, without storage."""

    def make_layers(self) -> None:
        self.stem = self.head = self.blocks = None
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def configure_model(self) -> None:
        if self.stem is None:
            with torch.device("meta"):
                super().make_layers()
            self.num_calls = torch.zeros((), dtype=torch.long)


def _resumed(path: Path, strategy: Any = None, model: Regression | None = None) -> Regression:
    """Another model that goes on from `path` to the end of the second epoch."""
    model = model or seeded(seed=7)
    trainer(strategy).fit(model, rows(), ckpt_path=path)
    return model


def _saved(path: Path, strategy: Any = None, **options: Any) -> Regression:
    """A run of one epoch, saved to `path`."""
    model = seeded()
    own = trainer(strategy, max_epochs=1, **options)
    own.fit(model, rows())
    own.save_checkpoint(path)
    return model


def _files(tmp_path: Path) -> list[Any]:
    whole = _fit()
    second_half = whole.losses[NUM_BATCHES:]

    def assert_goes_on(model: Regression, where: str) -> None:
        assert model.losses == second_half, where
        assert_same_parameters(full(model), full(whole))
        assert model.num_calls == 2 * NUM_BATCHES, where

    ours, theirs = tmp_path / "ours.ckpt", tmp_path / "ddp.ckpt"
    saved = _saved(ours)
    _saved(theirs, ddp())
    assert ours.is_file()
    plain = Regression.load_from_checkpoint(ours)
    assert_same_parameters(full(plain), full(saved))
    assert_goes_on(_resumed(ours), "from our file")
    assert_goes_on(_resumed(ours, ddp()), "DDP from our file")
    assert_goes_on(_resumed(theirs), "from DDP's file")
    assert_goes_on(_resumed(ours, model=seeded(_Unmade)), "without storage before")
    with trainer().init_module(empty_init=True):
        unmade = Regression()
    assert unmade.stem.weight.is_meta
    assert_goes_on(_resumed(ours, model=unmade), "made by init_module")
    own, other = torch.load(ours), torch.load(theirs)
    assert own.keys() == other.keys()
    assert _described(own["optimizer_states"]) == _described(other["optimizer_states"])
    result = trainer().validate(seeded(seed=7), rows(), ckpt_path=ours, verbose=False)
    assert result == trainer(ddp()).validate(seeded(seed=7), rows(), ckpt_path=ours, verbose=False)
    return result


def _described(value: Any) -> Any:
    """A nesting with tensors by shape and dtype."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: _described(each) for key, each in value.items()}
    return [_described(each) for each in value] if isinstance(value, list) else value


@float64_by_default()
def test_a_file_goes_on_here_under_ddp_and_in_one_process(tmp_path: Path) -> None:
    ((result,), _) = run_ranks(RANKS, _files, tmp_path, in_float64=True)
    alone = trainer().validate(
        seeded(seed=7), rows(), ckpt_path=tmp_path / "ours.ckpt", verbose=False
    )
    losses = (torch.tensor(each["val_loss"]) for each in (result, alone[0]))
    assert_close_in_float64(*losses, "val_loss")
    model = seeded(seed=7)
    trainer().fit(model, rows(), ckpt_path=tmp_path / "ours.ckpt")
    assert len(model.losses) == NUM_BATCHES


def _a_callback_keeps_the_best(tmp_path: Path) -> None:
    for kind in ("full", "sharded"):
        best = pl.callbacks.ModelCheckpoint(
            tmp_path / kind, monitor="val_loss", save_top_k=1, save_last=True
        )
        own = trainer(
            zero3_strategy(state_dict_type=kind), enable_checkpointing=True, callbacks=[best]
        )
        model = seeded()
        own.fit(model, rows(), rows())
        (tested,) = own.test(model, rows(), ckpt_path="best", verbose=False)
        assert tested["val_loss"] == best.best_model_score
        names = {each.name for each in (tmp_path / kind).iterdir()}
        assert names == {"last.ckpt", Path(best.best_model_path).name}


def _weights_alone(tmp_path: Path) -> None:
    for kind in ("full", "sharded"):
        model = seeded()
        own = trainer(zero3_strategy(state_dict_type=kind))
        own.fit(model, rows())
        own.save_checkpoint(tmp_path / f"weights_{kind}", weights_only=True)
        other = seeded(seed=7)
        trainer().validate(other, rows(), ckpt_path=tmp_path / f"weights_{kind}", verbose=False)
        assert_same_parameters(full(other), full(model))
        with pytest.raises(KeyError, match="optimizer state"):
            trainer().fit(seeded(), rows(), ckpt_path=tmp_path / f"weights_{kind}")


def _before_it_is_sharded(tmp_path: Path) -> None:
    own = trainer()
    own.strategy.connect(seeded())
    with pytest.raises(RuntimeError, match="not sharded yet; save it after fit"):
        own.save_checkpoint(tmp_path / "never.ckpt")
    model = seeded()
    trainer(max_epochs=1).fit(model, rows())
    own = trainer()  # Another one sharded it.
    own.strategy.connect(model)
    own.save_checkpoint(tmp_path / "again.ckpt")
    loaded = Regression.load_from_checkpoint(tmp_path / "again.ckpt")
    assert_same_parameters(full(loaded), full(model))


def _one_rank_fails(tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    with pytest.raises(RuntimeError, match=r"rank 0 could not write it: .*FileExists"):
        _saved(tmp_path / "a_file" / "x.ckpt")


def _a_hook_changes_what_is_saved(tmp_path: Path) -> None:
    model = seeded()
    model.on_save_checkpoint = lambda checkpoint: checkpoint["state_dict"].popitem()
    own = trainer(zero3_strategy(state_dict_type="sharded"), max_epochs=1)
    own.fit(model, rows())
    with pytest.raises(CheckpointError, match="on_save_checkpoint changed the names"):
        own.save_checkpoint(tmp_path / "changed.ckpt")


@on_ranks(RANKS)
def test_a_folder_holds_no_pickle_and_goes_on(tmp_path: Path) -> None:
    whole = _fit()
    path = tmp_path / "sharded.ckpt"
    _saved(path, zero3_strategy(state_dict_type="sharded"))
    endings = {each.suffix for each in path.rglob("*") if each.is_file()}
    assert endings == {".json", ".safetensors", ""}, endings
    for kind in ("sharded", "full"):
        model = _resumed(path, zero3_strategy(state_dict_type=kind))
        assert model.losses == whole.losses[NUM_BATCHES:]
        assert_same_parameters(full(model), full(whole))
        assert model.num_calls == 2 * NUM_BATCHES
    # Other units, so shards lie elsewhere.
    model = _resumed(path, ZeRO3Strategy())
    assert model.losses == whole.losses[NUM_BATCHES:]
    _a_callback_keeps_the_best(tmp_path)
    _saved(path, zero3_strategy(state_dict_type="sharded"))  # It replaces the former.
    steps = [each.name for each in path.iterdir() if each.is_dir()]
    assert steps == [f"step-{NUM_BATCHES:08d}"]
    _weights_alone(tmp_path)
    _before_it_is_sharded(tmp_path)
    _one_rank_fails(tmp_path)
    _a_hook_changes_what_is_saved(tmp_path)


class _Overflow(Callback):
    """Makes the gradients of one rank infinite in the second step."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step == 1 and not self.scales[1:] and trainer.global_rank == 1:
            parameter = next(p for p in pl_module.parameters() if p.numel())
            parameter.grad.fill_(torch.inf)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


class _Loss(nn.Module):
    """A step of training reads a parameter of the root, so the root is a module around it."""

    def __init__(self, module: Regression) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.module.loss(batch)


def _losses_by_hand(**options: Any) -> list[float]:
    """Of what `_fit` does, on the engine without Lightning."""
    module = seeded()
    (optimizer,), (scheduler,) = module.configure_optimizers()
    model, losses = ZeRO3(_Loss(module), auto_wrap_policy={Block}, **options), []
    for _ in range(2):
        for batch in rows():
            loss = model(batch)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return losses


def _precisions() -> None:
    for precision in ("bf16-mixed", "bf16-true", "64-true"):
        ours, theirs = _fit(precision=precision), _fit(ddp(), precision=precision)
        assert ours.losses == theirs.losses, precision
        dtypes = {parameter.dtype for parameter in ours.parameters()}
        assert dtypes == {parameter.dtype for parameter in theirs.parameters()}, precision
    half = EngineMixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours = _fit(zero3_strategy(mixed_precision=half))
    assert ours.losses == _losses_by_hand(mixed_precision=half)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    overflow = _Overflow()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    strategy = zero3_strategy(precision_plugin=plugin)
    _fit(strategy, callbacks=[overflow], gradient_clip_val=0.5)
    assert isinstance(plugin.scaler, GradScaler)
    assert overflow.scales == [64.0] + [32.0] * (2 * NUM_BATCHES - 1)


class _TwoOptimizers(Regression):
    """Two forwards and backwards a step, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], _: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = (self(batch[0]) - batch[1]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.2, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        parts = [self.blocks, nn.ModuleList([self.stem, self.head])]
        return [torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in parts]


def _losses_of_two() -> list[float]:
    model = seeded(_TwoOptimizers)
    trainer().fit(model, rows())
    return model.losses


class _Whole(Regression):
    """One optimizer, of whole tensors, clipped, with a schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = WholeTensorOptimizer(self.parameters(), torch.optim.Adafactor, lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


class _WholeAndRest(_TwoOptimizers):
    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.layerzero.ndim == 2]
        rest = [p for p in self.parameters() if p.layerzero.ndim != 2]
        muon = WholeTensorOptimizer(matrices, torch.optim.Muon, lr=0.02)
        return [muon, torch.optim.AdamW(rest, 0.05)]


def _goes_on(cls: type[Regression], kind: str, folder: Path) -> None:
    """A run that is cut in two equals one that is not, bit for bit."""
    clipped = {} if issubclass(cls, _TwoOptimizers) else {"gradient_clip_val": 0.5}

    def fitted(model: Regression, epochs: int, resumed: Path | None = None) -> pl.Trainer:
        own = trainer(zero3_strategy(state_dict_type=kind), max_epochs=epochs, **clipped)
        own.fit(model, rows(), ckpt_path=resumed)
        return own

    whole, first, again = seeded(cls), seeded(cls), seeded(cls, seed=7)
    fitted(whole, 2)
    fitted(first, 1).save_checkpoint(folder / kind)
    fitted(again, 2, folder / kind)
    assert first.losses + again.losses == whole.losses, cls
    assert_same_parameters(full(again), full(whole), what=cls.__name__)


class _ByNdim(Regression):
    def configure_optimizers(self) -> Any:
        parts = [[p for p in self.parameters() if (p.ndim > 1) is each] for each in (True, False)]
        groups = [{"params": parts[0], "weight_decay": 0.1}, {"params": parts[1]}]
        return torch.optim.AdamW(groups, weight_decay=0.0)


def _decays_by_ndim_as_under_ddp() -> None:
    ours, theirs = seeded(_ByNdim), seeded(_ByNdim)
    trainer(max_epochs=1).fit(ours, rows())
    trainer(ddp(), max_epochs=1).fit(theirs, rows())
    assert_same_parameters(full(ours), full(theirs))


@on_ranks(RANKS)
def test_precision_plugins_and_manual_optimization(tmp_path: Path) -> None:
    _precisions()
    _decays_by_ndim_as_under_ddp()
    _goes_on(_TwoOptimizers, "full", tmp_path)
    _goes_on(_Whole, "full", tmp_path)
    _goes_on(_WholeAndRest, "sharded", tmp_path)
    one = trainer(zero3_strategy(state_dict_type="sharded"), max_epochs=1)
    with pytest.raises(CheckpointError, match="contains the state of optimizers named '0', '1'"):
        one.fit(seeded(), rows(), ckpt_path=tmp_path / "sharded")


@float64_by_default()
def test_manual_optimization_equals_one_process() -> None:
    """Batches of two ranks add up in another order than one batch of both."""
    ours = torch.tensor(run_ranks(RANKS, _losses_of_two, in_float64=True))
    assert_close_in_float64(ours.mean(0), torch.tensor(_losses_of_two()), "losses")


def _example(tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    import train_lightning

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    quiet()
    train_lightning.main(["--folder", str(tmp_path)])


@pytest.mark.slow
def test_the_example_learns_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(RANKS, _example, tmp_path)
    losses = [float(each) for each in re.findall(r"loss ([0-9.]+)", capsys.readouterr().out)]
    assert losses[0] < 2.3 and losses[1] < 1.5, losses


def test_a_bad_argument_is_named_with_what_to_use() -> None:
    for arguments, error, text in (
        ({"state_dict_type": "local"}, ValueError, r"expected one of \['full', 'sharded'\]"),
        ({"device": "cpu"}, ValueError, "use accelerator and devices of the Trainer"),
        ({"plan": {}, "auto_wrap_policy": {Block}}, ValueError, "both given"),
        ({"plan": {}, "outer": "zero1"}, ValueError, "plan and outer are both given"),
        ({"plan": {"aply_modules": []}}, ValueError, "unknown key 'aply_modules'"),
        ({"precision_plugin": FSDPPrecision("32-true")}, ValueError, "use Trainer.precision="),
    ):
        with pytest.raises(error, match=text):
            ZeRO3Strategy(**arguments)


@on_ranks(RANKS)
def test_what_does_not_go_together_is_refused_before_training() -> None:
    def fit(own: pl.Trainer, model: pl.LightningModule | None = None) -> None:
        own.fit(seeded() if model is None else model, rows())

    with pytest.raises(ValueError, match="average the weights of saved checkpoints"):
        fit(trainer(callbacks=[StochasticWeightAveraging(swa_lrs=0.1)]))
    with pytest.raises(ValueError, match="compile\\(\\) of its layers"):
        fit(trainer(), torch.compile(seeded()))
    with pytest.raises(ValueError, match="for another engine"):
        trainer(plugins=[LightningEnvironment(), DeepSpeedPrecision("32-true")])
    with pytest.raises(TypeError, match="did you mean reshard_after_forward"):
        fit(trainer(zero3_strategy(reshard_after_foward=True)))
    with pytest.raises(RuntimeError, match="wrapped already"):
        wrapped = seeded()
        ZeRO3(wrapped)
        fit(trainer(), wrapped)
