"""Units with arguments of their own, given by `auto_wrap_policy`; hook modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import MixedPrecision, OffloadPolicy, ZeRO3, units
from tests.harness.checks import assert_bitwise, warns_on_first_rank
from tests.harness.compare import assert_trains_alike, zero3
from tests.harness.internals import inner_units
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.recording import gathered, recorded_operations
from tests.harness.reference import seeded, train_rank


def batches(steps: int = 3) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(3, WIDTH, generator=generator) for _ in range(dist.get_world_size())]
        for _ in range(steps)
    ]


def policy(**own: dict[str, Any]):
    """Blocks are units; a block has the arguments given under its index."""

    def choose(module: nn.Module, fqn: str) -> bool | dict[str, Any]:
        return isinstance(module, Block) and own.get(f"block{fqn.rpartition('.')[2]}", True)

    return choose


BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = MixedPrecision(param_dtype=torch.float32, output_dtype=torch.bfloat16)


def _as_nested() -> None:
    """What a unit's own arguments do is what a `ZeRO3` of its own does."""
    model = zero3(
        Mlp,
        auto_wrap_policy=policy(block1={"mixed_precision": FP32, "reshard_after_forward": False}),
        mixed_precision=BF16,
    )
    module = seeded(Mlp)
    ZeRO3(module.blocks[1], mixed_precision=FP32, reshard_after_forward=False)
    nested = ZeRO3(module, auto_wrap_policy={Block}, mixed_precision=BF16)
    seen: list[torch.dtype] = []
    model.module.blocks[1].register_forward_hook(
        lambda block, args, output: seen.extend([block.up.weight.dtype, args[0].dtype])
    )
    model.module.blocks[2].register_forward_pre_hook(
        lambda block, args: seen.extend([block.up.weight.dtype, args[0].dtype])
    )
    losses = [
        train_rank(each, torch.optim.SGD(each.parameters(), lr=0.1), batches(), dist.get_rank())
        for each in (model, nested)
    ]
    for own, other in zip(*losses, strict=True):
        assert_bitwise(own, other, "loss")
    assert seen[:4] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    kept = {unit.fqn: unit.options.reshard_after_forward for unit in inner_units(model)}
    assert kept == {"": True, "blocks.0": True, "blocks.1": False, "blocks.2": True}


def test_a_unit_with_arguments_of_its_own_is_as_one_with_a_wrapper_of_its_own() -> None:
    run_ranks(2, _as_nested)


def _sums() -> None:
    """One unit's gradients are summed, the others' averaged."""
    model = zero3(Mlp, auto_wrap_policy=policy(block1={"gradient_reduction": "sum"}))
    plain = zero3(Mlp, Block)
    for each in (model, plain):
        each(batches()[0][dist.get_rank()]).sum().backward()
    with (
        model.summon_full_params(with_grads=True, writeback=False),
        plain.summon_full_params(with_grads=True, writeback=False),
    ):
        for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            factor = 2 if name.startswith("blocks.1.") else 1
            assert_bitwise(own.grad, other.grad * factor, name)


def test_the_gradient_reduction_may_be_a_units_own() -> None:
    run_ranks(2, _sums)


def _refused() -> None:
    for own, error, message in (
        (
            {"timeout": 3},
            ValueError,
            r"blocks\.1: auto_wrap_policy returned timeout=3; expected arg",
        ),
        ({"mixed_precision": "bf16"}, TypeError, r"blocks\.1: mixed_precision: expected a Mixed"),
        ({"reshard_after_forward": 3}, ValueError, r"blocks\.1: reshard_after_forward: expected"),
        ({"gradient_reduction": "avg"}, ValueError, r"blocks\.1: gradient_reduction: expected"),
        ({"offload": True}, TypeError, r"blocks\.1: offload: expected an OffloadPolicy"),
        ({"hook_module": "mlp"}, TypeError, r"blocks\.1: hook_module: expected an nn\.Module"),
    ):
        module = Mlp()
        with pytest.raises(error, match=message):
            ZeRO3(module, auto_wrap_policy=policy(block1=own))
        assert module.stem.weight.shape == (WIDTH, WIDTH), "nothing was changed"
    with warns_on_first_rank("cpu has no memory of its own"):
        own = {"offload": OffloadPolicy(params=True)}
        ZeRO3(Mlp(), auto_wrap_policy=policy(block1=own))


def test_what_units_share_and_bad_values_are_refused() -> None:
    run_ranks(2, _refused)


# Hook modules ---------------------------------------------------------------------------------


class Mixer(nn.Module):
    """Uses the parameters of a list that is no module to call, with a part that is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.bank = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.bank:
            x = self.inner(x + torch.tanh(x @ weight))
        return x


class Mixers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.mixers = nn.ModuleList(Mixer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for mixer in self.mixers:
            x = mixer(x)
        return x


def hooked(module: nn.Module, mixers_are_units: bool):
    """Each bank is a unit that the mixer around it gathers."""
    around = {id(mixer.bank): mixer for mixer in module.mixers}

    def choose(module: nn.Module, fqn: str) -> bool | dict[str, Any]:
        if id(module) in around:
            return {"hook_module": around[id(module)]}
        return isinstance(module, Block) or (mixers_are_units and isinstance(module, Mixer))

    return choose


def _hooks() -> None:
    for mixers_are_units in (False, True):
        module = seeded(Mixers)
        model = ZeRO3(module, auto_wrap_policy=hooked(module, mixers_are_units))
        with recorded_operations(model) as operations, torch.no_grad():
            model(batches()[0][0])
        order = gathered(operations)
        assert order[:3] == ["the root unit", "mixers.0.bank", "mixers.0.inner"]
        assert order.count("mixers.1.bank") == 1, "gathered once for all its uses"
        assert_trains_alike(model, seeded(Mixers), batches())
        assert {unit.state.name for unit in units(model)} == {"SHARDED"}


def test_a_unit_is_gathered_by_the_forward_of_its_hook_module() -> None:
    run_ranks(2, _hooks)
