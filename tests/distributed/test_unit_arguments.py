"""Units with arguments of their own, given by `auto_wrap_policy`; hook modules."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import MixedPrecision, OffloadPolicy, ZeRO3, checkpoint
from tests.harness.checks import assert_bitwise, warns_on_first_rank
from tests.harness.compare import zero3
from tests.harness.internals import inner_units
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.ranks import on_ranks
from tests.harness.reference import mlp_batches, seeded, train_rank


def policy(**own: dict[str, Any]):
    """Blocks are units; a block has the arguments given under its index."""

    def choose(module: nn.Module, fqn: str) -> bool | dict[str, Any]:
        return isinstance(module, Block) and own.get(f"block{fqn.rpartition('.')[2]}", True)

    return choose


BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = MixedPrecision(param_dtype=torch.float32, output_dtype=torch.bfloat16)


@on_ranks(2)
def test_a_unit_with_arguments_of_its_own_is_as_one_with_a_wrapper_of_its_own() -> None:
    full = {"mixed_precision": FP32, "reshard_after_forward": False}
    summed = {"gradient_reduction": "sum"}
    own = policy(block0=summed, block1=full)
    model = zero3(Mlp, auto_wrap_policy=own, mixed_precision=BF16)
    module = seeded(Mlp)
    ZeRO3(module.blocks[0], mixed_precision=BF16, **summed)
    ZeRO3(module.blocks[1], **full)
    nested = ZeRO3(module, auto_wrap_policy={Block}, mixed_precision=BF16)
    seen: list[torch.dtype] = []
    model.module.blocks[1].register_forward_hook(
        lambda block, args, output: seen.extend([block.up.weight.dtype, args[0].dtype])
    )
    model.module.blocks[2].register_forward_pre_hook(
        lambda block, args: seen.extend([block.up.weight.dtype, args[0].dtype])
    )
    losses = [
        train_rank(each, torch.optim.SGD(each.parameters(), lr=0.1), mlp_batches(), dist.get_rank())
        for each in (model, nested)
    ]
    for own, other in zip(*losses, strict=True):
        assert_bitwise(own, other, "loss")
    assert seen[:4] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    kept = {unit.fqn: unit.options.reshard_after_forward for unit in inner_units(model)}
    assert kept == {"": True, "blocks.0": True, "blocks.1": False, "blocks.2": True}


@on_ranks(2)
def test_what_units_share_and_bad_values_are_refused() -> None:
    for own, error, message in (
        ({"timeout": 3}, ValueError, r"blocks\.1: .* returned timeout=3; expected arg"),
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
    with warns_on_first_rank("has no effect: the model is on the CPU"):
        own = {"offload": OffloadPolicy(params=True)}
        ZeRO3(Mlp(), auto_wrap_policy=policy(block1=own))


def _names(model: nn.Module) -> set[str]:
    return {name for name, value in model.state_dict().items() if isinstance(value, Tensor)}


@on_ranks(2)
def test_parts_may_be_on_fewer_ranks() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([each]) for each in range(2)]
    model = nn.Sequential(ZeRO3(Mlp(), groups[rank]), ZeRO3(Mlp(), groups[rank]))
    assert checkpoint.get_model_state_dict(model, full=True).keys() == _names(model)
    mixed = nn.Sequential(ZeRO3(Mlp(), groups[rank]), ZeRO3(Mlp()))
    assert checkpoint.get_model_state_dict(mixed, full=True).keys() == _names(mixed)
    with pytest.raises(ValueError, match="expected a ZeRO3 module, got Mlp, which contains none"):
        checkpoint.get_model_state_dict(Mlp(), full=True)
