"""bfloat16 and 8-bit states: the same bits at every world size, where no border cuts a block."""

import copy
import pickle
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import layerzero
from layerzero import ZeRO3
from layerzero.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from layerzero.optim import AdamW
from tests.harness.checks import assert_bitwise
from tests.harness.compare import zero3
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.reference import full_parameters

_MAKERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda p, **o: AdamW(p, lr=1e-2, **o),
    "amsgrad": lambda p, **o: AdamW(p, lr=1e-2, amsgrad=True, maximize=True, **o),
}


def _build() -> nn.Module:
    # Blocks of 256 that borders of 2, 3 and 4 shards cut, and a bias of 3 of which some ranks have
    # nothing.
    return nn.Sequential(nn.Linear(19, 283), nn.Tanh(), nn.Linear(283, 17), nn.Linear(17, 3))


def _model(**options: Any) -> ZeRO3:
    return zero3(_build, nn.Linear, **options)


def _give_gradients(model: ZeRO3, step: int) -> None:
    """The same gradients at every world size; none for one parameter in one step."""
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(model.parameters()):
        info: Any = parameter.layerzero
        whole = torch.randn(info.shape, generator=generator).reshape(-1) * 10.0 ** (step % 4 - 2)
        part = whole[slice(*info.range)].clone()
        parameter.grad = None if (number, step) == (2, 3) else part.to(parameter.dtype)


def _steps(model: ZeRO3, optimizer: Any, steps: range) -> None:
    for step in steps:
        _give_gradients(model, step)
        if step % 2:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def _state_of(model: ZeRO3, optimizer: Any) -> dict[str, Any]:
    states = get_optimizer_state_dict(model, optimizer, full=True)["state"]
    flat = {f"{n} {key}": value for n, own in states.items() for key, value in own.items()}
    return {**full_parameters(model), **flat}


def _ranges(model: ZeRO3) -> dict[str, tuple[int, int]]:
    return {name: p.layerzero.range for name, p in model.named_parameters()}


def _train() -> tuple[dict[str, Any], dict[str, Any]]:
    """What training leaves, by state and optimizer; and which elements this rank had."""
    results = {}
    for state, (name, make) in product(("bfloat16", "8bit"), _MAKERS.items()):
        model = _model()
        optimizer = make(model.parameters(), state=state)
        _steps(model, optimizer, range(4))
        if name == "adamw":
            optimizer.state  # noqa: B018  # Shown: the next step starts from what is shown.
        _steps(model, optimizer, range(4, 6))
        results[state, name] = _state_of(model, optimizer)
    return results, _ranges(model)


def _assert_same(
    actual: dict[str, Any],
    expected: dict[str, Any],
    what: str,
    ranges: Sequence[dict[str, tuple[int, int]]] = (),
) -> None:
    """Bits are the same, but in blocks of 256 elements inside which one of `ranges` ends."""
    assert actual.keys() == expected.keys(), what
    num_compared = 0
    for key, value in expected.items():
        left, right = torch.as_tensor(actual[key]).reshape(-1), torch.as_tensor(value).reshape(-1)
        ends = {end for each in ranges for end in each[key.partition(" ")[0]]} - {right.numel()}
        cut = torch.tensor([end // 256 for end in ends if end % 256], dtype=torch.int64)
        kept = ~torch.isin(torch.arange(right.numel()) // 256, cut)
        assert_bitwise(left[kept], right[kept], f"{what}: {key}")
        num_compared += int(kept.sum())
    assert num_compared > 0.5 * sum(torch.as_tensor(value).numel() for value in expected.values())


def test_bits_are_the_same_at_every_world_size_where_no_border_cuts_a_block(
    ranks: KeptRanks,
) -> None:
    ((one, _),) = ranks(1, _train)
    results = ranks(3, _train)
    ranges = [each for _, each in results]
    for result, _ in results:
        for (state, name), values in result.items():
            cut = ranges if state == "8bit" else ()
            _assert_same(values, one[state, name], f"{state} {name}", cut)


def _go_on(folder: str, saves: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train, and save on the way; or load what was saved, and train on."""
    after = {}
    for state in ("bfloat16", "8bit"):
        model = _model()
        optimizer = AdamW(model.parameters(), lr=1e-2 if saves else 0.5, state=state)
        if saves:
            _steps(model, optimizer, range(3))
            layerzero.checkpoint.save(f"{folder}/{state}", model, optimizer)
        else:
            layerzero.checkpoint.load(f"{folder}/{state}", model, optimizer)
        _steps(model, optimizer, range(3, 6))
        after[state] = _state_of(model, optimizer)
    return after, _ranges(model)


def test_a_checkpoint_goes_on_with_these_bits_at_another_world_size(
    ranks: KeptRanks, tmp_path: Path
) -> None:
    saved = ranks(2, _go_on, str(tmp_path), True)
    for world_size in (2, 3):
        loaded = ranks(world_size, _go_on, str(tmp_path), False)
        ranges = [each for _, each in (*saved, *loaded)] if world_size != 2 else []
        for result, _ in loaded:
            _assert_same(result["bfloat16"], saved[0][0]["bfloat16"], "bfloat16")
            _assert_same(result["8bit"], saved[0][0]["8bit"], f"8bit, {world_size} ranks", ranges)


@on_ranks(2)
def test_state_dicts_lose_no_bit() -> None:
    for state in ("float32", "bfloat16", "8bit"):
        models = [_model() for _ in range(3)]
        makers = [AdamW(m.parameters(), lr=1e-2, state=state) for m in models]
        for model, optimizer in zip(models, makers, strict=True):
            _steps(model, optimizer, range(3))
        _steps(models[0], makers[0], range(3, 5))
        # Back to the third step, by torch's way and by name; copies must not hang on the optimizer.
        held = makers[1].state_dict()
        for copied in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
            with torch.no_grad():
                weights = [each.clone() for each in models[2].parameters()]
            makers[1].load_state_dict(copied)
            _steps(models[1], makers[1], range(3, 5))
            with torch.no_grad():
                expected = _state_of(models[0], makers[0])
                _assert_same(_state_of(models[1], makers[1]), expected, state)
                for parameter, weight in zip(models[1].parameters(), weights, strict=True):
                    parameter.copy_(weight)
        by_name = get_optimizer_state_dict(models[2], makers[2], full=True)
        makers[1].zero_grad()
        set_optimizer_state_dict(models[1], makers[1], by_name)
        _steps(models[1], makers[1], range(3, 5))
        _assert_same(_state_of(models[1], makers[1]), _state_of(models[0], makers[0]), state)


@on_ranks(2)
def test_states_outlast_the_option_that_uses_them() -> None:
    """A state whose option is off stays, through loads and steps, until the option is on again."""
    for state in ("float32", "bfloat16", "8bit"):
        for turned_off in (slice(0, 1), slice(0, 2)):
            model = _model()
            parameters = [*model.parameters()]
            groups = [{"params": parameters[:3]}, {"params": parameters[3:]}]
            optimizer = AdamW(groups, lr=1e-2, amsgrad=True, state=state)
            _steps(model, optimizer, range(4, 6))
            for group in optimizer.param_groups[turned_off]:
                group["amsgrad"] = False
            optimizer.load_state_dict(optimizer.state_dict())
            members = [p for g in optimizer.param_groups[turned_off] for p in g["params"]]
            before, after = [], []
            for found in (before, after):
                found += [optimizer.state[p]["max_exp_avg_sq"].float().clone() for p in members]
                if found is before:
                    _steps(model, optimizer, range(6, 9))
            for old, new in zip(before, after, strict=True):
                assert_bitwise(new, old, f"{state} max_exp_avg_sq")


@on_ranks(2)
def test_a_parameter_that_gets_its_first_gradient_later_leaves_the_states_of_others() -> None:
    for state in ("float32", "bfloat16", "8bit"):
        models = [zero3(_build) for _ in range(2)]
        makers = [AdamW(model.parameters(), lr=1e-2, state=state) for model in models]
        for step in range(4):
            for model, optimizer in zip(models, makers, strict=True):
                _give_gradients(model, step)
                late = next(model.parameters())
                if step < 2 or model is models[0]:
                    late.grad = None
                optimizer.step()
        _, *expected = models[0].parameters()
        _, *others = models[1].parameters()
        for parameter, other in zip(expected, others, strict=True):
            assert_bitwise(other.detach(), parameter.detach(), state)


@on_ranks(3)
def test_small_states_step_in_backward() -> None:
    for state in ("bfloat16", "8bit"):
        models = [_model(), _model()]
        # On most ranks, one has nothing of some units, and knows only the parameters it has.
        given = [p for p in models[0].parameters() if p.numel()], models[1].parameters()
        makers = [AdamW(each, lr=1e-2, state=state) for each in given]
        models[0].step_in_backward(makers[0])
        for step in range(4):
            batch = torch.randn(2, 19, generator=torch.Generator().manual_seed(step))
            for model in models:
                model(batch).square().mean().backward()
            makers[1].step()
            for optimizer in makers:
                optimizer.zero_grad()
        _assert_same(full_parameters(models[0]), full_parameters(models[1]), state)
