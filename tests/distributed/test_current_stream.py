"""Collectives that run on the current stream and return no work, as NCCL's with asyncOp=False.

On the simulated device test_streams.py runs each second rank so.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from layerzero.comm import collectives, exchanges, streams
from layerzero.comm.pending import Operation, Pending
from layerzero.comm.streams import Streams
from layerzero.flat.placement import ShardGroup
from layerzero.watch import watchdog
from layerzero.watch.watchdog import Watchdog

CPU = torch.device("cpu")


class Recorder:
    """A process group that keeps the options it is given."""

    def __init__(self) -> None:
        self.options: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.options.append(args[-1])


@pytest.mark.parametrize(
    ("backend", "has_work"), [("nccl", False), ("xccl", False), ("hccl", True), ("fake", True)]
)
def test_backends_known_to_use_the_current_stream_are_asked_to(backend, has_work) -> None:
    asked = Recorder()
    group = ShardGroup(asked, 0, (0, 1), backend, timedelta(seconds=1))
    whole, part = torch.zeros(4), torch.zeros(2)
    collectives._issue_all_gather(whole, part, group)
    collectives._issue_reduce_scatter(part, whole, "SUM", group)
    assert [options.asyncOp for options in asked.options] == [has_work] * 2
    with mock.patch.object(dist, "broadcast", return_value=None) as broadcast:
        exchanges.broadcast(whole, group, Operation("broadcast", "a", 1)).wait()
    assert broadcast.call_args.kwargs["async_op"] is has_work
    with mock.patch.object(dist, "all_to_all_single", return_value=None) as exchange:
        collectives.reduce_scatter(whole, group, Operation("sum", "a", 2), deterministic=True)
    assert exchange.call_args.kwargs["async_op"] is has_work


class Event:
    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened


def test_a_collective_without_a_work_is_done_when_the_stream_is_past_it() -> None:
    group = ShardGroup(None, 0, (0, 1), "nccl", timedelta(seconds=1))
    events: list[Event] = []

    def record() -> Event:
        events.append(Event())
        return events[-1]

    with mock.patch.object(watchdog, "run_periodically", lambda *_: None):
        dog = Watchdog(group, CPU, record, lambda: (record(),), lambda _: None, None)
        issued: list[tuple[bool, bool]] = []
        pending = Pending(Operation("all-gather", "a", 1, dog), group, 8)
        dog.watch(pending)
        pending.start(lambda: issued.append((pending.is_reached, pending.is_done)))
    assert issued == [(False, False)]
    reached, done = events
    assert not pending.is_done
    assert pending.wait() is done and len(events) == 2  # `wait` records no second one.
    reached.happened = True
    assert pending.is_reached and not pending.is_done
    done.happened = True
    dog.check()
    assert pending.is_done and not dog._in_flight


def test_what_follows_a_collective_has_an_event_after_it() -> None:
    group = ShardGroup(None, 0, (0, 1), "nccl", timedelta(seconds=1))
    order: list[object] = []

    def record() -> Event:
        order.append(Event())
        return order[-1]

    with mock.patch.object(watchdog, "run_periodically", lambda *_: None):
        dog = Watchdog(group, CPU, record, tuple, lambda _: None, None)
        pending = Pending(Operation("reduce-scatter", "a", 1, dog), group, 8)
        dog.watch(pending)
        pending.start(lambda: None)
        pending.then(lambda: order.append("scaled"))
        after = pending.wait()
    assert [type(each) for each in order] == [Event, str, Event] and order[-1] is after
    order[0].happened = True
    assert not pending.is_done


def test_an_error_of_the_call_names_the_collective() -> None:
    group = ShardGroup(None, 0, (0, 1), "nccl", timedelta(seconds=1))
    pending = Pending(Operation("all-gather", "a", 1), group, 8)

    def fail() -> None:
        raise RuntimeError("NCCL communicator was aborted")

    with (
        mock.patch.object(Pending, "diagnose", lambda pending, error: ValueError(pending.name)),
        pytest.raises(ValueError, match=r"all-gather of a \(#1\)"),
    ):
        pending.start(fail)


class WithoutPriorities:
    """A device module; its streams are their priorities."""

    current_stream = None

    def stream(self, stream: int) -> int:
        return stream

    def Stream(self, device: torch.device) -> int:
        return 0


class Module(WithoutPriorities):
    def Stream(self, device: torch.device, priority: int = 0) -> int:
        return priority


@pytest.mark.parametrize(("module", "urgent"), [(Module(), -1), (WithoutPriorities(), 0)])
def test_streams_that_compute_waits_for_are_urgent(module, urgent, monkeypatch) -> None:
    monkeypatch.setattr(streams.torch, "get_device_module", lambda _: module)
    made = Streams(torch.device("cuda", 0))
    carrying = (made.pre_unshard, made.unshard, made.reduce)
    assert [stream._stream for stream in carrying] == [urgent] * 3
    assert made.offload._stream == 0


class Context:
    """A stream that is a context, as torch's own are."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.is_current = False

    def __enter__(self) -> None:
        self.is_current = True

    def __exit__(self, *_: object) -> None:
        self.is_current = False

    def record_event(self) -> Event:
        assert self.is_current
        return Event()


def test_a_stream_that_is_a_context_is_entered_by_itself(monkeypatch) -> None:
    class OfContexts(Module):
        Stream = Context
        stream = None

    module = OfContexts()
    monkeypatch.setattr(streams.torch, "get_device_module", lambda _: module)
    made = Streams(torch.device("cuda", 0))
    with made.unshard as stream:
        before = made.record_event()
        assert made.events_before() == stream.events_before == (before,)
        stream.wait(None)
        assert stream.events_before == (before,)
    assert not stream._stream.is_current
