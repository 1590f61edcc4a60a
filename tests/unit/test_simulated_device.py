"""The simulated device of the tests does what it says: pools, streams, devices, events, waits."""

from collections.abc import Callable

import pytest
import torch

from tests.harness.internals import HostMemory
from tests.harness.simulated_device import simulated_device
from tests.harness.simulated_streams import COMES_NEVER

CPU = torch.device("cpu")


def test_streams_and_events_belong_to_a_device() -> None:
    with simulated_device() as device:
        assert device.current_device() == 0 and device.index == 1
        assert device.current_stream() is not device.current_stream(1)
        assert device.current_stream(torch.device("cuda", 1)) is device.compute
        with device.stream(device.Stream(1)) as _:
            assert device.current_device() == 1 and device.current_stream() is not device.compute
        assert device.current_device() == 0
        device.set_device(1)
        assert device.current_stream() is device.compute
        event = device.Event()
        event.record()
        with pytest.raises(RuntimeError, match="device 1 is recorded on a stream of 0"):
            event.record(device.current_stream(0))


BLOCKS: dict[str, Callable[[torch.Tensor], object]] = {
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "item": lambda t: t[0].item(),
    "equal": lambda t: torch.equal(t, t),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "write by mask": lambda t: t.index_put_((t > 0,), t.new_zeros(())),
    "unique": lambda t: t.unique(),
    "masked_select": lambda t: t.masked_select(t > 0),
    "bincount": lambda t: t.long().bincount(),
    "repeats": lambda t: t.repeat_interleave(t.long()),
    "made there": lambda t: torch.tensor([1.0], device=t.device),
    "moved there": lambda t: torch.tensor([1.0]).to(t.device, non_blocking=True),
    "blocking copy": lambda t: t.copy_(HostMemory(pin_memory=True, device=CPU).empty(3, t.dtype)),
    "pageable copy": lambda t: (
        HostMemory(pin_memory=False, device=CPU).empty(3, t.dtype).copy_(t, non_blocking=True)
    ),
}
DOES_NOT: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda t: (t + 1).sum(),
    "where with values": lambda t: torch.where(t > 0, t, -t),
    "index": lambda t: t[torch.ones(2, dtype=torch.long)],
    "repeats of a known size": lambda t: t.repeat_interleave(t.long(), output_size=3),
    "pinned copy": lambda t: (
        HostMemory(pin_memory=True, device=CPU).empty(3, t.dtype).copy_(t, non_blocking=True)
    ),
    "the host's own": lambda _: torch.tensor([1.0, 2.0]).add(1).tolist(),
    "the host's own number": lambda _: torch.tensor(1.0).item(),
}


def test_what_blocks_the_host_is_reported_and_nothing_else() -> None:
    for name, operation in (BLOCKS | DOES_NOT).items():
        with simulated_device() as device:
            operation(torch.ones(3))
        assert bool(device.host_waits) == (name in BLOCKS), name


def test_a_read_by_the_host_waits_for_the_current_stream_alone() -> None:
    with simulated_device() as device:
        side = device.Stream(device.index)
        with device.stream(side):
            made = torch.ones(3)
        made.tolist()
    (race,) = device.races
    assert (race.use.what, race.earlier.stream) == ("tolist", side.name)


def test_an_event_has_happened_when_the_host_could_know() -> None:
    with simulated_device(lag=3) as device:
        torch.ones(1)
        event = device.compute.record_event()
        assert [event.query() for _ in range(4)] == [False, False, True, True]
        later = device.compute.record_event()
        assert later.query(), "nothing was queued in between"
        torch.ones(1)
        later = device.compute.record_event()
        assert not later.query()
        later.synchronize()
        assert later.query() and [wait.what for wait in device.host_waits] == [
            "synchronize of an event on compute"
        ]
        later.synchronize()
        assert len(device.host_waits) == 1, "the host knew"


def test_what_the_host_has_asked_about_is_in_order() -> None:
    with simulated_device(lag=COMES_NEVER) as device:
        host = HostMemory(pin_memory=True, device=CPU).empty(3, torch.float32)
        host.copy_(torch.ones(3), non_blocking=True)
        event = device.compute.record_event()
        assert not event.query()
        host.add_(1)
        assert [race.use.stream for race in device.races] == ["the host"]
    with simulated_device(lag=0) as device:
        host = HostMemory(pin_memory=True, device=CPU).empty(3, torch.float32)
        host.copy_(torch.ones(3), non_blocking=True)
        assert device.compute.record_event().query()
        host.add_(1)
    assert device.findings == []


def test_a_number_that_the_host_sends_is_the_devices() -> None:
    with simulated_device() as device:
        number = HostMemory(pin_memory=True, device=CPU).empty(1, torch.float32).fill_(2)[0] * 1
        assert device.is_on_host(number)
        sent = number.to(CPU)
        assert not device.is_on_host(sent)
        assert device.is_on_host(number)
