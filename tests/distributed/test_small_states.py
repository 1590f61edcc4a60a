"""bfloat16 and 8-bit states: the same bits at every world size, where no border cuts a block; over
a mesh, too: tensor-parallel parameters, and experts on some ranks only."""

import copy
import functools
import itertools
import pickle
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerzero
from layerzero import ZeRO3
from layerzero.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from layerzero.optim import AdamW
from tests.distributed import test_experts as experts
from tests.distributed import test_tensor_parallel as tensor_parallel
from tests.distributed.test_tensor_parallel import Llama
from tests.harness.checks import assert_bitwise
from tests.harness.compare import zero3
from tests.harness.ranks import KeptRanks, on_ranks, run_ranks
from tests.harness.reference import full_parameters, seeded

_OPTIONS: dict[str, dict[str, Any]] = {"adamw": {}, "amsgrad": {"amsgrad": True, "maximize": True}}


def _build(dtype: torch.dtype = torch.float32) -> nn.Module:
    # Blocks of 256 that borders of 2, 3 and 4 shards cut, and a bias of 3 of which some ranks have
    # nothing.
    layers = nn.Linear(19, 283), nn.Tanh(), nn.Linear(283, 17), nn.Linear(17, 3)
    return nn.Sequential(*layers).to(dtype)


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


def _go_on(folder: str, saves: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train, and save on the way; or load what was saved, and train on."""
    after = {}
    for state, (name, options) in product(("bfloat16", "8bit"), _OPTIONS.items()):
        model, path = _model(), f"{folder}/{state} {name}"
        optimizer = AdamW(model.parameters(), lr=1e-2 if saves else 0.5, state=state, **options)
        if saves:
            _steps(model, optimizer, range(3))
            layerzero.checkpoint.save(path, model, optimizer)
        else:
            layerzero.checkpoint.load(path, model, optimizer)
        _steps(model, optimizer, range(3, 5))
        optimizer.state  # noqa: B018  # Shown: the next step starts from what is shown.
        _steps(model, optimizer, range(5, 7))
        after[state, name] = _state_of(model, optimizer)
    return after, {name: p.layerzero.range for name, p in model.named_parameters()}


def test_a_checkpoint_goes_on_with_the_same_bits_at_any_world_size(
    ranks: KeptRanks, tmp_path: Path
) -> None:
    saved = ranks(2, _go_on, str(tmp_path), True)
    for world_size in (1, 2, 3):
        loaded = ranks(world_size, _go_on, str(tmp_path), False)
        ranges = [each for _, each in (*saved, *loaded)] if world_size != 2 else []
        for result, _ in loaded:
            for (state, name), values in result.items():
                cut = ranges if state == "8bit" else ()
                what = f"{state} {name}, {world_size} ranks"
                _assert_same(values, saved[0][0][state, name], what, cut)


@on_ranks(2)
def test_state_dicts_lose_no_bit() -> None:
    mains = (torch.float32, torch.bfloat16, torch.float16)
    for state, main in itertools.product(("float32", "bfloat16", "8bit"), mains):
        model = zero3(functools.partial(_build, main), nn.Linear)
        optimizer = AdamW(model.parameters(), lr=1e-2, state=state)
        _steps(model, optimizer, range(3))
        weights = [each.detach().clone() for each in model.parameters()]
        held, by_name = (
            optimizer.state_dict(),
            get_optimizer_state_dict(model, optimizer, full=True),
        )
        copies = copy.deepcopy(held), pickle.loads(pickle.dumps(held))
        _steps(model, optimizer, range(3, 5))
        expected = _state_of(model, optimizer)
        # Back to the third step, by torch's way and by name; copies must not hang on the optimizer.
        for load in (
            *(functools.partial(optimizer.load_state_dict, each) for each in copies),
            functools.partial(set_optimizer_state_dict, model, optimizer, by_name),
        ):
            with torch.no_grad():
                for parameter, weight in zip(model.parameters(), weights, strict=True):
                    parameter.copy_(weight)
            load()
            _steps(model, optimizer, range(3, 5))
            _assert_same(_state_of(model, optimizer), expected, f"{state} for {main}")


@on_ranks(2)
def test_states_outlast_the_option_that_uses_them() -> None:
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


def _piece(whole: Tensor, sharded: nn.Parameter) -> Tensor:
    """This rank's part of a gradient."""
    info = sharded.layerzero
    if info.tensor_parallel is not None:
        ends = zip(info.tensor_parallel.offset, info.tensor_parallel.local_shape, strict=True)
        whole = whole[tuple(slice(at, at + size) for at, size in ends)]
    return whole.reshape(-1)[slice(*info.range)].clone()


def _stepped(model: ZeRO3, plain: nn.Module) -> dict[str, Tensor]:
    """The whole weights after steps with gradients that are the same at every world size."""
    optimizer = AdamW(model.parameters(), lr=1e-2, state="bfloat16")
    shapes = {name: p.shape for name, p in plain.named_parameters()}
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        drawn = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        for name, parameter in model.named_parameters():
            parameter.grad = _piece(drawn[name], parameter)
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


def _weights(num_data: int) -> list[dict[str, Tensor]]:
    """After steps that round by where an element is in its whole parameter; experts last."""
    found = []
    for arguments in ({}, {"zero3_size": 1})[:num_data]:
        model = tensor_parallel.wrapped(tensor_parallel.grid(num_data), **arguments)
        found.append(_stepped(model, seeded(Llama)))
    return [*found, _stepped(experts.wrapped(2), seeded(experts.Model))]


@pytest.mark.slow
def test_native_optimizers_have_the_same_bits_at_every_number_of_data_parallel_ranks() -> None:
    expected: dict[tuple[bool, str], Tensor] = {}
    for num_data in (1, 2):
        for *dense, of_experts in run_ranks(2 * num_data, _weights, num_data):
            for values in (*dense, of_experts):
                for name, value in values.items():
                    key = values is of_experts, name
                    assert_bitwise(value, expected.setdefault(key, value), str(key))
    assert len(expected) > 20
