"""Tensor parallelism under Lightning's Trainer: two by two ranks equal one process."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.checks import assert_close_in_float64
from tests.harness.ranks import float64_by_default

pytest.importorskip("lightning", reason="the extra [lightning] is not installed")

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
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

from layerzero import ShardingPlan, units
from layerzero.flat.parameter_info import get_info
from layerzero.integrations.lightning import ZeRO3Strategy
from tests.harness.checks import assert_same_on_all_ranks, assert_same_parameters
from tests.harness.models import WIDTH, Block
from tests.harness.ranks import run_ranks
from tests.integrations.trainers import (
    NUM_BATCHES,
    Overflow,
    Regression,
    full,
    seeded,
    trainer,
    zero3_strategy,
)


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


def fit(
    own: ZeRO3Strategy | None = None, cls: type = Split, seed: int = 0, ckpt: Any = None, **options
) -> Any:
    model = seeded(cls, seed=seed)
    fitter = trainer(own, **options)
    num_data_ranks = dist.get_world_size() // 2 if dist.is_initialized() else 1
    fitter.fit(model, loader(num_data_ranks), ckpt_path=ckpt)
    return model


CLIP = {"gradient_clip_val": 0.05}


class _Save(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


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
        other = fit(strategy(**options))
        assert_close_in_float64(torch.tensor(other.losses), torch.tensor(model.losses), "losses")
        assert_close_in_float64(full(other), expected, "parameter")
    for kind in ("full", "sharded"):
        fit(strategy(state_dict_type=kind), callbacks=[_Save(tmp_path / kind)], max_epochs=1)
    resumed = fit(strategy(), seed=7, ckpt=tmp_path / "sharded")
    assert resumed.losses == model.losses[NUM_BATCHES:]
    assert_same_parameters(full(resumed), expected)
    # An overflow of one part is one of all.
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    overflow = Overflow(3, 0, lambda module: module.blocks[1].down.weight)
    scaled_model = fit(strategy(precision_plugin=scaled), callbacks=[overflow], max_epochs=1)
    assert overflow.scales == [32.0] * NUM_BATCHES
    # The stem is whole on every rank: it stays the same on those of one tensor-parallel group.
    for name, value in full(scaled_model).items():
        assert_same_on_all_ranks(value, name)

    with pytest.raises(ValueError, match=r"make 1 x 3 = 3 ranks, but the Trainer has 4; choose"):
        fit(ZeRO3Strategy(tensor_parallel_size=3))
    with pytest.raises(ValueError, match=r"pass either the process group"):
        ZeRO3Strategy(process_group=dist.group.WORLD, tensor_parallel_size=2)
    _OnOwnMesh.mesh = mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(
        ValueError, match=r"pass tensor_parallel_size=2 and .* or pass as process_gro"
    ):
        fit(ZeRO3Strategy(), _OnOwnMesh)
    own = ZeRO3Strategy({Block}, process_group=mesh["dp"], zero3_size=1)
    on_own = fit(own, _OnOwnMesh)
    assert on_own.device_mesh == mesh
    assert own.distributed_sampler_kwargs["num_replicas"] == 2
    assert_close_in_float64(full(on_own), expected, "parameter")
    return model.losses, expected, full(fit(strategy(), **CLIP))


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
    plain = fit()
    losses = torch.tensor([losses for losses, _, _ in results])
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[2], losses[3])
    assert not torch.equal(losses[0], losses[2])
    assert_close_in_float64(losses[::2].mean(0), torch.tensor(plain.losses), "losses")
    assert_close_in_float64(results[0][1], full(plain), "parameter")
    assert_close_in_float64(results[0][2], full(fit(**CLIP)), "parameter")
    torch.save(full(plain), tmp_path / "expected")
    run_ranks(2, _goes_on, tmp_path, in_float64=True)
