"""bfloat16 and 8-bit states: the same bits of weights and states at every world size."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero import ZeRO3
from layerzero.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from layerzero.optim import SGD, AdamW, Lion, nonempty_parameters
from tests.harness.checks import assert_bitwise
from tests.harness.compare import zero3
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.reference import full_parameters

_MAKERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda p, **o: AdamW(p, lr=1e-2, **o),
    "amsgrad": lambda p, **o: AdamW(p, lr=1e-2, amsgrad=True, maximize=True, **o),
    "sgd": lambda p, **o: SGD(p, lr=1e-2, momentum=0.9, **o),
    "lion": lambda p, **o: Lion(p, lr=1e-3, **o),
}


def _build() -> nn.Module:
    # 1577 and 1411 elements: blocks of 256 that borders of 2, 3 and 4 shards cut, and a bias of 3
    # of which some ranks have nothing.
    return nn.Sequential(nn.Linear(19, 83), nn.Tanh(), nn.Linear(83, 17), nn.Linear(17, 3))


def _model(**options: Any) -> ZeRO3:
    return zero3(_build, nn.Linear, **options)


def _give_gradients(model: ZeRO3, step: int) -> None:
    """The same gradients at every world size; none for one parameter in one step."""
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(model.parameters()):
        info: Any = parameter.layerzero  # type: ignore[attr-defined]
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


def _train() -> dict[str, dict[str, Any]]:
    results = {}
    for state in ("bfloat16", "8bit"):
        for name, make in _MAKERS.items():
            model = _model()
            optimizer = make(model.parameters(), state=state)
            _steps(model, optimizer, range(4))
            if name == "adamw":
                optimizer.state  # noqa: B018  # Shown: the next step starts from what is shown.
            _steps(model, optimizer, range(4, 6))
            results[f"{state} {name}"] = _state_of(model, optimizer)
    return results


def _assert_same(actual: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert actual.keys() == expected.keys(), what
    for key, value in expected.items():
        assert_bitwise(torch.as_tensor(actual[key]), torch.as_tensor(value), f"{what}: {key}")


def test_weights_and_states_have_the_same_bits_at_every_world_size(ranks: KeptRanks) -> None:
    (one,) = ranks(1, _train)
    for world_size in (2, 3, 4):
        for result in ranks(world_size, _train):
            for name, values in result.items():
                _assert_same(values, one[name], f"{world_size} ranks, {name}")


def _save(folder: str) -> dict[str, Any]:
    after = {}
    for state in ("bfloat16", "8bit"):
        model = _model()
        optimizer = AdamW(model.parameters(), lr=1e-2, state=state)  # type: ignore[arg-type]
        _steps(model, optimizer, range(3))
        layerzero.checkpoint.save(f"{folder}/{state}", model, optimizer)
        _steps(model, optimizer, range(3, 6))
        after[state] = _state_of(model, optimizer)
    return after


def _load(folder: str) -> dict[str, Any]:
    after = {}
    for state in ("bfloat16", "8bit"):
        model = _model()
        optimizer = AdamW(model.parameters(), lr=0.5, state=state)  # type: ignore[arg-type]
        layerzero.checkpoint.load(f"{folder}/{state}", model, optimizer)
        _steps(model, optimizer, range(3, 6))
        after[state] = _state_of(model, optimizer)
    return after


def test_a_checkpoint_goes_on_with_the_same_bits_at_another_world_size(
    ranks: KeptRanks, tmp_path: Path
) -> None:
    saved = ranks(2, _save, str(tmp_path))[0]
    for loaded in ranks(3, _load, str(tmp_path)):
        for state in ("bfloat16", "8bit"):
            _assert_same(loaded[state], saved[state], state)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_state_dicts_lose_no_bit(world_size: int) -> None:
    for state in ("float32", "bfloat16", "8bit"):
        models = [_model() for _ in range(3)]
        makers = [AdamW(m.parameters(), lr=1e-2, state=state) for m in models]  # type: ignore[arg-type]
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


@on_ranks(3)
def test_states_outlast_the_option_that_uses_them() -> None:
    """A state whose option is off stays, through loads and steps, until the option is on again."""
    for state in ("float32", "bfloat16", "8bit"):
        for turned_off in (slice(0, 1), slice(0, 2)):
            for make, option in ((SGD, "momentum"), (AdamW, "amsgrad")):
                model = _model()
                parameters = [*model.parameters()]
                groups = [{"params": parameters[:3]}, {"params": parameters[3:]}]
                given: Any = {option: 0.9 if make is SGD else True, "state": state}
                optimizer = make(groups, lr=1e-2, **given)
                _steps(model, optimizer, range(4, 6))
                for group in optimizer.param_groups[turned_off]:
                    group[option] = 0.0 if make is SGD else False
                optimizer.load_state_dict(optimizer.state_dict())
                stays = "momentum_buffer" if make is SGD else "max_exp_avg_sq"
                members = [p for g in optimizer.param_groups[turned_off] for p in g["params"]]
                before = [optimizer.state[each][stays].float().clone() for each in members]
                _steps(model, optimizer, range(6, 9))
                after = [optimizer.state[each][stays].float() for each in members]
                for old, new in zip(before, after, strict=True):
                    assert_bitwise(new, old, f"{state} {stays}")


@on_ranks(2)
def test_ranks_agree_on_a_step_that_one_of_them_leaves_out() -> None:
    model = _model()
    optimizer = AdamW(model.parameters(), lr=1e-2, state="8bit")
    _steps(model, optimizer, range(2))
    before = _state_of(model, optimizer)
    _give_gradients(model, 2)
    # As torch's GradScaler does on a rank that alone saw an infinity.
    optimizer.found_inf = torch.tensor(float(dist.get_rank() == 1))  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.found_inf  # type: ignore[attr-defined]
    optimizer.zero_grad()
    _assert_same(_state_of(model, optimizer), before, "a step that one rank leaves out")
    _steps(model, optimizer, range(2, 4))


@on_ranks(2)
def test_a_failed_exchange_of_scales_is_final() -> None:
    model = _model()
    optimizer = AdamW(model.parameters(), lr=1e-2, state="8bit")
    _give_gradients(model, 0)
    failure = layerzero.errors.CollectiveError("planted")
    fails = mock.patch("layerzero.optim.edges.gather_small", side_effect=failure)
    with fails, pytest.raises(layerzero.errors.CollectiveError, match="planted"):
        optimizer.step()
    with pytest.raises(layerzero.errors.CollectiveError, match="earlier collective"):
        model(torch.zeros(2, 19))


@on_ranks(3)
def test_small_states_step_in_backward() -> None:
    for state in ("bfloat16", "8bit"):
        models = [_model(), _model()]
        # On most ranks, one has nothing of some units, and knows only the parameters it has.
        given: Any = [nonempty_parameters(models[0]), models[1].parameters()]
        makers = [AdamW(each, lr=1e-2, state=state) for each in given]  # type: ignore[arg-type]
        models[0].step_in_backward(makers[0])
        for step in range(4):
            batch = torch.randn(2, 19, generator=torch.Generator().manual_seed(step))
            for model in models:
                model(batch).square().mean().backward()
            makers[1].step()
            for optimizer in makers:
                optimizer.zero_grad()
        _assert_same(full_parameters(models[0]), full_parameters(models[1]), state)
