"""`layerzero.ledger` names what is planted, its parts add up, and off it leaves no trace. Under it
the engine computes the same bits, in every mode; its events add no race, and no wait."""

import functools
import json
import pickle
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero import ZeRO3
from layerzero.step_ledger import Ledger, recorder
from tests.harness import stream_uses
from tests.harness.checks import NANOSECOND_MS, check_ledger, of_milliseconds
from tests.harness.compare import linears
from tests.harness.fake_ranks import run_fake_ranks
from tests.harness.internals import Pending, root_state
from tests.harness.models import WIDTH, Block, Mlp, loss_of
from tests.harness.ranks import on_ranks
from tests.harness.recording import observed
from tests.harness.simulated_device import simulated_device

DELAY_S = 0.03


_model = functools.partial(linears, 4, 64, bias=True)


def _steps(model: ZeRO3, count: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(count):
        loss_of(model(torch.ones(2, 64))).backward()
        optimizer.step()
        optimizer.zero_grad()


def _recorded(model: ZeRO3, count: int = 2, plant: Any = nullcontext) -> Ledger:
    _steps(model, 2)
    with layerzero.ledger(model) as ledger, plant():
        _steps(model, count)
    return ledger


def _slow_link(delays: Callable[[Pending], float] = lambda _: 1) -> AbstractContextManager[None]:
    """Each collective arrives so many times `DELAY_S` after something began to wait for it."""

    def sleep(pending: Pending) -> None:
        if pending.works != ():
            time.sleep(DELAY_S * delays(pending))

    return observed(Pending, "wait_for_data", sleep)


def _named(ledger: Ledger) -> str:
    """The reason with the most milliseconds, on all ranks."""
    check_ledger(ledger)
    return max(ledger.reasons, key=lambda name: ledger.reasons[name])


def _named_at_last(expected: str, record: Callable[[], Ledger], tries: int = 4) -> str:
    """`_named` of a recording, made again while it is another reason than `expected`.

    For faults that delay all ranks alike: if other processes keep one rank longer, its peers wait
    for it, and the ledger rightly says so. All ranks see the same reasons, so all try again.
    """
    for _ in range(tries):
        named = _named(record())
        if named == expected:
            break
    return named


@pytest.mark.slow
@on_ranks(2)
def test_each_planted_fault_is_named() -> None:
    named = {}
    named["slow link"] = _named_at_last("transfer", lambda: _recorded(_model(), plant=_slow_link))
    late = _model(forward_prefetch=False, backward_prefetch=None)
    ledger = _recorded(late, plant=_slow_link)
    named["late issue"] = _named(ledger)
    assert sum(row.exposed_gather_ms for row in ledger.units) >= 4 * DELAY_S * 1e3
    named["tiny budget"] = _named(_recorded(_model(limit_all_gathers=1), plant=_slow_link))

    model = _model()
    for layer in model.module if dist.get_rank() == 1 else ():
        layer.register_forward_pre_hook(lambda *_: time.sleep(2 * DELAY_S))
    ledger = _recorded(model)
    first, second = ledger.ranks
    named["straggler"] = _named(ledger)
    assert second.waited_for_ms > 3 * DELAY_S * 1e3 > first.waited_for_ms, ledger.ranks
    assert second.compute_ms >= 8 * DELAY_S * 1e3

    model = _model()
    huge = functools.partial(_slow_link, lambda pending: "reduce-scatter of 2" in pending.name)
    ledger = _recorded(model, plant=huge)
    row = ledger.units[1]
    assert row.fqn == "1"
    named["one huge reduction"] = max(row.reasons, key=lambda name: row.reasons[name])
    assert named == {
        "slow link": "transfer",
        "late issue": "issued late",
        "tiny budget": "limiter",
        "straggler": "peer late",
        "one huge reduction": "previous reduction",
    }


def _traces(model: ZeRO3) -> list[object]:
    """What the engine calls beside its own methods."""
    root = root_state(model)
    return [
        method.__qualname__
        for name, of in vars(root.extensions).items()
        if name not in ("_all", "_of_buffers", "transport")
        for method in of
    ]


def _check_trace(ledger: Ledger, path: Path) -> None:
    """It is what Chrome's trace format asks for, and each lane can be drawn as one track."""
    ledger.save(path)
    events = json.loads(path.read_text())["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        if event["ph"] == "X":
            assert -1e3 <= event["ts"] < 60e6, "from the beginning, on the first rank's clock"
            assert event["dur"] >= 0
            span = event["ts"], event["ts"] + event["dur"]
            tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    assert {pid for pid, _ in tracks} == {0, 1}
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"compute", "gathers", "reductions"}
    for spans in tracks.values():
        open_until: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin + 1e3 * NANOSECOND_MS:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e3 * NANOSECOND_MS
            open_until.append(end)


def _clock() -> float:
    """As on machines of their own, whose clocks began at other times."""
    return time.perf_counter() + 100.0 * dist.get_rank()


@on_ranks(2)
@mock.patch.object(recorder, "host_s", _clock)
@mock.patch.object(recorder.HostClock, "now", staticmethod(_clock))
def test_a_ledger_has_the_figures_of_a_step_and_leaves_no_trace(tmp_path: Path) -> None:
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
        assert row.exposed_gather_ms > 0
    check_ledger(ledger)
    assert ledger.parts["between passes"] > 20
    assert [row.rank for row in ledger.ranks] == [0, 1]
    own = ledger.ranks[dist.get_rank()]
    assert own.step_ms == of_milliseconds(ledger.step_ms)
    assert own.exposed_gather_ms == of_milliseconds(sum(r.exposed_gather_ms for r in ledger.units))
    assert ledger.ranks[1].clock_error_ms > 0 == ledger.ranks[0].clock_error_ms
    root = root_state(model)
    (shard_group,) = root.units[0].handles[0].placement.groups
    offset, error = recorder.read_clock([shard_group], root.operations, root.device)
    assert abs(offset - 100.0 * own.rank) <= error < 1
    assert str(pickle.loads(pickle.dumps(ledger))) == str(ledger)
    _check_trace(ledger, Path(tmp_path) / f"{own.rank}.json")
    text = str(ledger)
    for part in ("blocks.1", "mean of 3 steps", "others waited for it"):
        assert part in text
    pytest.importorskip("matplotlib")
    if own.rank == 0:  # Not collective.
        ledger.plot(Path(tmp_path) / "step.png")
        assert (Path(tmp_path) / "step.png").stat().st_size > 10_000
    step()


@on_ranks(1)
def test_a_ledger_has_rows_for_one_rank_too() -> None:
    model = ZeRO3(Mlp(2), auto_wrap_policy={Block})
    with layerzero.ledger(model) as ledger:
        loss_of(model(torch.ones(2, WIDTH))).backward()
    assert (ledger.num_steps, len(ledger.ranks)) == (1, 1)
    assert [row.gather_bytes + row.reduce_bytes for row in ledger.units] == [0, 0, 0]
    assert sum(ledger.parts.values()) == of_milliseconds(ledger.step_ms)


@on_ranks(2)
def test_what_may_go_on_inside_and_around_a_ledger() -> None:
    torch.manual_seed(0)
    model = ZeRO3(Mlp(2), auto_wrap_policy={Block})
    other = ZeRO3(Mlp(1), auto_wrap_policy={Block})
    batch = torch.ones(2, WIDTH)

    def backward(each: ZeRO3) -> None:
        loss_of(each(batch)).backward()

    for each in (model, other):
        backward(each)
    plain = _traces(model)
    with (
        pytest.raises(ValueError, match="expected a ZeRO3 module, got Linear"),
        layerzero.ledger(nn.Linear(1, 1)),
    ):
        pass
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    views = layerzero.units(model)
    # Evaluations, passes, how many of them are not reduced, and steps of the optimizer.
    for evaluations, passes, unreduced, updates, steps in (
        (0, 0, 0, 0, 0),
        (2, 0, 0, 0, 2),
        (0, 2, 1, 0, 1),
        (0, 2, 0, 1, 1),
    ):
        with layerzero.ledger(model) as ledger:
            with torch.no_grad():
                for _ in range(evaluations):
                    model(batch)
            for number in range(passes):
                with model.no_sync() if number < unreduced else nullcontext():
                    backward(model)
            for _ in range(updates):
                optimizer.step()
        assert ledger.num_steps == steps
        sent = [(passes - unreduced) * view.nbytes for view in views]
        assert [row.reduce_bytes for row in ledger.units] == sent
        if not passes:
            gathered = [view.nbytes * bool(evaluations) for view in views]
            assert [row.gather_bytes for row in ledger.units] == gathered
            assert ledger.parts["backward"] == 0
        if not steps:
            assert ledger.step_ms == 0
            with pytest.raises(RuntimeError, match="no step ran"):
                ledger.plot("nowhere.png")
    # Two models, the rows of a part, and another ledger of the same model.
    with layerzero.ledger(model) as ledger, layerzero.ledger(other) as of_other:
        backward(model)
        backward(other)
        backward(other)
        with pytest.raises(RuntimeError, match="another ledger of this model is open"):
            layerzero.ledger(model.module.blocks[0]).__enter__()
    assert (ledger.num_steps, of_other.num_steps) == (1, 2)
    with layerzero.ledger(model.module.blocks[1]) as ledger:
        backward(model)
    assert [row.fqn for row in ledger.units] == ["blocks.1"]
    # Inside forward.
    entered = []

    def enter(*_: Any) -> None:
        entered.append(True)
        with layerzero.ledger(model):
            pass

    hook = model.module.blocks[0].register_forward_pre_hook(enter)
    with pytest.raises(RuntimeError, match="entered inside forward or backward"):
        model(batch)
    hook.remove()
    assert entered
    # It raises: in the block, in a forward, and one rank alone between steps.
    with pytest.raises(KeyError, match="planted"), layerzero.ledger(model) as ledger:
        backward(model)
        raise KeyError("planted")
    assert _traces(model) == plain
    with pytest.raises(RuntimeError, match="its block has ended without an error"):
        _ = ledger.units
    assert str(ledger) == "Ledger of a block that has not ended"
    with pytest.raises(RuntimeError), layerzero.ledger(model):
        model(torch.ones(2, WIDTH + 1))
    assert _traces(model) == plain
    # A join inside, and a ledger inside a join.
    with layerzero.ledger(model) as ledger:
        with layerzero.join(model, optimizer):
            for _ in range(1 + dist.get_rank()):
                backward(model)
                optimizer.step()
        backward(model)
        optimizer.step()
    assert ledger.num_steps == 3
    assert _traces(model) == plain
    with (
        layerzero.join(model, optimizer),
        pytest.raises(RuntimeError, match=r"inside layerzero\.join"),
    ):
        layerzero.ledger(model).__enter__()
    with pytest.raises(RuntimeError, match="wrapped again inside"), layerzero.ledger(model):
        layerzero.rewrap(model)
    backward(model)


def _findings_of_uses(uses: list[Callable[..., None]]) -> dict[str, list[str]]:
    found = {}
    for use in uses:
        with simulated_device(on_current_stream=use is not uses[0]) as device:
            model = stream_uses.wrapped()
            stream_uses.train(model, 2)
            with layerzero.ledger(model) as ledger:
                use(model)
            rows = ledger.units
            check_ledger(ledger)
            assert all(row.gather_ms > 0 and row.gather_bytes > 0 for row in rows)
            assert all(row.reduce_ms > 0 and row.reduce_bytes > 0 for row in rows)
            if use is stream_uses.plain_steps:
                with layerzero.ledger(model):
                    device.host_waits.clear()
                    stream_uses.train(model, 2, torch.optim.AdamW)
                    waits = sorted(set(map(str, device.host_waits)))
                assert waits == [], waits
            del model
        if device.findings:
            found[use.__name__] = device.findings
    return found


USES = [use for use in stream_uses.USES if use is not stream_uses.a_momentum_encoder]
"""The encoder gets no gradients, and would have run with gradients before."""


@pytest.mark.parametrize(
    "uses",
    [
        pytest.param([stream_uses.plain_steps, stream_uses.accumulation], id="default"),
        pytest.param(USES, id="uses", marks=pytest.mark.slow),
    ],
)
def test_a_ledger_orders_all_accesses_and_does_not_block_the_host(uses: list[Any]) -> None:
    # Records of other ranks are missing.
    for found in run_fake_ranks((0,), 2, _findings_of_uses, uses, timeout=300):
        assert found == {}
