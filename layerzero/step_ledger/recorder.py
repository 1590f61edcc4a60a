"""Recorder: the extension that notes what one rank's engine does.

Actions say what the engine begins and ends: a gather or reduction that is asked for, refused by the
limiter, or waited for. Events of the extension say which unit computes. A timer that travels with
each collective says when it was issued and when it arrived, on whatever thread or stream.

Note [Offset of two clocks]
    In one exchange rank r calls at s_r and has everybody's message at e_r, each on its own clock. A
    message arrives after it was sent, so clock_r - clock_0 is at most e_r - s_0 and at least
    s_r - e_0. The closest bounds of some exchanges give the offset; half their distance is its
    error, a bound and no estimate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook

from layerzero.comm.exchanges import gather_small
from layerzero.flat.groups import own_rank
from layerzero.flat.placement import ShardGroup
from layerzero.step.backward import ForwardPass
from layerzero.step.extension import Extension
from layerzero.step.operations import Operations
from layerzero.step.root import RootState
from layerzero.step.unit import Unit
from layerzero.step_ledger.records import (
    ISSUED_LATE,
    LIMITER,
    TRANSFER,
    Hop,
    Job,
    JobKind,
    Phase,
    Record,
    Slice,
    Stamp,
    Wait,
)
from layerzero.watch.events import stream_interface

_ROUNDS = 16
host_s = time.perf_counter
_PRESENCE = "gradient presence"
"""Verb of the exchange that ends a backward: which parameters had a gradient on any rank."""


class HostClock:
    """On the CPU a lane is the thread that runs."""

    now = staticmethod(host_s)
    seconds = staticmethod(float)


class DeviceClock:
    """Stamps are events on the current stream of the device."""

    def __init__(self, device: torch.device) -> None:
        """Blocks the host until the device has come here."""
        self._module = stream_interface(device)
        self._device = device
        make = getattr(self._module, "Event", None)
        self._make = make if make is not None else lambda **kwargs: torch.Event(device, **kwargs)
        self._base = self.now()
        self._base.synchronize()
        self._base_s = host_s()

    def now(self) -> Any:
        event = self._make(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def finish(self) -> None:
        self.now().synchronize()

    def seconds(self, stamp: Stamp) -> float:
        """The stamp on the host's clock, after `finish`."""
        return float(self._base_s + self._base.elapsed_time(stamp) / 1e3)


def read_clock(
    groups: Sequence[ShardGroup], operations: Operations, device: torch.device
) -> tuple[float, float]:
    """Seconds by which this rank's clock is ahead of the first rank's, and a bound on their error.

    See Note [Offset of two clocks]. Collective over each group; blocks the host. `groups`: inner
    first; together they connect all ranks.
    """
    offset = error = 0.0
    for group in groups:

        def gather(values: torch.Tensor, group: ShardGroup = group) -> list[list[float]]:
            operation = operations.next("ledger", "the model", group)
            return gather_small(values, group, operation).tolist()

        own = torch.zeros(1, dtype=torch.int64, device=device)
        times: list[float] = []
        for _ in range(1 + _ROUNDS):
            times.append(host_s())
            gather(own)
            times.append(host_s())
        # The first round lasts from the first rank's arrival.
        row = torch.tensor([offset, error, *times[2:]], dtype=torch.float64, device=device)
        theirs, error_of_first, *first = gather(row)[0]
        upper = min(e - s for e, s in zip(times[3::2], first[::2], strict=True))
        lower = max(s - e for s, e in zip(times[2::2], first[1::2], strict=True))
        if not group.is_first:
            offset = theirs + (upper + lower) / 2
            error = error_of_first + (upper - lower) / 2
    return offset, error


class Recorder(Extension):
    record: Record

    def __init__(self, root: RootState) -> None:
        """Collective over the model's data-parallel ranks; blocks the host."""
        self._root = root
        self._offset, error = read_clock(root.groups, root.operations, root.device)
        self._on_device = root.streams.are_apart
        self.clock: DeviceClock | HostClock = (
            DeviceClock(root.device) if self._on_device else HostClock()
        )
        self._phase: Phase = "between"
        self._prefetches = False
        """Whether a unit is being prefetched."""
        self._refused: set[str] = set()
        """Labels of units that the limiter has refused to prefetch."""
        self._asked: int | None = None
        """Index of the job whose collectives are named now."""
        self._reducing: int | None = None
        """Index of the reduction that is about to start; None while the last ones are awaited."""
        self._presence: int | None = None
        """Index of the job of the exchange of gradient presence."""
        self._jobs: dict[tuple[JobKind, str], int] = {}
        """Index of the last job of each kind and unit."""
        self._last_reduced = ""
        self._wait_begin: Any = None
        self._running: dict[tuple[Phase, str], Any] = {}
        self._steps: dict[int, int] = {}
        self._parameters = {id(p) for unit in root.units for p in unit.sharded_params}
        root.extensions.add(self)
        self._step_hook = register_optimizer_step_post_hook(self._after_step)
        self.record = Record(own_rank(), self.clock.now(), None, clock_error=error)

    def end(self) -> None:
        """All times are on the first rank's clock from now on. Blocks the host on a device."""
        self.record.end = self.clock.now()
        if isinstance(self.clock, DeviceClock):
            self._root.streams.join()
            self.clock.finish()
        self.record.num_optimizer_steps = max(self._steps.values(), default=0)
        self.record.resolve(self.clock.seconds, self._offset)

    def leave(self) -> None:
        self._root.extensions.remove(self)
        self._step_hook.remove()

    @_disable_dynamo
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(p) in self._parameters for g in optimizer.param_groups for p in g["params"]):
            self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1

    def begin_action(self, action: str, unit: str) -> None:
        if action.startswith("wait_for_"):
            self._wait_begin = self.clock.now()
        elif action == "prefetch":
            self._prefetches = True
        elif action == "budget_full":
            self._refused.add(unit)
        elif action == "unshard":
            cause = TRANSFER if self._prefetches or self._phase == "between" else ISSUED_LATE
            self._asked = self._ask("gather", unit, LIMITER if unit in self._refused else cause)
            self._jobs["gather", unit] = self._asked
        elif action == "reduce":
            self._close("backward", unit)
            self._last_reduced = unit
            self._asked = self._reducing = self._ask("reduction", unit, TRANSFER)
            self._jobs["reduction", unit] = self._asked
        elif action == "reshard":
            self._close("backward", unit)

    def end_action(self, action: str, unit: str) -> None:
        if action == "wait_for_unshard":
            self._refused.discard(unit)
            job = self._jobs.get(("gather", unit))
            if job is not None and self.record.jobs[job].hops:
                self._waited(job, job)
        elif action == "wait_for_reduce":
            job = self._jobs.get(("reduction", unit))
            if job is not None and self.record.jobs[job].hops:
                self._waited(job if self._reducing is None else self._reducing, job)
        elif action == "wait_for_presence" and self._presence is not None:
            self._waited(self._presence, self._presence)
        elif action == "prefetch":
            self._prefetches = False
        elif action in ("unshard", "reduce"):
            self._asked = self._reducing = None
        elif action == "deliver":
            self._presence = None
            self._close("backward", "")
            self._phase = "between"
            if self._root.reducer.requires_sync:
                self.record.num_backwards += 1

    def before_abort(self, error: BaseException | None) -> None:
        self._asked = self._reducing = self._presence = None
        self._prefetches = False

    def _ask(self, kind: JobKind, unit: str, cause: str) -> int:
        self.record.jobs.append(Job(kind, unit, self.clock.now(), cause))
        return len(self.record.jobs) - 1

    def _waited(self, job: int, blocker: int) -> None:
        self.record.waits.append(Wait(job, blocker, self._wait_begin, self.clock.now()))

    def timer(self, verb: str, group: ShardGroup, number: int) -> HopTimer | None:
        index = self._asked
        if verb == _PRESENCE:
            # It counts for the unit that was reduced last.
            if self._presence is None:
                self._presence = self._ask("reduction", self._last_reduced, TRANSFER)
            index = self._presence
        if index is None:
            return None
        now = self.clock.now if self._on_device else None
        return HopTimer(Hop(number, verb, group.ranks), self.record.jobs[index].hops, now)

    def before_forward(self, unit: Unit, forward_pass: ForwardPass) -> None:
        self._running.clear()  # Of a pass that failed.
        self._phase = "forward"
        self._start("forward", "")

    def after_forward(self) -> RuntimeError | None:
        self._close("forward", "")
        self._phase = "between"
        self.record.num_forwards += 1
        return None

    def before_backward(self, forward_pass: ForwardPass) -> None:
        self._phase = "backward"
        self._start("backward", "")

    def begin_call(self, unit: Unit) -> None:
        self._start("forward", unit.label)

    def end_call(self, unit: Unit) -> None:
        self._close("forward", unit.label)

    def begin_backward(self, unit: Unit) -> None:
        self._start("backward", unit.label)

    def _start(self, phase: Phase, unit: str) -> None:
        if (phase, unit) not in self._running:
            self._running[phase, unit] = self.clock.now()

    def _close(self, phase: Phase, unit: str) -> None:
        begin = self._running.pop((phase, unit), None)
        if begin is not None:
            self.record.slices.append(Slice(phase, unit, begin, self.clock.now()))


class HopTimer:
    """Fills in the times of a hop, on whatever thread and stream it is awaited."""

    def __init__(self, hop: Hop, hops: list[Hop], lane_now: Any) -> None:
        """`lane_now`: stamps the current lane of a device; None: of the host."""
        self._hop = hop
        self._hops = hops
        self._lane_now = lane_now

    def issued(self, nbytes: int) -> None:
        """The collective starts, of so many bytes: those of the whole tensor."""
        hop = self._hop
        hop.nbytes = 0 if hop.verb == _PRESENCE else nbytes
        hop.called = host_s()
        hop.issued = hop.called if self._lane_now is None else self._lane_now()
        self._hops.append(hop)

    def ended(self) -> None:
        """The data is there; called again once the result is ready, if the engine computes that."""
        now = (self._lane_now or host_s)()
        if self._hop.arrived is None:
            self._hop.arrived = now
        else:
            self._hop.done = now
