"""Units with arguments of their own, given by `auto_wrap_policy`; hook modules."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as theirs

from layerzero import MixedPrecision, OffloadPolicy, ZeRO3, checkpoint
from tests.harness.checks import assert_bitwise, assert_same_parameters, warns_on_first_rank
from tests.harness.compare import zero3
from tests.harness.internals import inner_units
from tests.harness.models import WIDTH, Block, Mlp, loss_of
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.reference import mlp_batches, seeded, train_rank
from tests.harness.saved_models import Whole, assert_same, everything


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


def _parts(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Mlp())


def _build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _parts(seed)
    model[0] = ZeRO3(model[0])
    model[3] = ZeRO3(model[3], auto_wrap_policy={Block})
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        # The same on all ranks: nobody reduces what is not wrapped.
        batch = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
        loss_of(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _write(folder: str) -> Whole:
    model, optimizer = _build(0)
    _train(model, optimizer)
    plain = _parts(0)
    _train(plain, torch.optim.AdamW(plain.parameters(), lr=0.05))
    whole = everything(model, optimizer)
    assert_same_parameters(whole.model, plain.state_dict())
    assert whole.optimizer["state"].keys() == dict(plain.named_parameters()).keys()
    streamed = {name: value.clone() for name, value in checkpoint.stream_full(model, 200)}
    for name, value in streamed.items():
        assert_bitwise(value, whole.model[name], name)
    options = theirs.StateDictOptions(full_state_dict=True)
    found = theirs.get_state_dict(model, optimizer, options=options)
    assert_same(found, whole, "torch's full_state_dict")

    other, other_optimizer = _build(1)
    first = dist.get_rank() == 0
    given = whole.model if first else {}
    state = checkpoint.get_optimizer_state_dict(model, optimizer, full=True, rank0_only=True)
    assert bool(state) == first
    checkpoint.set_model_state_dict(other, given, broadcast_from_rank0=True)
    checkpoint.set_optimizer_state_dict(other, other_optimizer, state, broadcast_from_rank0=True)
    assert_same(everything(other, other_optimizer), whole, "broadcast")
    checkpoint.save(f"{folder}/ours", model, optimizer)
    weights, state = theirs.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/theirs")
    return whole


def _read(folder: str, expected: Whole) -> None:
    model, optimizer = _build(2)
    checkpoint.load(f"{folder}/ours", model, optimizer)
    assert_same(everything(model, optimizer), expected, "load")
    model, optimizer = _build(3)
    weights, state = theirs.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/theirs")
    theirs.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert_same(everything(model, optimizer), expected, "torch.distributed.checkpoint")


def test_parts_that_are_wrapped_by_themselves_make_one_checkpoint(
    ranks: KeptRanks, tmp_path: Path
) -> None:
    expected = ranks(2, _write, str(tmp_path))[0]
    ranks(3, _read, str(tmp_path), expected)


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
