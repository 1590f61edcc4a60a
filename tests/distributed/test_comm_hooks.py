"""Communication hooks: FSDP1's and `fully_shard`'s, which give torch's bits."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import layerzero
from layerzero import ZeRO3
from tests.harness.checks import assert_bitwise
from tests.harness.models import CASES, Block, Mlp
from tests.harness.random_programs import _ByAllReduce
from tests.harness.ranks import on_ranks
from tests.harness.reference import OPTIMIZERS, batches_of, seeded, train_rank

CASE = CASES["mlp"]


def _losses(model: nn.Module) -> Tensor:
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    batches = batches_of(CASE, dist.get_world_size(), steps=3)
    return torch.stack(train_rank(model, optimizer, batches, dist.get_rank()))


LOW = (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)


@on_ranks(2)
def test_default_hooks_have_fsdp1s_bits() -> None:
    group, found = dist.group.WORLD, {}
    own_arguments: dict[Any, list[dict[str, Any]]] = {
        ShardingStrategy.FULL_SHARD: [{}, {"zero3_size": 1}],
        ShardingStrategy.NO_SHARD: [{"zero3_size": 1, "outer": "replicate"}],
    }
    cases = [
        *itertools.product(own_arguments, LOW),
        (ShardingStrategy.FULL_SHARD, default_hooks.reduce_scatter_hook),
        (ShardingStrategy.NO_SHARD, default_hooks.allreduce_hook),
    ]
    # On CPU torch's compressing hooks raise, with FSDP1 as well: there is no stream to record.
    with mock.patch.object(torch.Tensor, "record_stream", lambda *_: None):
        for strategy, hook in cases:
            kind = default_hooks.LowPrecisionState if hook in LOW else default_hooks.DefaultState
            state = kind(group)
            theirs = FullyShardedDataParallel(
                seeded(Mlp),
                sharding_strategy=strategy,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                device_id=torch.device("cpu"),
                use_orig_params=True,
            )
            theirs.register_comm_hook(state, hook)
            expected = found[strategy, hook] = _losses(theirs)
            for arguments in own_arguments[strategy]:
                own = ZeRO3(seeded(Mlp), auto_wrap_policy={Block}, **arguments)
                own.register_comm_hook(state, hook)
                assert_bitwise(_losses(own), expected, f"{strategy}, {arguments}, {hook.__name__}")
            with pytest.raises(RuntimeError, match="a communication hook already"):
                own.register_comm_hook(state, hook)
    exact = found[ShardingStrategy.FULL_SHARD, default_hooks.reduce_scatter_hook]
    for hook in LOW:  # Compression shows.
        assert not torch.equal(found[ShardingStrategy.FULL_SHARD, hook], exact)


class Counting(_ByAllReduce):
    calls = 0

    def __call__(self, *args: Any, **named: Any) -> None:
        self.calls += 1
        super().__call__(*args, **named)


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_hooks_of_fully_shard_have_torchs_bits(world_size: int) -> None:
    meshes: list[Any] = [None]
    if dist.get_world_size() == 4:
        meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))]
    for mesh, when in itertools.product(meshes, ("early", "late")):
        found = []
        for engine in (layerzero, torchs):
            model: Any = seeded(Mlp)
            comm, sums = Counting(), []

            def clip(chunk: Tensor) -> None:
                sums.append(chunk.numel())  # noqa: B023
                chunk.mul_(0.5).clamp_(-1e-3, 1e-3)

            def put_hooks(module: Any) -> None:
                module.set_custom_reduce_scatter(comm)  # noqa: B023
                module.set_all_reduce_hook(clip)

            blocks = [module for module in model.modules() if isinstance(module, Block)]
            for block in blocks:
                engine.fully_shard(block, mesh=mesh)
                if when == "early":
                    put_hooks(block)
            engine.fully_shard(model, mesh=mesh)
            if when == "late":
                for block in blocks:
                    put_hooks(block)
            found.append(_losses(model))
            assert comm.calls == len(sums) == 3 * len(blocks), (comm.calls, sums)
        assert_bitwise(found[0], found[1], f"{when}, {mesh}")


@on_ranks(4)
def test_what_a_hook_cannot_do_is_refused() -> None:
    state, hook = default_hooks.LowPrecisionState(dist.group.WORLD), LOW[0]
    for arguments, text in (
        ({"zero3_size": 2}, "two hops"),
        ({"deterministic": True}, "deterministic"),
        ({"verify": "always"}, "verify"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            ZeRO3(seeded(Mlp), **arguments).register_comm_hook(state, hook)
    inner = ZeRO3(seeded(Mlp))
    inner.register_comm_hook(state, hook)
    with pytest.raises(ValueError, match=r"hook: one was used .* the outermost one"):
        ZeRO3(torch.nn.Sequential(inner))
    with pytest.raises(ValueError, match="a callable"):
        ZeRO3(seeded(Mlp)).register_comm_hook(state, None)
    alone: Any = layerzero.fully_shard(
        seeded(Mlp), mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("a", "b"))["b"]
    )
    with pytest.raises(NotImplementedError, match="one rank has this unit alone"):
        alone.set_all_reduce_hook(print)


@on_ranks(2)
def test_a_hook_that_fails_leaves_the_step_usable() -> None:
    expected = _losses(ZeRO3(seeded(Mlp), auto_wrap_policy={Block}))
    model = ZeRO3(seeded(Mlp), auto_wrap_policy={Block})
    fails = [True]

    def hook(state: object, gradient: Tensor, chunk: Tensor) -> None:
        if fails:
            raise ArithmeticError("no")
        default_hooks.reduce_scatter_hook(state, gradient, chunk)

    model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), hook)
    with pytest.raises(ArithmeticError):
        _losses(model)
    fails.clear()
    assert_bitwise(_losses(model), expected, "after a failure")
