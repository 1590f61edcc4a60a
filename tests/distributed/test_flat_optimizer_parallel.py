"""Native optimizers of tensor-parallel parameters, and of experts on some ranks only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerzero import ZeRO3
from layerzero.optim import AdamW
from tests.distributed import test_experts as experts
from tests.distributed import test_whole_tensor_parallel as whole
from tests.distributed.test_flat_optimizer import needs_fma
from tests.harness.checks import assert_bitwise, assert_norm
from tests.harness.ranks import run_ranks
from tests.harness.reference import seeded

_SMALL = ("bfloat16", "8bit")
"""States that depend on where an element is in its whole parameter."""
_EXPERTS = (experts.NamedExperts, experts.StackedExperts)


def _give(model: ZeRO3, plain: nn.Module, step: int) -> list[Tensor]:
    """The parts of gradients that are the same at every world size. Returns them whole."""
    draw = torch.Generator().manual_seed(step)
    drawn = {name: torch.randn(p.shape, generator=draw) for name, p in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = whole._piece(drawn[name], parameter)
    return list(drawn.values())


def _assert_as_torchs(models: list[ZeRO3], plain: nn.Module, what: str) -> None:
    ours = AdamW(models[0].parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(models[1].parameters(), lr=1e-2, fused=True)
    for step in range(4):
        for model in models:
            whole_gradients = _give(model, plain, step)
        norm = ours.clip_grad_norm_(0.5)
        assert_norm(norm, whole_gradients, what=f"{what}: norm")
        for parameter in models[1].parameters():
            parameter.grad.mul_(torch.clamp(0.5 / (norm + 1e-6), max=1.0))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
    for (name, own), other in pairs:
        assert_bitwise(own.detach(), other.detach(), f"{what}: {name}")


def _steps(model: ZeRO3, plain: nn.Module, state: Any) -> None:
    optimizer = AdamW(model.parameters(), lr=1e-2, state=state)
    for step in range(4):
        _give(model, plain, step)
        optimizer.step()
        optimizer.zero_grad()


def _full_of(model: ZeRO3) -> dict[str, Tensor]:
    with model.summon_full_params(writeback=False):
        return {
            name: whole._full(p).detach().clone().as_subclass(Tensor)
            for name, p in model.named_parameters()
        }


def _tensor_parallel(num_data: int, arguments: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    plain = seeded(whole.Model)
    pair = [whole._parallel(num_data, **arguments) for _ in range(2)]
    _assert_as_torchs(pair, plain, f"tensor parallel {arguments}")
    results = {}
    for state in _SMALL:
        model = whole._parallel(num_data, **arguments)
        _steps(model, plain, state)
        results[state] = _full_of(model)
    return results


def _experts(name: str) -> dict[str, dict[str, Tensor]]:
    ep, arguments = experts.SETTINGS[name]
    results = {}
    for kind in _EXPERTS:
        if kind is experts.StackedExperts and "replicates_experts" not in arguments:
            plain = seeded(lambda kind=kind: experts.Model(kind))
            pair = [experts.wrapped(ep, kind, **arguments) for _ in range(2)]
            _assert_as_torchs(pair, plain, f"experts {name} {kind.__name__}")
    kind = experts.NamedExperts
    for state in _SMALL:
        model = experts.wrapped(ep, kind, **arguments)
        _steps(model, seeded(lambda: experts.Model(kind)), state)
        results[state] = dict(experts.whole_values(experts.full_parameters(model)))
    return results


def _all(num_data: int) -> list[dict[str, dict[str, Tensor]]]:
    layered = [{"zero3_size": 1}] if num_data > 1 else []
    found = [_tensor_parallel(num_data, arguments) for arguments in ({}, *layered)]
    return [*found, _experts("ep 2")]


@needs_fma
@pytest.mark.slow
def test_they_have_torchs_bits_and_the_same_ones_at_every_number_of_data_parallel_ranks() -> None:
    expected: dict[tuple[bool, str, str], Tensor] = {}
    for num_data in (1, 2):
        for result in run_ranks(2 * num_data, _all, num_data):
            for number, by_state in enumerate(result):
                for state, values in by_state.items():
                    for name, value in values.items():
                        key = number == len(result) - 1, state, name
                        wanted = expected.setdefault(key, value)
                        if state == "bfloat16":
                            assert_bitwise(value, wanted, str(key))
                        else:  # Each rank has its own scales: four steps of at most lr / 5.
                            assert (value - wanted).abs().amax() < 4 * 1e-2 / 5, key
    assert len({name for _, _, name in expected}) > 20
