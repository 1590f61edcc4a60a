"""How much host work does an engine add to each unit in a step, counted instead of timed?

Python frames, tensor operations and allocations of forward, backward and `zero_grad`, with the
model and the fake process group of bench_scale.py; the bare model's are subtracted.
`construction frames` are those of wrapping, for each unit. Counts are the same on every machine and
under any load, so tests/distributed/test_host_work.py holds the engine to the committed ones.

Frames are calls of Python functions; `own frames` are those of the engine's own files, which do
not depend on torch's version. Operations are those that torch's profiler records, with those that
an operation calls in turn, but without what a fake collective does itself, which is one copy for
each rank; allocations are those of torch's CPU allocator.

What a device adds is counted on one that does nothing else (`CountedDevice`): events recorded,
waits, streams entered and asked for, storages resized, collectives called.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bench_scale import VERBS, make_step
from common import (
    in_own_process,
    join_fake_world,
    options,
    print_json,
    print_result,
    print_table,
)
from torch.profiler import ProfilerActivity, profile

from layerzero.build import arguments
from layerzero.comm import collectives
from layerzero.comm.streams import Streams
from layerzero.step import root
from layerzero.watch import watchdog

COMPARED = ("layerzero", "fully_shard", "fsdp1", "rows")
ON_A_DEVICE = ("layerzero", "fully_shard")
KINDS = ("frames", "own_frames", "operations", "allocations")
# Where each engine's own Python lies, below the folder of the package it is in.
OWN = {
    "layerzero": "layerzero",
    "rows": "layerzero",
    "fully_shard": "torch/distributed/fsdp/_fully_shard",
    "fsdp1": "torch/distributed/fsdp",
}
NAMESPACES = ("aten::", "c10d::", "fsdp::", "layerzero::")
CONSTRUCTION = "construction_frames"
WARMUP_STEPS, STEPS = 4, 2
DEVICE_KINDS = (
    "event_records",
    "waits",
    "stream_contexts",
    "stream_lookups",
    "resizes",
    "collectives",
)
"""Events recorded; waits of a stream for an event; streams entered; the current stream asked for,
which `torch.cuda.stream()` does as well, and a stream entered by itself does not; storages resized;
collectives called. On CUDA each record and each wait also asks whether a graph is captured."""


def main() -> None:
    parser = options(__doc__, COMPARED, world_sizes=[8, 512], units=24, width=16)
    parser.set_defaults(engines=[e for e in COMPARED if e != "rows"])
    parser.add_argument("--measure", type=int, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for size in args.measure or ():
        if os.fork() == 0:  # Each counts in a process that has imported, and nothing more.
            print_json(counted(args.engines, size, args.units, args.width))
            os._exit(0)
        if os.wait()[1]:
            sys.exit(1)
    if args.measure:
        return
    results = {size: in_own_process(str(size)) for size in args.world_sizes}
    for size, result in results.items():
        _show(size, result)
    print_result(args, world_sizes=results)


def counted(
    engines: list[str], world_size: int, units: int, width: int
) -> dict[str, dict[str, float]]:
    """For each engine, each kind of work of a unit and step over the bare model's.

    Sets up the default group of this process: rank 0 of `world_size` ranks that move no bytes.
    """
    join_fake_world(world_size)
    totals = {}
    for name in ["bare", *engines]:
        step = make_step(name, units, width)
        for _ in range(WARMUP_STEPS):
            step()
        frames, own = _frames(step, OWN.get(name))
        operations, allocations = _operations_and_allocations(step)
        totals[name] = dict(zip(KINDS, (frames, own, operations, allocations), strict=True))
        built, _ = _frames(partial(make_step, name, units, width), None, times=1)
        totals[name][CONSTRUCTION] = built * STEPS
        if name in ON_A_DEVICE:
            totals[name] |= _on_a_device(name, units, width)
    return {
        name: {
            kind: round((count - totals["bare"].get(kind, 0)) / (units * STEPS), 2)
            for kind, count in totals[name].items()
        }
        for name in engines
    }


def _frames(step: Callable[[], object], own: str | None, times: int = STEPS) -> tuple[int, int]:
    """Calls of Python functions in so many steps, and how many of them below the folder `own`."""
    packages = (Path(torch.__file__).parents[1], Path(__file__).resolve().parents[1])
    folders = tuple(f"{package}/{own}/" for package in packages)
    counts = {"all": 0, "own": 0}

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            counts["all"] += 1
            counts["own"] += own is not None and frame.f_code.co_filename.startswith(folders)

    sys.setprofile(note)
    try:
        for _ in range(times):
            step()
    finally:
        sys.setprofile(None)
    return counts["all"], counts["own"]


def _operations_and_allocations(step: Callable[[], None]) -> tuple[int, int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for _ in range(STEPS):
            step()
    # The raw records: `events()` folds each allocation into the operation that made it.
    operations = allocations = 0
    inside_until = 0
    for record in sorted(profiled.profiler.kineto_results.events(), key=lambda r: r.start_ns()):
        if record.start_ns() < inside_until:
            continue  # the fake collective's own copies
        name = record.name()
        operations += name.startswith(NAMESPACES)
        allocations += name == "[memory]" and record.nbytes() > 0
        if name.startswith("c10d::"):
            inside_until = record.start_ns() + record.duration_ns()
    return operations, allocations


def _on_a_device(name: str, units: int, width: int) -> dict[str, int]:
    with counted_device() as counts:
        step = make_step(name, units, width)
        for _ in range(WARMUP_STEPS):
            step()
        counts.clear()
        for _ in range(STEPS):
            step()
        return {kind: counts[kind] for kind in DEVICE_KINDS}


class CountedDevice:
    """The module of a device, as `torch.cuda`, whose streams and events do nothing but count.

    Collectives run on the current stream and return no work, as NCCL's do.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._compute = _Stream(self)

    def Stream(self, *_: object, **__: object) -> _Stream:
        return _Stream(self)

    def set_device(self, _: object) -> None:
        """What the watchdog's thread calls."""

    def Event(self, *_: object, **__: object) -> _Event:
        return _Event(self)

    def stream(self, stream: _Stream) -> _Stream:
        self.current_stream()
        return stream

    def current_stream(self, _: object = None) -> _Stream:
        self.counts["stream_lookups"] += 1
        return self._compute

    def current_device(self) -> int:
        return 0

    def counting(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[kind] += 1
            return function(*args, **kwargs)

        return counted


class _Stream:
    def __init__(self, device: CountedDevice) -> None:
        self._device = device

    def __enter__(self) -> _Stream:
        self._device.counts["stream_contexts"] += 1
        return self

    def __exit__(self, *_: object) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        event = _Event(self._device) if event is None else event
        return event.record(self)

    def wait_event(self, event: _Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: _Stream) -> None:
        self.wait_event(stream.record_event())


class _Event:
    def __init__(self, device: CountedDevice) -> None:
        self._device = device

    def record(self, _: _Stream | None = None) -> _Event:
        self._device.counts["event_records"] += 1
        return self

    def wait(self, _: _Stream | None = None) -> None:
        self._device.counts["waits"] += 1


@contextmanager
def counted_device() -> Iterator[Counter[str]]:
    """Models wrapped inside run as on the device; yields what they do, by `DEVICE_KINDS`."""
    device = CountedDevice()
    counting = device.counting
    issue = {name: getattr(collectives, name) for name in vars(collectives) if "_issue" in name}

    def streams(_: torch.device, *args: Any) -> Streams:
        return Streams(torch.device("cuda", 0), *args)

    def no_work(issue: Callable[..., Any]) -> Callable[..., None]:
        return lambda *args: issue(*args) and None

    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        put(torch, "get_device_module", lambda *_: device)
        put(root, "Streams", streams)
        put(arguments, "has_separate_memory", lambda _: True)
        put(watchdog, "run_periodically", lambda *_: None)
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.distributed.fsdp.") and hasattr(module, "_get_device_handle"):
                put(module, "_get_device_handle", lambda _: device)
        for name, function in issue.items():
            put(collectives, name, no_work(function))
        for verb in VERBS:
            if hasattr(dist.ProcessGroup, verb):
                put(
                    dist.ProcessGroup,
                    verb,
                    counting("collectives", getattr(dist.ProcessGroup, verb)),
                )
        resize = torch.UntypedStorage.resize_
        put(torch.UntypedStorage, "resize_", counting("resizes", resize))
        yield device.counts


def _show(world_size: int, result: dict[str, dict[str, float]]) -> None:
    print(f"world size {world_size}: host work over the bare model, per unit and step")
    for kinds in ((*KINDS, CONSTRUCTION), DEVICE_KINDS):
        rows = []
        for name, counts in result.items():
            if kinds[0] not in counts:
                continue
            cells = [f"{counts[kind]:.1f}" for kind in kinds]
            if "fully_shard" in result and name == "layerzero":
                other = result["fully_shard"]
                cells.append(" / ".join(f"{counts[kind] / other[kind]:.2f}" for kind in kinds))
            rows.append([name, *cells, *[""] * (len(kinds) + 1 - len(cells))])
        titles = (kind.replace("_", " ") for kind in kinds)
        print_table(["engine", *titles, "of fully_shard's"], rows)
        print()


if __name__ == "__main__":
    main()
