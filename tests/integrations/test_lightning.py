"""Training under Lightning's Trainer equals DDP and one process, whatever the Trainer does; with
tensor parallelism, two by two ranks equal one process."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("lightning", reason="the extra [lightning] is not installed")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, ModelSummary, StochasticWeightAveraging
from lightning.pytorch.plugins import DeepSpeedPrecision, FSDPPrecision, MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.model_summary import summarize
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import SumMetric

from layerzero import GradScaler, ShardingPlan, ZeRO3, units
from layerzero import MixedPrecision as EngineMixedPrecision
from layerzero.checkpoint import CheckpointError
from layerzero.integrations.lightning import ZeRO3Strategy
from layerzero.optim import WholeTensorOptimizer
from tests.harness.checks import (
    assert_close_in_float64,
    assert_same_on_all_ranks,
    assert_same_parameters,
)
from tests.harness.internals import get_info, inner_units
from tests.harness.models import WIDTH, Block
from tests.harness.ranks import float64_by_default, on_ranks, run_ranks
from tests.harness.recording import recorded_operations, recorded_regions, reduced
from tests.integrations.trainers import (
    NUM_BATCHES,
    RANKS,
    Overflow,
    Regression,
    ddp,
    full,
    rows,
    run_example,
    seeded,
    trainer,
    wrapper_of,
    zero3_strategy,
)


def _fit(
    strategy: Any = None,
    model: Any = None,
    data: Any = None,
    ckpt_path: Path | None = None,
    **arguments: Any,
) -> Any:
    model = seeded() if model is None else model
    data = rows() if data is None else data
    trainer(strategy, **arguments).fit(model, data, ckpt_path=ckpt_path)
    return model


def _assert_same_run(ours: Regression, theirs: Regression, what: object = "") -> None:
    assert ours.losses == theirs.losses, what
    assert_same_parameters(full(ours), full(theirs), what=f"{what}: parameter")


def _many_uses(strategy: Any) -> tuple[Any, ...]:
    """One model, evaluated, fitted, tested, used by another Trainer, and fitted again."""
    model, own = seeded(), trainer(strategy())
    before = own.validate(model, rows(), verbose=False)
    own.fit(model, rows(), rows())
    again = own.test(model, rows(), verbose=False)
    predicted = torch.cat(trainer(strategy()).predict(model, rows()))
    own.fit_loop.max_epochs = 3
    own.fit(model, rows())
    assert len(model.losses) == 3 * NUM_BATCHES
    return before, again, predicted.tolist(), model.losses


class _ByNdim(Regression):
    def configure_optimizers(self) -> Any:
        parts = [[p for p in self.parameters() if (p.ndim > 1) is each] for each in (True, False)]
        groups = [{"params": parts[0], "weight_decay": 0.1}, {"params": parts[1]}]
        return torch.optim.AdamW(groups, weight_decay=0.0)


@on_ranks(RANKS)
def test_training_equals_ddp() -> None:
    model = _fit()
    _assert_same_run(model, _fit(ddp()))
    assert sorted(unit.fqn for unit in units(model)) == ["", "blocks.0", "blocks.1"]
    plan = ShardingPlan(apply_modules=["blocks.{*}"], defaults={"outer": "replicate"})
    for each in ("layerzero", zero3_strategy(plan=plan)):
        _assert_same_run(_fit(each), model, each)
    value = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    for options in (value, *({"precision": each} for each in ("bf16-mixed", "bf16-true"))):
        ours, theirs = _fit(**options), _fit(ddp(), **options)
        assert ours.losses == theirs.losses != model.losses, options
        dtypes = [{parameter.dtype for parameter in each.parameters()} for each in (ours, theirs)]
        assert dtypes[0] == dtypes[1], options
    _assert_same_run(_fit(model=seeded(_ByNdim)), _fit(ddp(), seeded(_ByNdim)), "decay by ndim")
    assert _many_uses(zero3_strategy) == _many_uses(ddp)
    model, theirs = seeded(), seeded()
    options = {"accumulation": "unsharded"}
    _fit(zero3_strategy(**options), model, max_epochs=1)
    _fit(ddp(), theirs, max_epochs=1)
    with recorded_operations(wrapper_of(model)) as operations:
        _fit(zero3_strategy(**options), model, accumulate_grad_batches=2)
    assert len(reduced(operations)) == 3 * 2 * NUM_BATCHES // 2
    _fit(ddp(), theirs, accumulate_grad_batches=2)
    _assert_same_run(model, theirs, "accumulation")


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


@on_ranks(RANKS)
def test_a_scaler_agrees_on_overflow_and_runs_of_any_optimizers_go_on(tmp_path: Path) -> None:
    half = EngineMixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours = _fit(zero3_strategy(mixed_precision=half), max_epochs=1)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    assert inner_units(wrapper_of(ours))[0].options.mixed_precision == half
    overflow = Overflow(1, 1, lambda module: next(p for p in module.parameters() if p.numel()))
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    strategy = zero3_strategy(precision_plugin=plugin)
    _fit(strategy, callbacks=[overflow], gradient_clip_val=0.5)
    assert isinstance(plugin.scaler, GradScaler)
    assert overflow.scales == [64.0] + [32.0] * (2 * NUM_BATCHES - 1)
    # A run that is cut in two equals one that is not, bit for bit.
    for cls, kind in ((_TwoOptimizers, "full"), (_Whole, "full"), (_WholeAndRest, "sharded")):
        options = {} if issubclass(cls, _TwoOptimizers) else {"gradient_clip_val": 0.5}
        whole = _fit(model=seeded(cls), **options)
        first = seeded(cls)
        own = trainer(zero3_strategy(state_dict_type=kind), max_epochs=1, **options)
        own.fit(first, rows())
        own.save_checkpoint(tmp_path / cls.__name__)
        again, own = seeded(cls, seed=7), trainer(zero3_strategy(state_dict_type=kind), **options)
        own.fit(again, rows(), ckpt_path=tmp_path / cls.__name__)
        assert first.losses + again.losses == whole.losses, cls
        assert_same_parameters(full(again), full(whole), what=cls.__name__)
    one = trainer(zero3_strategy(state_dict_type="sharded"), max_epochs=1)
    with pytest.raises(CheckpointError, match="contains the state of optimizers named '0', '1'"):
        one.fit(seeded(), rows(), ckpt_path=tmp_path / "_WholeAndRest")


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
    return _fit(strategy, model or seeded(seed=7), ckpt_path=path)


def _saved(
    path: Path, strategy: Any = None, model: Any = None, data: Any = None, **options: Any
) -> Regression:
    model, own = model or seeded(), trainer(strategy, max_epochs=1)
    own.fit(model, data or rows())
    own.save_checkpoint(path, **options)
    return model


def _validated(path: Path, strategy: Any = None, model: Regression | None = None) -> Any:
    own = trainer(strategy)
    return own.validate(model or seeded(seed=7), rows(), ckpt_path=path, verbose=False)


class _Head(Regression):
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


def _thaws(folder: Path) -> list[dict[str, Tensor]]:
    """Weights after three epochs, and after a fourth of a run that goes on from there."""
    weights, path = [], folder / "third.ckpt"
    for epochs, options in ((3, {}), (4, {"ckpt_path": path})):
        model, own = seeded(_Head), trainer(max_epochs=epochs, callbacks=[_Thaw()])
        own.fit(model, rows(), **options)
        groups = [{id(p) for p in group["params"]} for group in own.optimizers[0].param_groups]
        parts = (model.head, *model.blocks)
        assert groups == [{id(p) for p in part.parameters()} for part in parts]
        if epochs == 3:
            own.save_checkpoint(path)
        weights.append(full(model))
    return weights


def _on_ranks(tmp_path: Path) -> Any:
    """What is compared with one process: a clipped run, manual optimization, thawing, a file."""
    clip = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"}
    ours, theirs = _fit(**clip), _fit(ddp(), **clip)
    assert_close_in_float64(full(ours), full(theirs), "clipped")
    two = _fit(model=seeded(_TwoOptimizers))

    whole = _fit()
    second_half = whole.losses[NUM_BATCHES:]
    files = our_file, their_file = tmp_path / "ours.ckpt", tmp_path / "ddp.ckpt"
    saved = _saved(our_file)
    _saved(their_file, ddp())
    assert our_file.is_file()
    assert_same_parameters(full(Regression.load_from_checkpoint(our_file)), full(saved))
    with trainer().init_module(empty_init=True):
        unmade = Regression()
    assert unmade.stem.weight.is_meta
    for path, strategy, model in (
        (our_file, None, None),
        (our_file, ddp(), None),
        (their_file, None, None),
        (our_file, None, seeded(_Unmade)),
        (our_file, None, unmade),
    ):
        model = _resumed(path, strategy, model)
        what = path, strategy, type(model)
        assert model.losses == second_half and model.num_calls == 2 * NUM_BATCHES, what
        assert_same_parameters(full(model), full(whole), what=str(what))
    own, other = map(torch.load, files)
    assert own.keys() == other.keys()
    assert _described(own["optimizer_states"]) == _described(other["optimizer_states"])
    result = _validated(our_file)
    assert result == _validated(our_file, ddp())
    losses = [torch.tensor(each.losses) for each in (ours, two)]
    return losses, [full(ours), *_thaws(tmp_path)], torch.tensor(result[0]["val_loss"])


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: _described(each) for key, each in value.items()}
    return [_described(each) for each in value] if isinstance(value, list) else value


@float64_by_default()
def test_training_and_files_equal_those_of_one_process(tmp_path: Path) -> None:
    """Batches of two ranks add up in another order than one batch of both. DDP, which reduces no
    gradient of what was frozen when it was made, is no reference for thawing."""
    of_ranks = run_ranks(RANKS, _on_ranks, tmp_path, timeout=120, in_float64=True)
    models = _fit(gradient_clip_val=0.1), _fit(model=seeded(_TwoOptimizers))
    for index, model in enumerate(models):
        mean = torch.stack([losses[index] for losses, _, _ in of_ranks]).mean(0)
        assert_close_in_float64(mean, torch.tensor(model.losses), "losses")
    (tmp_path / "alone").mkdir()
    expected = [full(models[0]), *_thaws(tmp_path / "alone")]
    for ours, theirs in zip(of_ranks[0][1], expected, strict=True):
        assert_close_in_float64(ours, theirs, "parameter")
    (alone,) = _validated(tmp_path / "ours.ckpt")
    assert_close_in_float64(of_ranks[0][2], torch.tensor(alone["val_loss"]), "val_loss")
    assert len(_resumed(tmp_path / "ours.ckpt").losses) == NUM_BATCHES


class _Kept(ModelSummary):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.kept = self._summary(trainer, pl_module)


@on_ranks(RANKS)
def test_a_folder_holds_no_pickle_and_goes_on(tmp_path: Path) -> None:
    def sharded() -> ZeRO3Strategy:
        return zero3_strategy(state_dict_type="sharded")

    whole = _fit()
    path = tmp_path / "sharded.ckpt"
    _saved(path, sharded())
    endings = {each.suffix for each in path.rglob("*") if each.is_file()}
    assert endings == {".json", ".safetensors", ""}, endings
    # The last one has other units, so shards lie elsewhere.
    for strategy in (sharded(), zero3_strategy(), ZeRO3Strategy()):
        model = _resumed(path, strategy)
        assert model.losses == whole.losses[NUM_BATCHES:]
        assert_same_parameters(full(model), full(whole))
        assert model.num_calls == 2 * NUM_BATCHES
    _saved(path, sharded())  # It replaces the former.
    steps = [each.name for each in path.iterdir() if each.is_dir()]
    assert steps == [f"step-{NUM_BATCHES:08d}"]
    for kind in ("full", "sharded"):
        folder, strategy = tmp_path / kind, zero3_strategy(state_dict_type=kind)
        best = pl.callbacks.ModelCheckpoint(
            folder, monitor="val_loss", save_top_k=1, save_last=True
        )
        own = trainer(strategy, enable_checkpointing=True, callbacks=[best])
        model = seeded()
        own.fit(model, rows(), rows())
        (tested,) = own.test(model, rows(), ckpt_path="best", verbose=False)
        assert tested["val_loss"] == best.best_model_score
        names = {each.name for each in folder.iterdir()}
        assert names == {"last.ckpt", Path(best.best_model_path).name}
        weights, other = tmp_path / f"weights_{kind}", seeded(seed=7)
        model = _saved(weights, zero3_strategy(state_dict_type=kind), weights_only=True)
        _validated(weights, model=other)
        assert_same_parameters(full(other), full(model))
        with pytest.raises(KeyError, match="optimizer state"):
            _resumed(weights)

    # Before it is sharded; once another Trainer has sharded it.
    own = trainer()
    own.strategy.connect(seeded())
    with pytest.raises(RuntimeError, match="not sharded yet; save it after fit"):
        own.save_checkpoint(tmp_path / "never.ckpt")
    own = trainer()
    own.strategy.connect(whole)
    own.save_checkpoint(tmp_path / "again.ckpt")
    loaded = Regression.load_from_checkpoint(tmp_path / "again.ckpt")
    assert_same_parameters(full(loaded), full(whole))
    (tmp_path / "a_file").touch()
    with pytest.raises(RuntimeError, match=r"rank 0 could not write it: .*FileExists"):
        own.save_checkpoint(tmp_path / "a_file" / "x.ckpt")
    model = seeded()
    model.on_save_checkpoint = lambda checkpoint: checkpoint["state_dict"].popitem()
    own = trainer(sharded(), max_epochs=1)
    own.fit(model, rows())
    with pytest.raises(CheckpointError, match="on_save_checkpoint changed the names"):
        own.save_checkpoint(tmp_path / "changed.ckpt")

    # Counts are of whole parameters, and those of other modules as ever.
    kept, model, expected = _Kept(max_depth=2), seeded(), summarize(seeded(), max_depth=2)
    model.stem.requires_grad_(False)
    _fit(model=model, max_epochs=1, callbacks=[kept])
    frozen = sum(p.numel() for p in seeded().stem.parameters())
    for got in (kept.kept, summarize(model, max_depth=2)):
        assert got.param_nums == expected.param_nums
        assert got.total_parameters == expected.total_parameters
        assert got.model_size == expected.model_size
        assert got.trainable_parameters == expected.trainable_parameters - frozen
    assert summarize(seeded()).total_parameters == expected.total_parameters


@pytest.mark.slow
def test_the_example_learns_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(RANKS, run_example, "train_lightning", tmp_path)
    losses = [float(each) for each in re.findall(r"loss ([0-9.]+)", capsys.readouterr().out)]
    assert losses[0] < 2.3 and losses[1] < 1.5, losses


@on_ranks(RANKS)
def test_optional_modules_are_named_and_what_does_not_go_together_is_refused() -> None:
    by_name = {"optional_modules": ["blocks.1"], "optional_mean": "participants"}
    in_plan = {
        "apply_modules": ["blocks.{*}"],
        "optional": ["blocks.1"],
        "defaults": {"optional_mean": "participants"},
    }
    with recorded_regions() as found:
        for strategy in (zero3_strategy(**by_name), zero3_strategy(plan=in_plan)):
            _fit(strategy, max_epochs=1, limit_train_batches=1)
    assert found == [({"blocks.1": "blocks.1"}, "participants")] * 2
    for arguments, text in (
        ({"state_dict_type": "local"}, r"expected one of \['full', 'sharded'\]"),
        ({"device": "cpu"}, "use accelerator and devices of the Trainer"),
        ({"plan": {}, "auto_wrap_policy": {Block}}, "both given"),
        ({"plan": {}, "outer": "zero1"}, "plan and outer are both given"),
        ({"plan": {"aply_modules": []}}, "unknown key 'aply_modules'"),
        ({"precision_plugin": FSDPPrecision("32-true")}, "use Trainer.precision="),
    ):
        with pytest.raises(ValueError, match=text):
            ZeRO3Strategy(**arguments)
    wrapped, misspelt = seeded(), zero3_strategy(reshard_after_foward=True)
    ZeRO3(wrapped)
    averages, foreign = StochasticWeightAveraging(swa_lrs=0.1), DeepSpeedPrecision("32-true")
    for error, text, options in (
        (ValueError, "average the weights of saved checkpoints", {"callbacks": [averages]}),
        (ValueError, r"compile\(\) of its layers", {"model": torch.compile(seeded())}),
        (ValueError, "for another engine", {"plugins": [LightningEnvironment(), foreign]}),
        (TypeError, "did you mean reshard_after_forward", {"strategy": misspelt}),
        (RuntimeError, "wrapped already", {"model": wrapped}),
    ):
        with pytest.raises(error, match=text):
            _fit(**options)


def styles() -> dict[str, ParallelStyle]:
    """Of a block, in unequal parts."""
    return {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate()),
    }


class Split(Regression):
    """Its blocks are split over the tensor-parallel axis, if there is one. Counts its samples."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("cpu"):  # Lightning moves metrics, which on meta have no values.
            self.num_samples = SumMetric()

    def configure_model(self) -> None:
        for block in self.blocks:
            if isinstance(block.up.weight, DTensor) or get_info(block.up.weight) is not None:
                continue  # configure_model is called again for each use of the Trainer.
            if self.device_mesh is not None:
                parallelize_module(block, self.device_mesh["tensor_parallel"], styles())

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.num_samples.update(len(batch[0]))
        self.log("samples", float(len(batch[0])), sync_dist=True, reduce_fx="sum", on_epoch=True)
        return loss


def loader(num_data_ranks: int = 1) -> DataLoader[Any]:
    """Dealt out by the Trainer: the same 8 rows a step, whatever the number of ranks.

    Shuffled as it does it, for one process, too.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_BATCHES * 8, WIDTH, generator=generator)
    data = TensorDataset(inputs, inputs[:, :2].sin())
    sampler = None if dist.is_initialized() else DistributedSampler(data, 1, 0)
    return DataLoader(data, 8 // num_data_ranks, sampler=sampler)


strategy = functools.partial(zero3_strategy, tensor_parallel_size=2)


def _fit_split(own: ZeRO3Strategy | None = None, cls: type = Split, **options: Any) -> Any:
    num_data_ranks = dist.get_world_size() // 2 if dist.is_initialized() else 1
    return _fit(own, seeded(cls), loader(num_data_ranks), **options)


CLIP = {"gradient_clip_val": 0.05}


class _OnOwnMesh(Regression):
    mesh: Any

    def configure_model(self) -> None:
        parallelize_module(self.blocks[0], self.mesh["tp"], styles())


def _trains(tmp_path: Path) -> Any:
    own, model = strategy(), seeded(Split, seed=dist.get_rank())  # The first rank's values count.
    fitter = trainer(own)
    fitter.fit(model, loader(2))
    assert sorted(unit.fqn for unit in units(model)) == ["", "blocks.0", "blocks.1"]
    assert model.blocks[0].up.weight.layerzero.tensor_parallel is not None
    assert fitter.callback_metrics["samples_epoch"] == NUM_BATCHES * 8
    assert model.num_samples.compute() == 2 * NUM_BATCHES * 8
    mesh = model.device_mesh
    assert mesh is own.device_mesh and mesh.mesh_dim_names == ("data_parallel", "tensor_parallel")
    place = mesh["data_parallel"].get_local_rank()
    assert own.distributed_sampler_kwargs == {"num_replicas": 2, "rank": place}
    for all_of, decided in ((True, False), (False, True)):
        assert own.reduce_boolean_decision(dist.get_rank() == 3, all_of) is decided
    assert own.reduce_boolean_decision(True)
    expected = full(model)

    plan = ShardingPlan(apply_modules={"blocks.{*}": {"act_ckpt": "wrapped"}})
    for options in ({"plan": plan}, {"zero3_size": 1, "outer": "replicate"}):
        other = _fit_split(strategy(**options))
        assert_close_in_float64(torch.tensor(other.losses), torch.tensor(model.losses), "losses")
        assert_close_in_float64(full(other), expected, "parameter")
    for kind in ("full", "sharded"):
        _saved(tmp_path / kind, strategy(state_dict_type=kind), seeded(Split), loader(2))
    resumed = _fit(strategy(), seeded(Split, seed=7), loader(2), tmp_path / "sharded")
    assert resumed.losses == model.losses[NUM_BATCHES:]
    assert_same_parameters(full(resumed), expected)
    # An overflow of one part is one of all.
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    overflow = Overflow(3, 0, lambda module: module.blocks[1].down.weight)
    scaled_model = _fit_split(strategy(precision_plugin=scaled), callbacks=[overflow], max_epochs=1)
    assert overflow.scales == [32.0] * NUM_BATCHES
    # The stem is whole on every rank: it stays the same on those of one tensor-parallel group.
    for name, value in full(scaled_model).items():
        assert_same_on_all_ranks(value, name)

    with pytest.raises(ValueError, match=r"make 1 x 3 = 3 ranks, but the Trainer has 4; choose"):
        _fit_split(ZeRO3Strategy(tensor_parallel_size=3))
    with pytest.raises(ValueError, match=r"pass either the process group"):
        ZeRO3Strategy(process_group=dist.group.WORLD, tensor_parallel_size=2)
    _OnOwnMesh.mesh = mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(
        ValueError, match=r"pass tensor_parallel_size=2 and .* or pass as process_gro"
    ):
        _fit_split(ZeRO3Strategy(), _OnOwnMesh)
    own = ZeRO3Strategy({Block}, process_group=mesh["dp"], zero3_size=1)
    on_own = _fit_split(own, _OnOwnMesh)
    assert on_own.device_mesh == mesh
    assert own.distributed_sampler_kwargs["num_replicas"] == 2
    assert_close_in_float64(full(on_own), expected, "parameter")
    return model.losses, expected, full(_fit_split(strategy(), **CLIP))


def _goes_on(tmp_path: Path) -> None:
    for kind in ("full", "sharded"):
        model = seeded(Regression, seed=3)
        trainer(ZeRO3Strategy({Block})).fit(model, loader(2), ckpt_path=tmp_path / kind)
        assert len(model.losses) == NUM_BATCHES
        assert_close_in_float64(full(model), torch.load(tmp_path / "expected"), "parameter")


@pytest.mark.slow
@float64_by_default()
def test_two_by_two_ranks_train_save_and_go_on_as_one_process(tmp_path: Path) -> None:
    """Products are summed in two parts, and batches of ranks in another order."""
    results = run_ranks(4, _trains, tmp_path, in_float64=True)
    plain = _fit_split()
    losses = torch.tensor([losses for losses, _, _ in results])
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[2], losses[3])
    assert not torch.equal(losses[0], losses[2])
    assert_close_in_float64(losses[::2].mean(0), torch.tensor(plain.losses), "losses")
    assert_close_in_float64(results[0][1], full(plain), "parameter")
    assert_close_in_float64(results[0][2], full(_fit_split(**CLIP)), "parameter")
    torch.save(full(plain), tmp_path / "expected")
    run_ranks(2, _goes_on, tmp_path, in_float64=True)
