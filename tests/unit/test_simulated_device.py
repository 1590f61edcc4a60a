"""The simulated device of the tests does what it says: pools, streams, devices, events, waits."""

from collections.abc import Callable

import pytest
import torch

from layerzero.flat.host_memory import HostMemory
from tests.harness.simulated_device import SimulatedDevice, Stream, simulated_device
from tests.harness.simulated_streams import COMES_NEVER

CPU = torch.device("cpu")


def _freed_after_a_use_on_compute(device: SimulatedDevice) -> Stream:
    """Use memory of a side stream, which is returned, on compute; and free it."""
    side = device.Stream(device.index)
    with device.stream(side):
        first = torch.ones(4)
    device.compute.wait_event(side.record_event())
    first.add(1)
    return side


def test_memory_handed_out_again_too_early_is_found() -> None:
    with simulated_device() as device:
        side = _freed_after_a_use_on_compute(device)
        with device.stream(side):
            torch.ones(4)
    (early,) = device.early_frees
    assert (early.home, early.earlier.stream) == (side.name, "compute")
    (race,) = device.races
    assert race.before_free and race.earlier.what == "add"


def test_a_free_is_seen_when_it_happens() -> None:
    """Not when memory is next allocated: the stream may have waited by then."""
    with simulated_device() as device:
        side = _freed_after_a_use_on_compute(device)
        side.wait_event(device.compute.record_event())
    assert len(device.early_frees) == 1 and not device.races


def test_other_bytes_of_the_same_memory_are_another_matter() -> None:
    with simulated_device() as device:
        whole = torch.zeros(8)
        side = device.Stream(device.index)
        side.wait_event(device.compute.record_event())
        with device.stream(side):
            whole[:4].add_(1)
        whole[4:].add_(1)
        assert not device.races
        whole[3:].add_(1)
    assert len(device.races) == 1


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


def test_side_streams_are_handed_out_in_turns() -> None:
    with simulated_device(num_streams=2) as device:
        first, second, third = (device.Stream(1) for _ in range(3))
    assert first is third and first is not second


BLOCKS: dict[str, Callable[[torch.Tensor], object]] = {
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t[0]),
    "float": lambda t: float(t[0]),
    "text": lambda t: f"{t[0]}",
    "contains": lambda t: 3.0 in t,
    "equal": lambda t: torch.equal(t, t),
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 0),
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


def _host_waits(operation: Callable[[torch.Tensor], object]) -> SimulatedDevice:
    with simulated_device() as device:
        operation(torch.ones(3))
    return device


@pytest.mark.parametrize("name", BLOCKS)
def test_what_blocks_the_host_is_reported(name: str) -> None:
    assert _host_waits(BLOCKS[name]).host_waits


@pytest.mark.parametrize("name", DOES_NOT)
def test_what_does_not_is_not(name: str) -> None:
    assert _host_waits(DOES_NOT[name]).host_waits == []


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


def test_seeds_draw_when_events_happen_and_streams_stay_in_order() -> None:
    def answers(seed: int) -> list[bool]:
        with simulated_device(seed=seed) as device:
            events = []
            for _ in range(30):
                torch.ones(1)
                events.append(device.compute.record_event())
            answers = [event.query() for event in events]
            last = max((i for i, answer in enumerate(answers) if answer), default=0)
            assert all(event.query() for event in events[:last])
            return answers

    assert answers(1) == answers(1)
    assert len({tuple(answers(seed)) for seed in range(5)}) > 1


def test_a_number_that_the_host_sends_is_the_devices() -> None:
    with simulated_device() as device:
        number = HostMemory(pin_memory=True, device=CPU).empty(1, torch.float32).fill_(2)[0] * 1
        assert device.is_on_host(number)
        sent = number.to(CPU)
        assert not device.is_on_host(sent)
        assert device.is_on_host(number)
