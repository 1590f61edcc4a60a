"""In steady state a step records events again, and makes none."""

from __future__ import annotations

import functools
import gc
from collections import deque
from unittest import mock

from layerzero import ZeRO3
from layerzero.watch import watchdog
from layerzero.watch.events import EventPool, PooledEvent
from tests.harness.fake_ranks import run_fake_ranks
from tests.harness.simulated_device import Stream, simulated_device
from tests.harness.stream_uses import LAYERED, SETTINGS, accumulation, train, wrapped


def plain(model: ZeRO3) -> None:
    train(model, 1)


def _made_and_recorded(settings: dict, use) -> tuple[int, int]:
    """Events made and recorded by two steps, after three others."""
    counts = {"made": 0, "recorded": 0}
    record = EventPool.record

    def counted(pool: EventPool, stream: Stream) -> PooledEvent:
        counts["recorded"] += 1
        counts["made"] += not pool._free
        return record(pool, stream)

    # The watchdog lets go of events about once a second, when its thread looks.
    none = functools.partial(deque, maxlen=0)
    with mock.patch.object(watchdog, "deque", none), simulated_device():
        model = wrapped(**settings)
        for _ in range(3):
            use(model)
        gc.disable()
        try:
            with mock.patch.object(EventPool, "record", counted):
                use(model)
                use(model)
        finally:
            gc.enable()
    return counts["made"], counts["recorded"]


def _of_each(settings: list[dict], use) -> list[tuple[int, int]]:
    return [_made_and_recorded(each, use) for each in settings]


def test_a_step_makes_no_events() -> None:
    one = [SETTINGS[name] for name in ("default", "bfloat16", "deterministic")]
    layers = [LAYERED[name] for name in ("zero1", "replicate, bfloat16", "sums in shards")]
    found = run_fake_ranks((0, 1), 2, _of_each, one, plain)
    found += run_fake_ranks((0, 3), 4, _of_each, layers, accumulation)
    for made, recorded in (counts for each in found for counts in each):
        assert recorded > 30
        assert made == 0


def with_an_event_that_is_still_waited_for() -> object:
    """The pool gives out an event whose last record somebody has yet to wait for."""
    events: dict[int, object] = {}

    def record(pool: EventPool, stream: Stream) -> PooledEvent:
        event = events[id(pool)] = stream.record_event(events.get(id(pool)))
        return PooledEvent(event, deque())

    return mock.patch.object(EventPool, "record", record)


def _races_with_it() -> int:
    with with_an_event_that_is_still_waited_for(), simulated_device() as device:
        plain(wrapped())
    return len(device.races)


def test_an_event_recorded_again_too_early_is_found() -> None:
    assert min(run_fake_ranks((0, 1), 2, _races_with_it)) > 0
