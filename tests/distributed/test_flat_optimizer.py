"""AdamW, SGD and Lion in one pass: the bits of torch's fused optimizers on the same shards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from layerzero import MixedPrecision, OffloadPolicy, ZeRO3
from layerzero.optim import SGD, AdamW, Lion
from layerzero.state_dict.parameter_shard import ParameterShard
from tests.harness.checks import HAS_FMA, assert_bitwise, assert_same_on_all_ranks
from tests.harness.compare import assert_norm_of_gradients, sharded, zero3
from tests.harness.models import CASES, Block, Case, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.reference import batches_of, forward_backward

needs_fma = pytest.mark.skipif(not HAS_FMA, reason="torch has other arithmetic on this processor")

_PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "adamw": (AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (AdamW, torch.optim.AdamW, {"amsgrad": True, "maximize": True, "betas": (0.3, 0.9)}),
    "momentum": (SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "nesterov": (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "sgd": (SGD, torch.optim.SGD, {"weight_decay": 0.1}),
}
_BF16 = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups that interleave in every unit, the second with options of its own."""
    parameters = [*model.parameters()]
    return [
        {"params": parameters[::2]},
        {"params": parameters[1::2], "lr": 3e-3, "weight_decay": 0},
    ]


def _assert_same_state(ours: Any, theirs: Any, what: str) -> None:
    left, right = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert left.keys() == right.keys(), what
    for number in left:
        assert left[number].keys() == right[number].keys(), what
        for key, value in right[number].items():
            assert_bitwise(_plain(left[number][key]), _plain(value), f"{what}: {number} {key}")


def _assert_same_weights(ours: nn.Module, theirs: nn.Module, what: str) -> None:
    pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    for (name, own), (_, other) in pairs:
        assert_bitwise(own.detach(), other.detach(), f"{what}: {name}")


def _plain(value: Any) -> torch.Tensor:
    return value.local if isinstance(value, ParameterShard) else value


def _train_both(case: Case, pair: str, steps: int, **options: Any) -> None:
    make, make_theirs, arguments = _PAIRS[pair]
    models = sharded(case, **options), sharded(case, **options)
    ours = make(_groups(models[0]), lr=1e-2, **arguments)
    theirs = make_theirs(_groups(models[1]), lr=1e-2, fused=True, **arguments)
    what = f"{case.build} {pair} {options}"
    batches = batches_of(case, dist.get_world_size(), steps)
    for number, step in enumerate(batches):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            forward_backward(model, step[dist.get_rank()])
            optimizer.step()
            if number % 3:
                optimizer.zero_grad()  # Else gradients of the next step are added.
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] *= 0.9
        if number == steps // 2:
            # Each goes on with the other's state.
            states = ours.state_dict(), theirs.state_dict()
            ours.load_state_dict(states[1])
            theirs.load_state_dict(states[0])
    _assert_same_weights(models[0], models[1], what)
    _assert_same_state(ours, theirs, what)


_NAMES = ("mlp", "odd_shapes", "unused_parts", "frozen_parts", "tied_across_units")


def _few_pairs() -> None:
    for pair in _PAIRS:
        _train_both(CASES["unused_parts"], pair, 4, **_BF16)


def _all_pairs(in_full: bool) -> None:
    for number, pair in enumerate(_PAIRS):
        for name in _NAMES if in_full else [_NAMES[number % len(_NAMES)]]:
            _train_both(CASES[name], pair, 6)
    _train_both(CASES["mlp"], "adamw", 50)
    _train_both(CASES["mlp"], "adamw", 6, offload=OffloadPolicy(params=True))


@needs_fma
def test_training_has_the_bits_of_torchs_fused_optimizer() -> None:
    run_ranks(2, _few_pairs)


@needs_fma
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_training_has_these_bits_in_every_case(world_size: int, in_full: bool) -> None:
    run_ranks(world_size, _all_pairs, in_full)


def _write_unseen(model: ZeRO3, optimizer: Any, batch: torch.Tensor) -> None:
    """Writes through `.data`, which no version shows, reach the next forward all the same."""
    kept = [parameter.data for parameter in model.blocks[0].parameters()]
    for _ in range(2):
        forward_backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        for data in kept:
            data.zero_()
        with torch.no_grad():
            assert_bitwise(model.blocks[0](batch.bfloat16()), batch.bfloat16(), "a block of zeros")
        assert all(isinstance(each, nn.Parameter) for each in model.parameters())


def _see_unseen_writes() -> None:
    model = zero3(lambda: Mlp(depth=2), Block, **_BF16)
    _write_unseen(model, AdamW(model.parameters(), lr=0.1), torch.randn(2, 5))


def test_writes_through_data_reach_the_next_forward() -> None:
    run_ranks(2, _see_unseen_writes)


def _clip() -> None:
    batch = torch.randn(2, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    models = [zero3(Mlp, Block) for _ in range(2)]
    ours = AdamW(_groups(models[0]), lr=1e-2)
    theirs = torch.optim.AdamW(_groups(models[1]), lr=1e-2, fused=True)
    for step in range(5):
        for model in models:
            forward_backward(model, batch * (step + 1))
        before = [each.grad.clone() for each in models[0].parameters() if each.grad is not None]
        norm = ours.clip_grad_norm_(0.01)
        assert norm.dtype == torch.float32 and norm.dim() == 0
        assert_same_on_all_ranks(norm, "norm")
        assert_norm_of_gradients(norm, models[1])
        factor = torch.clamp(0.01 / (norm + 1e-6), max=1.0)
        for parameter in models[1].parameters():
            parameter.grad.mul_(factor)
        for optimizer in (ours, theirs):
            optimizer.step()
        after = [each.grad for each in models[0].parameters()]
        for old, new in zip(before, after, strict=True):
            assert_bitwise(new, old, "gradient")
        _assert_same_weights(models[0], models[1], f"step {step}")
        if step == 1:  # Gradients changed by hand, after they were delivered.
            forward_backward(models[0], batch)
            for parameter in models[0].parameters():
                parameter.grad.mul_(3.0)
            assert_norm_of_gradients(ours.clip_grad_norm_(1.0), models[0])
        for optimizer in (ours, theirs):
            optimizer.zero_grad()  # Drops the factor, too.
    forward_backward(models[0], batch * float("inf"))
    with pytest.raises(RuntimeError, match="norm of the gradients is"):
        ours.clip_grad_norm_(1.0, error_if_nonfinite=True)
    for norm_type in (1.0, float("inf")):
        ours.zero_grad()
        forward_backward(models[0], batch)
        own = ours.clip_grad_norm_(1.0, norm_type)
        assert_norm_of_gradients(own, models[0], norm_type)
    models[0].step_in_backward(ours)
    with pytest.raises(RuntimeError, match="step_in_backward"):
        ours.clip_grad_norm_(1.0)


@needs_fma
@pytest.mark.parametrize("world_size", [1, 2])
def test_clipping_is_folded_into_the_step(world_size: int) -> None:
    run_ranks(world_size, _clip)


def _step_in_backward() -> None:
    batches = batches_of(CASES["mlp"], dist.get_world_size(), 4)
    models = [sharded(CASES["mlp"]) for _ in range(2)]
    ours = AdamW(_groups(models[0]), lr=1e-2)
    theirs = torch.optim.AdamW(_groups(models[1]), lr=1e-2, fused=True)
    models[0].step_in_backward(ours)
    for step in batches:
        for model in models:
            forward_backward(model, step[dist.get_rank()])
        theirs.step()
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        _assert_same_weights(models[0], models[1], "step_in_backward")
    _assert_same_state(ours, theirs, "step_in_backward")


@needs_fma
def test_it_steps_in_backward() -> None:
    run_ranks(2, _step_in_backward)


class _Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(6) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum((weight.sum() for weight in self.weights), torch.zeros(()))


def _calls(function: Callable[[], Any]) -> int:
    """Calls of Python functions, and from Python of functions in C."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def _count_calls() -> None:
    for state in ("float32", "8bit"):
        found = []
        for count in (4, 64):
            model = ZeRO3(_Many(count))
            optimizer = AdamW(model.parameters(), state=state)  # type: ignore[arg-type]
            calls = []
            for _ in range(9):
                forward_backward(model, torch.ones(2))
                calls.append(
                    [
                        _calls(lambda optimizer=optimizer: optimizer.clip_grad_norm_(1.0)),
                        _calls(optimizer.step),
                        _calls(optimizer.zero_grad),
                    ]
                )
            # The fewest: finalizers, and waiting for a peer that is late, are calls as well.
            found.append([min(each) for each in zip(*calls, strict=True)])
        assert found[0] == found[1], state


def test_the_host_makes_as_many_calls_whatever_the_number_of_parameters() -> None:
    run_ranks(2, _count_calls)


def _refuse() -> None:
    model, other = zero3(Mlp, Block), zero3(Mlp, Block)
    loose = nn.Parameter(torch.randn(3))
    first = next(model.parameters())
    for wrong, message in [
        ([*model.parameters(), loose], r"of shape \(3,\) belongs to no ZeRO3 module that"),
        ([loose], r"of shape \(3,\) belongs to no ZeRO3 module;"),
        ([*model.parameters(), *other.parameters()], "'stem.weight' belongs to another ZeRO3"),
    ]:
        with pytest.raises(ValueError, match=message):
            AdamW(wrong, lr=1e-2)
    with pytest.raises(ValueError, match=r"expected state to be one of 'float32', .* got 'int4'"):
        AdamW(model.parameters(), state="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lr"):
        Lion(model.parameters(), lr=-1.0)
    optimizer = AdamW([{"params": [first]}], lr=1e-2)
    with pytest.raises(ValueError, match=r"'stem.weight' was given to two optimizers.* AdamW has"):
        SGD(model.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match="of shape"):
        optimizer.add_param_group({"params": [loose]})
    assert len(optimizer.param_groups) == 1
    del optimizer
    for first_one, second in ((torch.optim.SGD, AdamW), (AdamW, torch.optim.SGD)):
        held = first_one(model.parameters(), lr=1e-2)
        with pytest.raises(ValueError, match=rf"'stem.weight' was given .*: {first_one.__name__}"):
            second(model.parameters(), lr=1e-2).step()
        del held
    again = Lion(model.parameters(), lr=1e-2)

    def step_inside(_: torch.Tensor) -> None:
        again.step()

    output = model(torch.randn(2, 5))
    output.register_hook(step_inside)
    with pytest.raises(RuntimeError, match="inside a backward pass"):
        output.sum().backward()
    forward_backward(model, torch.randn(2, 5))
    again.step()


def test_bad_input_is_refused_with_names() -> None:
    run_ranks(2, _refuse)


def _lion() -> None:
    model: ZeRO3 = zero3(Mlp, Block)
    optimizer = Lion(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    plain = [each.detach().clone() for each in model.parameters()]
    averages = [torch.zeros_like(each) for each in plain]
    for number in range(5):
        forward_backward(model, torch.randn(2, 5, generator=torch.Generator().manual_seed(number)))
        for weight, average, parameter in zip(plain, averages, model.parameters(), strict=True):
            grad = parameter.grad
            direction = (average * 0.9 + grad * (1 - 0.9)).sign()
            weight.mul_(1 - 1e-2 * 0.1).add_(direction * -1e-2)
            average.mul_(0.95).add_(grad * (1 - 0.95))
        optimizer.step()
        optimizer.zero_grad()
        for weight, parameter in zip(plain, model.parameters(), strict=True):
            assert_bitwise(parameter.detach(), weight, "weight")


def test_lion_is_the_published_formula() -> None:
    run_ranks(2, _lion)
