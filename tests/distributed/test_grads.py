"""Gradients, and parameters after steps, are those of the same model unsharded; on two ranks losses
in float32 are bitwise those of torch's own engines in the same run."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import layerzero
from layerzero import ZeRO3
from tests.distributed.test_fully_shard import by_blocks
from tests.harness.checks import assert_bitwise, assert_same_parameters, named
from tests.harness.compare import (
    assert_same_gradients,
    assert_trains_alike,
    sharded,
    trained_alike,
    zero3,
)
from tests.harness.models import (
    CASES,
    WIDTH,
    Block,
    Mlp,
    TiedAcrossUnits,
    Transformer,
    tensors_of,
)
from tests.harness.ranks import on_ranks
from tests.harness.reference import (
    OPTIMIZERS,
    backward_of,
    batches_of,
    full_parameters,
    plain,
    seeded,
    train_rank,
)

MOVED = ["transformer", "odd_shapes", "frozen_parts", "unused_parts"]
"""In these elements change places, and with them what AdamW keeps of each."""


@pytest.mark.parametrize(
    ("world_size", "optimizer"),
    [(1, "sgd_momentum"), (2, "sgd_momentum"), (3, "sgd_momentum"), (4, "adamw")],
)
@on_ranks()
def test_every_toy_model_trains_bitwise_like_one_process(world_size: int, optimizer: str) -> None:
    """And computes without gradients. What a structure of outputs needs does not ask how many ranks
    there are: all once."""
    names = CASES if world_size == 2 else [name for name in CASES if "_output" not in name]
    for name in names if optimizer == "sgd_momentum" else MOVED:
        case = CASES[name]
        # Momentum of the first step is in the second.
        batches = batches_of(case, world_size, steps=2)
        model, reference = sharded(case), plain(case)
        with named(name):
            assert_trains_alike(model, reference, batches, optimizer)
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    own, expected = (tensors_of(each(batches[0][0])) for each in (model, reference))
                    for left, right in zip(own, expected, strict=True):
                        assert not left.requires_grad
                        assert left.is_inference() == right.is_inference()
                        assert_bitwise(left.clone(), right.clone(), "output")


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias


@on_ranks(2)
def test_a_complex_parameter_has_the_gradient_of_the_reference() -> None:
    trained_alike(Complex)


# A tied parameter stays one parameter: one name, one gradient, which is the sum over its uses -----


@on_ranks(2)
def test_a_weight_tied_across_units_belongs_to_the_nearest_unit_around_them() -> None:
    # Two blocks of one stack share; the stack is a unit: it owns the weight, not the root.
    stacked = ZeRO3(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), seeded(TiedAcrossUnits)),
        auto_wrap_policy={Block, TiedAcrossUnits},
    )
    sizes = {unit.fqn: unit.num_parameters for unit in layerzero.units(stacked)}
    weight = 7 * WIDTH
    block = sum(parameter.numel() for parameter in Block().parameters())
    assert sizes["1"] == weight
    assert sizes["1.blocks.0"] == sizes["1.blocks.2"] == block - weight
    assert sizes["1.blocks.1"] == block
    assert sizes[""] == WIDTH * WIDTH + WIDTH


@on_ranks(2)
def test_a_unit_that_borrows_a_weight_can_be_called_directly() -> None:
    model, plain = zero3(TiedAcrossUnits, Block), seeded(TiedAcrossUnits)
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    run_last_block = backward_of(lambda model, batch: model.blocks[2](batch).square().sum())
    batches = [[batch] * dist.get_world_size()] * 2
    assert_trains_alike(model, plain, batches, run=run_last_block)
    assert_trains_alike(model, plain, batches)
    with model.summon_full_params(writeback=False), torch.no_grad():
        inside = model.blocks[2](batch)
    assert_bitwise(inside, model.blocks[2](batch), "called inside summon_full_params")


@on_ranks(2)
def test_a_tie_to_a_module_that_is_wrapped_already_is_refused_with_both_names() -> None:
    first, second = Block(), Block()
    second.up.weight = first.up.weight
    model = nn.Sequential(ZeRO3(first), second)
    names = r"(?s)(?=.*'1\.up\.weight')(?=.*('0\.up\.weight'|'up\.weight' of '0'))"
    with pytest.raises(ValueError, match=names):
        ZeRO3(model)


@on_ranks(2)
def test_a_layer_of_a_unit_may_be_called_directly() -> None:
    """Whole units are by random models, which also unshard them by hand."""
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    for each in (model, plain):  # The same batch on every rank: the mean is this one's.
        each.blocks[1].down(x).square().sum().backward()
    assert_same_gradients(model, plain)
    optimizers = []
    model.unshard()
    assert model.head.weight.shape == (3, WIDTH)
    assert model.blocks[0].up.weight.dim() == 1, "not of units inside"
    for given in (model.parameters(), model.named_parameters()):
        optimizers.append(torch.optim.SGD(given, lr=0.1))
    model.reshard()
    for optimizer in optimizers:
        assert optimizer.param_groups[0]["params"] == [*model.parameters()], "they get the shards"
    assert model.head.weight.dim() == 1


@on_ranks(2)
def test_parameters_that_stay_full_for_a_second_backward_are_never_stale() -> None:
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    x = torch.randn(4, WIDTH, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x, create_graph=True)
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.data.mul_(0.5)  # unseen by version counters
    assert torch.equal(model(x), plain(x))


@on_ranks(2)
def test_thirty_steps_are_bitwise_those_of_ddp_and_fully_shard() -> None:
    case = CASES["transformer"]
    # The same few again and again, so that there is something to learn.
    batches = batches_of(case, dist.get_world_size(), steps=3) * 10

    def train(model: nn.Module) -> list[Tensor]:
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        return train_rank(model, optimizer, batches, dist.get_rank())

    ddp, model = DistributedDataParallel(seeded(Transformer)), sharded(case)
    expected = train(ddp)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    theirs = by_blocks(torch.distributed.fsdp, seeded(Transformer), mesh=mesh)
    losses = {"DistributedDataParallel": expected, "fully_shard": train(theirs)}
    own = train(model)
    assert expected[-1] < expected[0] - 1.0, "it does not train"
    for engine, theirs in losses.items():
        for step, (loss, other) in enumerate(zip(own, theirs, strict=True)):
            assert_bitwise(loss, other, f"loss of step {step} against {engine}")
    assert_same_parameters(full_parameters(model), full_parameters(ddp.module))
