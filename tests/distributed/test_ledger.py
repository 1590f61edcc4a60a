"""`layerzero.ledger` names what is planted, its parts add up, and off it leaves no trace."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero import ZeRO3
from layerzero.comm.collectives import Pending
from layerzero.step_ledger import Ledger
from layerzero.step_ledger.records import REASONS
from tests.harness.internals import root_state
from tests.harness.models import WIDTH, Block, Mlp, loss_of
from tests.harness.ranks import run_ranks

DELAY_S = 0.03


class _Layer(nn.Module):
    """A unit that sleeps where it is told to."""

    in_backward = False
    """Whether the pass that runs is a backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forward_s = self.backward_s = self.blocked_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.forward_s)
        return _Sleeps.apply(self.linear(x), self)


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _Layer) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _Layer.in_backward = True
        time.sleep(ctx.layer.backward_s)
        if ctx.layer.blocked_s:
            # Through `PyDLL` the call keeps the GIL: no other Python thread runs.
            ctypes.PyDLL(None).usleep(int(ctx.layer.blocked_s * 1e6))
        return grad, None


def _model(**arguments: Any) -> ZeRO3:
    torch.manual_seed(0)
    module = nn.Sequential(*(_Layer(64) for _ in range(4)))
    return ZeRO3(module, auto_wrap_policy={_Layer}, **arguments)


def _steps(model: ZeRO3, count: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(count):
        loss_of(model(torch.ones(2, 64))).backward()
        _Layer.in_backward = False
        optimizer.step()
        optimizer.zero_grad()


def _recorded(model: ZeRO3, count: int = 2, plant: Any = nullcontext) -> Ledger:
    _steps(model, 2)
    with layerzero.ledger(model) as ledger, plant():
        _steps(model, count)
    return ledger


@contextmanager
def _slow_link(is_slow: Callable[[Pending], bool] = lambda _: True) -> Iterator[None]:
    """Each collective arrives `DELAY_S` after somebody began to wait for it."""
    wait = Pending._await

    def slow(pending: Pending) -> None:
        if pending.works and is_slow(pending):
            time.sleep(DELAY_S)
        wait(pending)

    with mock.patch.object(Pending, "_await", slow):
        yield


def _named(ledger: Ledger) -> str:
    """The reason with the most milliseconds, on all ranks."""
    for row in ledger.units:
        assert list(row.reasons) == list(REASONS)
        exposed = row.exposed_gather_ms + row.exposed_reduce_ms
        assert sum(row.reasons.values()) == pytest.approx(exposed, abs=1e-6)
        assert row.exposed_gather_ms <= row.gather_ms + 1e-6
        assert row.exposed_reduce_ms <= row.reduce_ms + 1e-6
    return max(ledger.reasons, key=lambda name: ledger.reasons[name])


def _faults() -> dict[str, str]:
    named = {"slow link": _named(_recorded(_model(), plant=_slow_link))}
    late = _model(forward_prefetch=False, backward_prefetch=None)
    named["late issue"] = _named(_recorded(late, plant=_slow_link))
    named["tiny budget"] = _named(_recorded(_model(limit_all_gathers=1), plant=_slow_link))

    model = _model()
    for layer in model.module if dist.get_rank() == 1 else ():
        layer.forward_s = layer.backward_s = DELAY_S
    ledger = _recorded(model)
    first, second = ledger.ranks
    named["straggler"] = _named(ledger)
    assert second.waited_for_ms > 4 * DELAY_S * 1e3 > first.waited_for_ms, ledger.ranks

    model = _model()
    for layer in model.module:
        layer.blocked_s = 2 * DELAY_S
    small = functools.partial(
        _slow_link, lambda pending: _Layer.in_backward and "all-gather" in pending.name
    )
    named["blocked host"] = _named(_recorded(model, plant=small))

    model = _model()
    huge = functools.partial(_slow_link, lambda pending: "reduce-scatter of 2" in pending.name)
    ledger = _recorded(model, plant=huge)
    row = ledger.units[1]
    assert row.fqn == "1"
    named["one huge reduction"] = max(row.reasons, key=lambda name: row.reasons[name])
    return named


@pytest.mark.slow
def test_each_planted_fault_is_named() -> None:
    for named in run_ranks(2, _faults):
        assert named == {
            "slow link": "transfer",
            "late issue": "issued late",
            "tiny budget": "limiter",
            "straggler": "peer late",
            "blocked host": "host-bound",
            "one huge reduction": "previous reduction",
        }


def _traces(model: ZeRO3) -> list[tuple[str, str]]:
    """Methods of the engine's objects that are on the object itself."""
    root = root_state(model)
    objects = (root.context, root.operations, root.scheduler, root.reducer, root.streams.reduce)
    return [
        (type(each).__name__, name)
        for each in objects
        for name, value in vars(each).items()
        if callable(value) and hasattr(type(each), name)
    ]


def _figures_of_a_step() -> None:
    torch.manual_seed(0)
    model = ZeRO3(Mlp(3), auto_wrap_policy={Block})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        loss_of(model(torch.ones(2, WIDTH))).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    plain = _traces(model)
    step()
    with layerzero.ledger(model) as ledger:
        assert len(_traces(model)) > len(plain)
        with pytest.raises(RuntimeError, match="once its block has ended"):
            _ = ledger.step_ms
        for _ in range(3):
            step()
            time.sleep(0.02)
    assert _traces(model) == plain
    assert ledger.num_steps == 3
    views = layerzero.units(model)
    assert [row.fqn for row in ledger.units] == [view.fqn for view in views]
    # The root stays full from forward to backward.
    for row, view in zip(ledger.units, views, strict=True):
        assert row.gather_bytes == view.nbytes * (2 if row.fqn else 1)
        assert row.reduce_bytes == view.nbytes
        assert list(row.reasons) == list(REASONS)
        exposed = row.exposed_gather_ms + row.exposed_reduce_ms
        assert sum(row.reasons.values()) == pytest.approx(exposed, abs=1e-6)
        assert 0 < row.exposed_gather_ms <= row.gather_ms + 1e-6
        assert row.exposed_reduce_ms <= row.reduce_ms + 1e-6
    assert sum(ledger.parts.values()) == pytest.approx(ledger.step_ms, rel=1e-6)
    assert ledger.parts["between passes"] > 20
    (group,) = ledger.groups
    assert group.ranks == (0, 1)
    assert group.bytes == sum(row.gather_bytes + row.reduce_bytes for row in ledger.units) / 2
    assert [row.rank for row in ledger.ranks] == [0, 1]
    own = ledger.ranks[dist.get_rank()]
    assert own.step_ms == pytest.approx(ledger.step_ms)
    assert own.exposed_gather_ms == pytest.approx(sum(r.exposed_gather_ms for r in ledger.units))
    step()


def test_a_ledger_has_the_figures_of_a_step_and_leaves_no_trace() -> None:
    run_ranks(2, _figures_of_a_step)
