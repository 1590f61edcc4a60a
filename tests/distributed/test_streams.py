"""On a device with streams every two accesses of the same memory are ordered, and the host is free.

Run on a simulated device (tests/harness/simulated_device.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from layerzero import BackwardPrefetch, MixedPrecision, OffloadPolicy, ZeRO3, pregather, units
from layerzero.comm.collectives import Pending
from layerzero.comm.streams import DeviceStream, Streams, _OnStream
from layerzero.runtime.context import RuntimeContext
from layerzero.runtime.reducer import GradientReducer
from layerzero.runtime.reduction import Reduction
from layerzero.runtime.unit import Unit
from tests.harness.internals import inner_units, root_state
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import run_ranks
from tests.harness.simulated_device import SimulatedDevice, simulated_device

MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)


def wrapped(**arguments) -> ZeRO3:
    torch.manual_seed(0)
    group = make_plain_group(timedelta(seconds=60))
    return ZeRO3(Mlp(3), group, auto_wrap_policy={Block}, **arguments)


def train(
    model: ZeRO3, steps: int = 3, optimizer_class: Callable[..., Optimizer] = MOMENTUM
) -> list[torch.Tensor]:
    """The default's accesses are of the same kinds as AdamW's, in a quarter of the operators."""
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(3, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def plain_steps(model: ZeRO3) -> None:
    train(model, 3, torch.optim.AdamW)


def accumulation(model: ZeRO3) -> None:
    for sync in (False, False, True, True):
        with nullcontext() if sync else model.no_sync():
            model(torch.randn(3, WIDTH)).sum().backward()
    train(model, 1)


def evaluation_between(model: ZeRO3) -> None:
    train(model, 2)
    with torch.no_grad():
        model(torch.randn(3, WIDTH))
    train(model, 2)


def clipping(model: ZeRO3) -> None:
    train(model, 1)
    model(torch.randn(3, WIDTH)).sum().backward()
    model.clip_grad_norm_(0.1)
    train(model, 1)


def summoning(model: ZeRO3) -> None:
    train(model, 1)
    with model.summon_full_params(), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    train(model, 2)


def explicit_unshard(model: ZeRO3) -> None:
    train(model, 1)
    handle = model.unshard(async_op=True)
    handle.wait()
    model.reshard()
    train(model, 1)


def pregathering(model: ZeRO3) -> None:
    for wait in (True, False):
        for _ in range(2):
            pregather(model, wait=wait)
            train(model, 1)
    units(model)[1].unshard()
    pregather(model)
    train(model, 1)


def recomputation(model: ZeRO3) -> None:
    for block in model.module.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    train(model)


def several_forwards(model: ZeRO3) -> None:
    train(model, 1)
    outputs = [model(torch.randn(3, WIDTH)) for _ in range(3)]
    for output in reversed(outputs):
        output.sum().backward()
    train(model, 1)


def pipelining(model: ZeRO3) -> None:
    outputs = [model(torch.randn(3, WIDTH)) for _ in range(2)]
    for index in range(4):
        with nullcontext() if index == 3 else model.no_sync():
            outputs[index].sum().backward()
        if index < 2:
            outputs.append(model(torch.randn(3, WIDTH)))
    train(model, 1)


def keeping_units(model: ZeRO3) -> None:
    """What a stage of a pipeline does, gathered by itself or by the schedule."""
    root = root_state(model)
    for by_schedule in (False, True):
        with root.micro_batches() as last_is_next:
            if by_schedule:
                root.unshard_all()
            outputs = [model(torch.randn(3, WIDTH)) for _ in range(3)]
            for index, output in enumerate(outputs):
                if index == 2:
                    last_is_next()
                with nullcontext() if index == 2 else model.no_sync():
                    output.sum().backward()
        train(model, 1)


def optimizing_after_a_forward(model: ZeRO3) -> None:
    """Weights may be written on the host as soon as a forward has returned."""
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            model(torch.randn(3, WIDTH))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    train(model, 1)


USES = [
    plain_steps,
    accumulation,
    evaluation_between,
    clipping,
    summoning,
    explicit_unshard,
    pregathering,
    recomputation,
    several_forwards,
    pipelining,
    keeping_units,
]
SETTINGS = {
    "default": {},
    "bfloat16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    "deterministic": {"deterministic": True},
    "three ahead, no limit": {"forward_prefetch": 3, "limit_all_gathers": False},
    "backward post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "no prefetch": {"forward_prefetch": False, "backward_prefetch": None},
    "stays full": {"reshard_after_forward": False},
    "sum": {"gradient_reduction": "sum"},
    "sums in shards": {"accumulation": "sharded"},
}
LAYERED = {
    "zero1": {"zero3_size": 2},
    "zero1, bfloat16": {
        "zero3_size": 2,
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
    },
    "replicate": {"zero3_size": 2, "outer": "replicate"},
    "replicate, bfloat16": {
        "zero3_size": 2,
        "outer": "replicate",
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    },
    "deterministic": {"zero3_size": 2, "deterministic": True},
    "sums in shards": {"zero3_size": 2, "accumulation": "sharded"},
    "sums in shards, replicate": {
        "zero3_size": 2,
        "outer": "replicate",
        "accumulation": "sharded",
    },
    "kept shards": {
        "zero3_size": 2,
        "outer": "shard",
        "reshard_after_forward": "compute_shard",
    },
    "whole parameters": {"zero3_size": 1},
    "whole parameters, replicated": {"zero3_size": 1, "outer": "replicate"},
}


OFFLOADED = {
    "sums": {"offload": OffloadPolicy(grads=True), "accumulation": "unsharded"},
    "sums in shards": {"offload": OffloadPolicy(grads=True), "accumulation": "sharded"},
    "sums in layers": {
        "offload": OffloadPolicy(grads=True),
        "accumulation": "sharded",
        "zero3_size": 1,
    },
    "bfloat16 sums": {
        "offload": OffloadPolicy(grads=True),
        "accumulation": "unsharded",
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
    },
    "parameters": {"offload": OffloadPolicy(params=True)},
    "bfloat16 parameters": {
        "offload": OffloadPolicy(params=True),
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
    },
    "everything": {"offload": OffloadPolicy(params=True, grads=True), "accumulation": "sharded"},
    "whole parameters": {"offload": OffloadPolicy(params=True), "zero3_size": 1},
}
HOST_USES = [
    plain_steps,
    accumulation,
    evaluation_between,
    recomputation,
    pipelining,
    optimizing_after_a_forward,
]


def _races_with_host(settings: dict, uses: list) -> dict[str, list[str]]:
    found = {}
    for use in uses:
        with simulated_device() as device:
            use(wrapped(**settings))
        found[use.__name__] = sorted({*device.races, *device.early_frees})
    return found


@pytest.mark.parametrize("settings", OFFLOADED)
def test_every_two_accesses_are_ordered_with_the_host(settings: str) -> None:
    for found in run_ranks(2, _races_with_host, OFFLOADED[settings], HOST_USES):
        assert found == {use.__name__: [] for use in HOST_USES}


def _races(settings: dict) -> dict[str, list[str]]:
    found = {}
    for use in USES:
        with simulated_device() as device:
            use(wrapped(**settings))
        found[use.__name__] = sorted({*device.races, *device.early_frees})
    return found


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_two_accesses_are_ordered(settings: str) -> None:
    for found in run_ranks(2, _races, SETTINGS[settings]):
        assert found == {use.__name__: [] for use in USES}


@pytest.mark.parametrize("settings", LAYERED)
def test_every_two_accesses_are_ordered_with_an_outer_axis(settings: str) -> None:
    # Whole parameters leave two ranks an outer axis.
    world_size = 2 * LAYERED[settings]["zero3_size"]
    for found in run_ranks(world_size, _races, LAYERED[settings], timeout=120):
        assert found == {use.__name__: [] for use in USES}


def _blocks_host() -> list[str]:
    with simulated_device() as device:
        model = wrapped()
        train(model, 2)
        device.host_waits.clear()
        # Not AdamW: it reads its step count, which a device leaves on the host.
        train(model, 2, torch.optim.SGD)
        assert device.host_waits == []
        model.clip_grad_norm_(1.0).item()
    return device.host_waits


def test_no_operation_of_a_step_blocks_the_host() -> None:
    """`item()` at the end is the test's own: it proves that the device reports host waits."""
    assert run_ranks(2, _blocks_host) == [["_local_scalar_dense"]] * 2


def _waits_for_the_reduction_before(mode: BackwardPrefetch | None) -> list[bool]:
    """For each block in backward, whether it waits for the reduction that was queued last."""
    waits: list[bool] = []
    last: dict[int, int] = {}
    with simulated_device() as device:
        model = wrapped(backward_prefetch=mode)
        train(model, 2, torch.optim.SGD)
        loss = model(torch.randn(3, WIDTH)).sum()
        reduce, show = GradientReducer.reduce, Unit.show_unsharded

        def reducing(reducer: GradientReducer, unit: Unit) -> None:
            nonlocal last
            reduce(reducer, unit)
            last = device.queued_collectives

        def showing(unit: Unit) -> None:
            show(unit)
            if last and unit.fqn:
                waits.append(device.compute_waits_for(last))

        with (
            mock.patch.object(GradientReducer, "reduce", reducing),
            mock.patch.object(Unit, "show_unsharded", showing),
        ):
            loss.backward()
    return waits


@pytest.mark.parametrize(
    ("mode", "waits"),
    [(None, True), (BackwardPrefetch.BACKWARD_PRE, False), (BackwardPrefetch.BACKWARD_POST, False)],
    ids=["on demand", "pre", "post"],
)
def test_a_prefetched_unit_does_not_wait_for_the_reduction_before_it(mode, waits: bool) -> None:
    for found in run_ranks(2, _waits_for_the_reduction_before, mode):
        assert len(found) >= 2 and set(found) == {waits}


def _host_waits(wait: bool) -> int:
    with simulated_device() as device:
        model = wrapped()
        train(model, 1)
        assert device.races == []
        pregather(model, wait=wait)
        # The host itself reads what was gathered.
        for unit in inner_units(model):
            for handle in unit.handles:
                device._access(handle.full, device._host, "a read", writes=False)
    return len(device.races)


def test_pregathering_waits_on_the_host_when_asked() -> None:
    assert run_ranks(2, _host_waits, True) == [0, 0]
    assert min(run_ranks(2, _host_waits, False)) > 0


def _losses(simulated: bool) -> list[torch.Tensor]:
    if not simulated:
        return train(wrapped(), 4)
    with simulated_device():
        return train(wrapped(), 4)


def test_the_simulation_trains_like_the_cpu() -> None:
    def values(results: list[list[torch.Tensor]]) -> list[list[float]]:
        return [[loss.item() for loss in losses] for losses in results]

    assert values(run_ranks(2, _losses, True)) == values(run_ranks(2, _losses, False))


# What the simulation finds when a wait is missing ---------------------------------------------


def without_waiting_for_marks() -> object:
    return mock.patch.object(DeviceStream, "wait", lambda *_: None)


def without_waiting_for_gathers() -> object:
    return mock.patch.object(_OnStream, "wait", lambda _: None)


class _Never:
    """An attribute that cannot be set: the event is always None, for nothing to wait for."""

    def __get__(self, *_: object) -> None:
        return None

    def __set__(self, *_: object) -> None: ...


def without_the_event_of_weights() -> object:
    return mock.patch.object(RuntimeContext, "weights_written", _Never(), create=True)


def without_waiting_before_frees() -> object:
    return mock.patch.object(RuntimeContext, "before_free", lambda _: None)


def without_memory_of_compute_for_chunks() -> object:
    return mock.patch.object(Reduction, "_allocate_chunk", lambda *_: None)


def with_the_current_device() -> object:
    """Not the model's: the stream of another device, where nothing is queued."""

    def record_compute_event(streams: Streams) -> object:
        return streams._module.current_stream().record_event()

    return mock.patch.object(Streams, "record_compute_event", record_compute_event)


def _without_waiting_for(verb: str) -> object:
    """For a collective's end, before its result is used on the stream that started it."""
    original = Pending._await

    def skipping(pending: Pending) -> None:
        if pending.operation.verb != verb:
            original(pending)

    return mock.patch.object(Pending, "_await", skipping)


def without_waiting_for_the_first_hop() -> object:
    return _without_waiting_for("reduce-scatter")


def without_waiting_for_the_outer_gather() -> object:
    return _without_waiting_for("outer all-gather")


def without_the_streams_event() -> object:
    """The stream is never ordered after the collective."""

    def enqueue_wait(stream: DeviceStream, pending: object, on_done: object = None) -> object:
        return _OnStream(stream._current_stream, stream.record_event(), pending)

    return mock.patch.object(DeviceStream, "enqueue_wait", enqueue_wait)


def _with_stream(change: Callable[[Streams], None]) -> object:
    original = Streams.__init__

    def changed(streams: Streams, device: torch.device, finishing_thread: bool) -> None:
        original(streams, device, finishing_thread)
        change(streams)

    return mock.patch.object(Streams, "__init__", changed)


def without_the_event_of_the_cast() -> object:
    return _with_stream(lambda streams: setattr(streams.pre_unshard, "record_event", lambda: None))


def without_the_event_of_collected_gradients() -> object:
    return _with_stream(lambda streams: setattr(streams.reduce, "wait", lambda _: None))


def without_the_host_waiting() -> object:
    return mock.patch.object(Streams, "wait_on_host", lambda *_: None)


def without_the_event_of_uploads() -> object:
    return mock.patch.object(RuntimeContext, "shard_uploaded", _Never(), create=True)


def without_the_event_of_offloaded_chunks() -> object:

    def only_recorded(_: object, offload: DeviceStream) -> object:
        return offload.record_event()

    return mock.patch.object(Reduction, "_wait_for_offload", staticmethod(only_recorded))


def without_waiting_on_the_offload_stream() -> object:
    return _with_stream(lambda streams: setattr(streams.offload, "wait", lambda _: None))


MISSING: list[tuple[Callable[[], object], str]] = [
    (without_waiting_for_marks, "default"),
    (without_waiting_for_gathers, "default"),
    (without_the_event_of_weights, "default"),
    (without_the_event_of_weights, "bfloat16"),
    (without_waiting_before_frees, "default"),
    (without_waiting_before_frees, "bfloat16"),
    (without_the_streams_event, "default"),
    (without_the_event_of_the_cast, "bfloat16"),
    (without_the_event_of_collected_gradients, "default"),
    (without_memory_of_compute_for_chunks, "default"),
    (without_memory_of_compute_for_chunks, "bfloat16"),
    (with_the_current_device, "default"),
]
MISSING_IN_LAYERS: list[tuple[Callable[[], object], str]] = [
    (without_waiting_for_marks, "zero1"),
    (without_waiting_for_gathers, "zero1"),
    (without_waiting_for_gathers, "whole parameters"),
    (without_the_event_of_weights, "zero1"),
    (without_the_event_of_weights, "replicate, bfloat16"),
    (without_the_event_of_weights, "whole parameters"),
    (without_the_streams_event, "zero1"),
    (without_the_event_of_the_cast, "zero1"),
    (without_the_event_of_the_cast, "replicate, bfloat16"),
    (without_the_event_of_collected_gradients, "zero1"),
    (without_waiting_for_the_first_hop, "zero1"),
    (without_waiting_for_the_first_hop, "replicate, bfloat16"),
    (without_waiting_for_the_outer_gather, "zero1"),
    (without_memory_of_compute_for_chunks, "zero1"),
]


MISSING_WITH_HOST: list[tuple[Callable[[], object], str, Callable[[ZeRO3], None]]] = [
    (without_the_host_waiting, "parameters", plain_steps),
    (without_the_event_of_uploads, "parameters", optimizing_after_a_forward),
    (without_the_event_of_weights, "parameters", plain_steps),
    (without_the_event_of_offloaded_chunks, "parameters", plain_steps),
    (without_waiting_on_the_offload_stream, "parameters", plain_steps),
    (without_the_event_of_offloaded_chunks, "sums in shards", accumulation),
    (without_waiting_on_the_offload_stream, "sums in shards", accumulation),
    (without_waiting_on_the_offload_stream, "sums", accumulation),
]


Missing = tuple[Callable[[], object], dict, Callable[[ZeRO3], None]]


def _found_without(each: list[Missing]) -> list[list[str]]:
    found = []
    for missing, settings, use in each:
        with missing(), simulated_device() as device:  # type: ignore[attr-defined]
            use(wrapped(**settings))
        found.append(device.races + device.early_frees)
    return found


def _assert_found(world_size: int, each: list[tuple[Callable, str, Callable]], named: dict) -> None:
    """Each missing wait gives every rank a race."""
    work = [(missing, named[settings], use) for missing, settings, use in each]
    for rank, found in enumerate(run_ranks(world_size, _found_without, work)):
        unseen = [f"{m.__name__}, {s}" for (m, s, _), r in zip(each, found, strict=True) if not r]
        assert not unseen, f"rank {rank} found nothing"


def test_a_missing_wait_of_or_for_the_host_is_found() -> None:
    _assert_found(2, MISSING_WITH_HOST, OFFLOADED)


def test_a_missing_wait_is_found() -> None:
    _assert_found(2, [(m, s, plain_steps) for m, s in MISSING], SETTINGS)


def test_a_missing_wait_of_an_outer_axis_is_found() -> None:
    _assert_found(4, [(m, s, plain_steps) for m, s in MISSING_IN_LAYERS], LAYERED)


def _reuses_memory_too_early() -> tuple[list[str], list[str]]:
    with simulated_device() as device:
        assert isinstance(device, SimulatedDevice)
        side = device.Stream()
        with device.stream(side):
            first = torch.ones(4)
        device._compute.wait_event(side.record_event())
        first.add(1)
        del first
        with device.stream(side):
            torch.ones(4)
    return device.races, device.early_frees


def test_memory_handed_out_again_too_early_is_found() -> None:
    (race,), (early,) = run_ranks(1, _reuses_memory_too_early)[0]
    assert "is freed before it waits for add on compute" in early
    assert "does not wait for what was used by add on compute, in memory freed since" in race
