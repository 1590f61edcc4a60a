"""Gradients, and parameters after steps, are those of the same model unsharded; on two ranks losses
in float32 are bitwise those of torch's own engines in the same run. Micro-batches add up:
unsharded, in shards after the first hop, or reduced one by one."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import layerzero
from layerzero import GradScaler, MixedPrecision, ZeRO3
from layerzero.optim.waiting_gradients import WaitingGradient
from tests.distributed.test_fully_shard import by_blocks
from tests.harness.checks import assert_bitwise, assert_same_parameters, named
from tests.harness.compare import (
    assert_same_gradients,
    assert_trains_alike,
    linears,
    sharded,
    trained_alike,
    zero3,
)
from tests.harness.models import (
    CASES,
    WIDTH,
    Block,
    Mlp,
    Parts,
    TiedAcrossUnits,
    Transformer,
    tensors_of,
)
from tests.harness.ranks import on_ranks
from tests.harness.recording import full_nbytes, gathered, gradient_nbytes, recorded_operations
from tests.harness.reference import (
    OPTIMIZERS,
    Terms,
    backward_of,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_parameters,
    mlp_batches,
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


@on_ranks(2)
def test_a_complex_parameter_has_the_gradient_of_the_reference() -> None:
    def build() -> nn.Module:
        weight = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex64))
        run = lambda own, x: (x.to(torch.complex64) @ own.weight).abs() + own.bias  # noqa: E731
        return Parts(run, weight=weight, bias=nn.Parameter(torch.randn(3)))

    trained_alike(build)


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


Micro = Sequence[Tensor]


PARAMETER_NUMEL = 3 * 64 * 64


def _waits(precision: MixedPrecision | None, **options: Any) -> int:
    """Bytes of gradients that wait on a rank after one micro-batch."""
    model = linears(3, 64, mixed_precision=precision, **options)
    with model.no_sync():
        forward_backward(model, torch.randn(2, 64))
    return sum(gradient_nbytes(model).values())


@on_ranks(4)
def test_what_waits_between_micro_batches_is_what_the_formula_says() -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for precision in (None, low):
        # float32, whatever dtype travels.
        full = PARAMETER_NUMEL * 4
        assert _waits(precision, accumulation="unsharded") == full
        assert _waits(precision, accumulation="sharded") == full // 4
        assert _waits(precision, accumulation="sharded", zero3_size=2) == full // 2
        assert _waits(precision, accumulation="sharded", zero3_size=1) == full
        assert (
            _waits(precision, accumulation="sharded", zero3_size=2, deterministic=True) == full // 4
        )
    # "auto" keeps whole sums if they fit: three quarters of them are what shards would spare.
    spared = 3 * PARAMETER_NUMEL
    for options, nbytes in (
        ({}, 4 * PARAMETER_NUMEL),  # The rank keeps five quarters anyway: what Adam needs.
        ({"limit_all_gathers": f"{spared}B"}, 4 * PARAMETER_NUMEL),
        ({"limit_all_gathers": f"{spared - 1}B"}, PARAMETER_NUMEL),
    ):
        assert _waits(None, **options) == nbytes, options


@pytest.mark.parametrize("accumulation", ["sharded", "unsharded"])
@on_ranks(4)
def test_the_outer_group_is_reduced_over_once(accumulation: str) -> None:
    """Hops of the micro-batches: all but the last, and the last."""
    model = linears(3, 64, accumulation=accumulation, zero3_size=2)
    batch = torch.randn(2, 64)
    verbs = []
    for sync in (False, False, True):
        model.set_requires_gradient_sync(sync)
        with recorded_operations(model) as operations:
            forward_backward(model, batch)
        names = [o.verb for o in operations if "reduce" in o.verb or "presence" in o.verb]
        verbs.append({name: names.count(name) for name in names})
    first = {"reduce-scatter": 3} if accumulation == "sharded" else {}
    last = {"reduce-scatter": 3, "outer reduce-scatter": 3, "gradient presence": 2}
    assert verbs == [first, first, last]


@on_ranks(2)
def test_sums_of_low_precision_gradients_are_float32() -> None:
    """256 gradients of 1 and one of 256 add up to 512; bfloat16 alone would stop at 256."""
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for accumulation in ("sharded", "unsharded"):
        model = ZeRO3(nn.Linear(1, 2, bias=False), mixed_precision=low, accumulation=accumulation)
        with model.no_sync():
            model(torch.full((1, 1), 256.0)).sum().backward()
            for _ in range(256):
                model(torch.ones(1, 1)).sum().backward()
        model(torch.zeros(1, 1)).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.tolist() == [512.0] * parameter.numel()


def _grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _assigns(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def _some_to_none(model: nn.Module) -> None:
    model.blocks[1].zero_grad()
    model.head.weight.grad = None


_ACTIONS: dict[str, Callable[[nn.Module], object]] = {
    "zero_grad": lambda model: model.zero_grad(),
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(),
    "to zero": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(False),
    "some to None": _some_to_none,
    "one to zero": lambda model: model.stem.weight.grad.zero_(),
    "mul_": lambda model: [grad.mul_(0.5) for grad in _grads(model)],
    "div_": lambda model: [grad.div_(torch.tensor(4.0)) for grad in _grads(model)],
    "foreach": lambda model: torch._foreach_mul_(_grads(model), torch.tensor(0.25)),
    "list": lambda model: torch._foreach_div_(_grads(model), [2.0] * len(_grads(model))),
    "data": lambda model: [grad.data.mul_(2.0) for grad in _grads(model)],
    "assigns": _assigns,
}
"""What programs do to gradients amid an accumulation; all exact in binary."""


_ACTED_ON: list[dict[str, Any]] = [
    {"accumulation": "unsharded"},
    {"accumulation": "sharded"},
    {"accumulation": "sharded", "zero3_size": 1, "outer": "replicate", "deterministic": True},
]


@on_ranks(2)
def test_a_program_acts_on_what_it_has_accumulated() -> None:
    """A micro-batch comes before the action, and one or two after it, of which the last reduces.
    Each action begins with reduced gradients in every other setting."""
    steps = mlp_batches(4)
    for turn, options in enumerate(_ACTED_ON):
        model, plain, micro = zero3(Mlp, Block, **options), seeded(Mlp), 1 + turn % 2
        for number, (name, action) in enumerate(_ACTIONS.items(), turn):
            terms, reduced_before = Terms(), number % 2
            for each in (model, plain):
                each.zero_grad()
            passes = [(step, True) for step in steps[:reduced_before]]
            passes += [(step, False) for step in steps[1 : 1 + micro]] + [(steps[3], True)]
            for index, (step, sync) in enumerate(passes):
                with nullcontext() if sync else model.no_sync():
                    forward_backward(model, step[dist.get_rank()])
                backward_of_all_ranks(plain, step, terms=terms)
                if index == reduced_before:
                    action(model)
                    action(plain)
            what = f"{name}, {options}, {reduced_before}: gradient of"
            assert_same_gradients(model, plain, terms, what)


@on_ranks(2)
def test_what_waits_can_be_read_and_is_no_gradient_for_an_optimizer() -> None:
    model, alone = zero3(Mlp, Block), seeded(Mlp)
    step = mlp_batches(1)[0]
    with model.no_sync():
        forward_backward(model, step[dist.get_rank()])
    forward_backward(alone, step[dist.get_rank()])
    for (name, parameter), own in zip(model.named_parameters(), alone.parameters(), strict=True):
        start, stop = parameter.layerzero.range
        assert_bitwise(parameter.grad.clone(), own.grad.view(-1)[start:stop], name)
        assert_bitwise(parameter.grad.abs().sum(), own.grad.view(-1)[start:stop].abs().sum(), name)
        with pytest.raises(RuntimeError, match="gradients of no_sync"):
            parameter.grad.add_(1.0)
        with pytest.raises(RuntimeError, match="gradients of no_sync"):
            parameter.grad.mul_(torch.ones(2))
    before = full_parameters(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()  # Nothing is reduced: no gradient.
    with model.summon_full_params(with_grads=True):
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_same_parameters(full_parameters(model), before)
    with pytest.raises(ValueError, match="mine"), model.summon_full_params():
        raise ValueError("mine")
    waiting = [parameter.grad for parameter in model.parameters()]
    assert all(isinstance(each, WaitingGradient) for each in waiting)
    with pytest.raises(RuntimeError, match="gradients of no_sync"):
        torch.neg(torch.ones_like(waiting[0].clone()), out=waiting[0])
    model.reduce_gradients()
    assert not any(isinstance(p.grad, WaitingGradient) for p in model.parameters())


@on_ranks(4)
def test_an_overflow_in_an_earlier_micro_batch_is_seen() -> None:
    low = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    for accumulation in ("sharded", "unsharded"):
        model = linears(3, 64, mixed_precision=low, accumulation=accumulation, zero3_size=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=4.0)
        with model.no_sync():
            loss = model(torch.randn(2, 64)).float().sum()
            scaler.scale(loss * (float("inf") if dist.get_rank() == 3 else 1.0)).backward()
        scaler.scale(model(torch.randn(2, 64)).float().sum()).backward()
        before = full_parameters(model)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert_same_parameters(full_parameters(model), before)


@on_ranks(2)
def test_the_first_unit_stays_between_micro_batches() -> None:
    for first in ("", "0"):
        blocks = nn.Sequential(*(Block() for _ in range(3)))
        module = blocks if first else nn.Sequential(nn.Linear(5, 5), blocks)
        model = ZeRO3(module, auto_wrap_policy={Block})
        counts = []
        for sync in (False, False, True, True):
            model.set_requires_gradient_sync(sync)
            with recorded_operations(model) as operations:
                forward_backward(model, torch.randn(2, 5))
            counts.append(len(gathered(operations)))
            resident = {fqn for fqn, nbytes in full_nbytes(model).items() if nbytes}
            assert resident == (set() if sync else {first})
        once = 5 if first else 7
        assert counts == [once, once - 1, once - 1, once]
