"""Recorder: notes what one rank's engine does, by methods of its objects that it replaces.

context     profile          a gather is asked for, refused by the limiter, waited for
            all_gather,      a collective is issued
            reduce_scatter, reduce_with_peer
            set_in_backward  a backward pass begins or ends
operations  next             which job a collective belongs to, by its number: on gloo another
                             thread may issue it
scheduler   ensure_unsharded, unshard_for_call, free_after_forward, free_in_backward,
            begin_forward, end_forward: units on the compute lane
reducer     reduce, deliver  a reduction is asked for; the pass waits for the last ones, and for
                             the exchange of gradient presence
streams     reduce           handles of reductions
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from layerzero.comm.pending import Operation, Pending
from layerzero.comm.streams import FinishingStream, InlineStream, Waitable
from layerzero.flat.groups import ShardGroup
from layerzero.step.root import RootState
from layerzero.step.states import TrainingState
from layerzero.step.unit import Unit
from layerzero.step_ledger.clocks import DeviceClock, HostClock, LaneClock, host_s
from layerzero.step_ledger.in_flight import TimedCollective, TimedWork, Waiters
from layerzero.step_ledger.records import (
    ISSUED_LATE,
    LIMITER,
    TRANSFER,
    Hop,
    Job,
    Phase,
    Record,
    Slice,
    Wait,
)
from layerzero.step_ledger.taps import Taps

_BEAT_S = 0.005
_PRESENCE = "gradient presence"
"""Verb of the exchange that ends a backward: which parameters had a gradient on any rank."""


class Recorder:
    """Records from `begin` to `end`."""

    record: Record

    def __init__(self, root: RootState, rank: int) -> None:
        self._root = root
        self._taps = Taps()
        self._waiters = Waiters()
        self._on_device = root.streams.are_apart
        self.clock: LaneClock = DeviceClock(root.device) if self._on_device else HostClock()
        self._blocks = type(root.streams.reduce) is InlineStream
        """Whether several hops run while the host waits: on the CPU without gloo."""
        self._phase: Phase = "between"
        self._open: int | None = None
        """Index of the job whose collectives are named now."""
        self._gathers: dict[str, int] = {}
        """Index of the last gather job of each unit that is not waited for yet."""
        self._job_of: dict[int, int] = {}
        """Index of the job of each operation that was named and not issued, by number."""
        self._refused: set[str] = set()
        self._needed = ""
        """Label of the unit that is needed now."""
        self._prefetched = ""
        """Label of the unit that is being prefetched."""
        self._reducing: int | None = None
        """Index of the reduction that is about to start; None while the last ones are awaited."""
        self._running: dict[tuple[Phase, str], tuple[Any, int | None]] = {}
        self._steps: dict[int, int] = {}
        self._parameters = {id(p) for unit in root.units for p in unit.sharded_params}
        self._stop = threading.Event()
        self.record = Record(rank, 0.0, 0.0)

    # Enter and leave --------------------------------------------------------------------------

    def begin(self) -> None:
        """Replace the methods, and start the clock."""
        root, put = self._root, self._taps.put
        context, scheduler, reducer = root.context, root.scheduler, root.reducer
        put(context, "profile", self._profile)
        put(context, "all_gather", self._all_gather)
        put(context, "reduce_scatter", self._reduce_scatter)
        put(context, "reduce_with_peer", self._reduce_with_peer)
        put(context, "set_in_backward", self._set_in_backward)
        put(root.operations, "next", self._next)
        put(scheduler, "begin_forward", self._begin_forward)
        put(scheduler, "end_forward", self._end_forward)
        put(scheduler, "ensure_unsharded", self._ensure_unsharded)
        put(scheduler, "unshard_for_call", self._unshard_for_call)
        put(scheduler, "free_after_forward", self._free_after_forward)
        put(scheduler, "free_in_backward", self._free_in_backward)
        put(reducer, "reduce", self._reduce)
        put(reducer, "deliver", self._deliver)
        put(reducer, "exchange_presence", self._exchange_presence)
        put(root.streams.reduce, "enqueue_wait", self._handle_of)
        put(root.streams.reduce, "run", self._handle_of)
        self._step_hook = register_optimizer_step_post_hook(self._after_step)
        if not self._on_device:
            threading.Thread(target=self._beat, name="layerzero-ledger-beat", daemon=True).start()
        self.record.begin = self.clock.now()

    def end(self) -> None:
        """Put the plain methods back, and resolve all times. Blocks the host on a device."""
        self.record.end = self.clock.now()
        self.abandon()
        if self._on_device:
            for stream in (self._root.streams.unshard, self._root.streams.reduce):
                stream.drain_handle().wait()
            self.clock.finish()
        self.record.num_optimizer_steps = max(self._steps.values(), default=0)
        self.record.resolve(self.clock.seconds)

    def abandon(self) -> None:
        """Put the plain methods back. Can be called again."""
        self._taps.remove()
        self._step_hook.remove()
        self._stop.set()
        self._waiters.close()

    def _beat(self) -> None:
        """Note when this thread did not run though it should have: another one had the GIL, or the
        process had no core. The engine's threads did not run then, either."""
        last = host_s()
        while not self._stop.is_set():
            time.sleep(_BEAT_S)
            now = host_s()
            # A thread in pure Python gives the GIL away after 5 ms, by default.
            if now - last > 3 * _BEAT_S:
                self.record.silent.append((last + _BEAT_S, now))
            last = now

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(p) in self._parameters for g in optimizer.param_groups for p in g["params"]):
            self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1

    # Jobs and collectives -------------------------------------------------------------------

    def _add_job(self, job: Job) -> int:
        self.record.jobs.append(job)
        return len(self.record.jobs) - 1

    def _next(self, method: Callable[..., Operation]) -> Callable[..., Operation]:
        def next_operation(verb: str, unit: str, group: ShardGroup) -> Operation:
            operation = method(verb, unit, group)
            if self._open is not None and verb != _PRESENCE:
                self._job_of[operation.number] = self._open
            elif self._open is not None:
                now = host_s()
                issued = self.clock.now() if self._on_device else now
                hop = Hop(operation.number, verb, group.ranks, 0, now, issued)
                self.record.jobs[self._open].hops.append(hop)
            return operation

        return next_operation

    def _all_gather(self, method: Callable[..., Pending]) -> Callable[..., Any]:
        def all_gather(
            full: torch.Tensor, shard: torch.Tensor, group: ShardGroup, operation: Operation
        ) -> Any:
            hop = self._hop(operation, group, full.nbytes)
            if hop is None:
                return method(full, shard, group, operation)
            timed = TimedCollective(method(full, shard, group, operation), hop, self.clock)
            if not self._on_device:
                timed.wait_on(self._waiters)
            return timed

        return all_gather

    def _reduce_scatter(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_scatter(
            chunks: torch.Tensor, group: ShardGroup, operation: Operation, *args: Any, **kwargs: Any
        ) -> Any:
            hop = self._hop(operation, group, chunks.nbytes)
            return self._timed(hop, *method(chunks, group, operation, *args, **kwargs))

        return reduce_scatter

    def _reduce_with_peer(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_with_peer(
            own: torch.Tensor,
            received: torch.Tensor,
            sent: torch.Tensor,
            group: ShardGroup,
            operation: Operation,
            *args: Any,
        ) -> Any:
            hop = self._hop(operation, group, own.nbytes + sent.nbytes)
            return self._timed(hop, *method(own, received, sent, group, operation, *args))

        return reduce_with_peer

    def _timed(self, hop: Hop | None, result: torch.Tensor, pending: Pending) -> Any:
        if hop is None:
            return result, pending
        timed = TimedCollective(pending, hop, self.clock)
        # A `FinishingStream` has a thread that waits for it from now on.
        if not self._on_device and not isinstance(self._root.streams.reduce, FinishingStream):
            timed.wait_on(self._waiters)
        return result, timed

    def _hop(self, operation: Operation, group: ShardGroup, nbytes: int) -> Hop | None:
        index = self._job_of.pop(operation.number, None)
        if index is None:
            return None
        job, now = self.record.jobs[index], host_s()
        issued = self.clock.now() if self._on_device else now
        hop = Hop(operation.number, operation.verb, group.ranks, nbytes, now, issued)
        job.hops.append(hop)
        return hop

    # Gathers --------------------------------------------------------------------------------

    def _profile(self, method: Callable[..., Any]) -> Callable[..., AbstractContextManager[Any]]:
        def profile(action: str, unit: str) -> AbstractContextManager[Any]:
            return _Range(self, method(action, unit), action, unit)

        return profile

    def enter_range(self, action: str, unit: str) -> Any:
        """A range of the engine begins. Returns what `exit_range` gets back."""
        if action == "wait_for_unshard":
            return self.clock.now(), host_s()
        if action == "unshard":
            before, self._open = self._open, self._ask_for_gather(unit)
            return before
        if action == "prefetch":
            self._prefetched = unit
        elif action == "budget_full":
            self._refused.add(unit)
        return None

    def exit_range(self, action: str, unit: str, state: Any) -> None:
        """The range has ended, perhaps with an error."""
        if action == "wait_for_unshard":
            job = self._gathers.pop(unit, None)
            self._refused.discard(unit)
            if job is not None and self.record.jobs[job].hops:
                self.record.waits.append(Wait(job, job, state[0], self.clock.now(), state[1]))
        elif action == "unshard":
            self._open = state
        elif action == "prefetch":
            self._prefetched = ""

    def _ask_for_gather(self, unit: str) -> int:
        if unit in self._refused:
            cause = LIMITER
        elif unit == self._needed and unit != self._prefetched:
            cause = ISSUED_LATE
        else:
            cause = TRANSFER
        job = Job("gather", unit, self._phase, self.clock.now(), cause, host_s())
        index = self._gathers[unit] = self._add_job(job)
        return index

    # Reductions -----------------------------------------------------------------------------

    def _reduce(self, method: Callable[..., None]) -> Callable[..., None]:
        def reduce(unit: Unit) -> None:
            self._close("backward", unit.label)
            job = Job("reduction", unit.label, "backward", self.clock.now(), TRANSFER, host_s())
            before = self._open, self._reducing
            self._open = self._reducing = self._add_job(job)
            try:
                method(unit)
            finally:
                self._open, self._reducing = before

        return reduce

    def _handle_of(self, method: Callable[..., Waitable]) -> Callable[..., Waitable]:
        def handle_of(*args: Any, **kwargs: Any) -> Waitable:
            job, begin, on_host = self._reducing, self.clock.now(), host_s()
            work = method(*args, **kwargs)
            if job is None:
                return work
            if self._blocks:
                self.record.waits.append(Wait(job, job, begin, self.clock.now(), on_host))
            return TimedWork(work, job, self._wait_for_reduction)

        return handle_of

    def _wait_for_reduction(self, job: int, work: Waitable) -> None:
        begin, on_host = self.clock.now(), host_s()
        work.wait()
        held = job if self._reducing is None else self._reducing
        self.record.waits.append(Wait(held, job, begin, self.clock.now(), on_host))

    def _exchange_presence(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The exchange that ends a backward counts for the unit that was reduced last."""

        def exchange_presence(reductions: Any) -> Callable[[], Any]:
            unit = reductions[-1].unit.label
            job = Job("reduction", unit, "backward", self.clock.now(), TRANSFER, host_s())
            index = self._add_job(job)

            def named(function: Callable[..., Any], *args: Any) -> Any:
                before, self._open = self._open, index
                try:
                    return function(*args)
                finally:
                    self._open = before

            answer = named(method, reductions)

            def timed_answer() -> Any:
                begin, on_host = self.clock.now(), host_s()
                found = named(answer)
                end = self.clock.now()
                for hop in job.hops:
                    hop.arrived = end
                if job.hops:
                    self.record.waits.append(Wait(index, index, begin, end, on_host))
                return found

            return timed_answer

        return exchange_presence

    def _deliver(self, method: Callable[..., None]) -> Callable[..., None]:
        def deliver() -> None:
            method()
            if self._root.reducer.requires_sync:
                self.record.num_backwards += 1
                self.record.step_ends.append(host_s())

        return deliver

    # The compute lane -----------------------------------------------------------------------

    def _start(self, phase: Phase, unit: str, job: int | None = None) -> None:
        self._running.setdefault((phase, unit), (self.clock.now(), job))

    def _close(self, phase: Phase, unit: str) -> None:
        running = self._running.pop((phase, unit), None)
        if running is not None:
            begin, job = running
            self.record.slices.append(Slice(phase, unit, begin, self.clock.now(), job))

    def _begin_forward(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def begin_forward(unit: Unit, weights_may_have_changed: bool) -> None:
            self._running.clear()  # Of a pass that failed.
            self._phase = "forward"
            self._start("forward", "")
            method(unit, weights_may_have_changed)

        return begin_forward

    def _end_forward(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def end_forward(grad_enabled: bool) -> Any:
            result = method(grad_enabled)
            self._close("forward", "")
            self._phase = "between"
            self.record.num_forwards += 1
            return result

        return end_forward

    def _set_in_backward(self, method: Callable[..., None]) -> Callable[..., None]:
        def set_in_backward(in_backward: bool) -> None:
            method(in_backward)
            if in_backward and self._phase != "backward":
                self._phase = "backward"
                self._start("backward", "")
            elif not in_backward:
                self._close("backward", "")
                self._phase = "between"

        return set_in_backward

    def _ensure_unsharded(self, method: Callable[..., None]) -> Callable[..., None]:
        def ensure_unsharded(unit: Unit, prefetches: bool, in_backward: bool) -> None:
            label = unit.label
            before, self._needed = self._needed, label
            job = self._gathers.get(label)
            try:
                method(unit, prefetches, in_backward)
            finally:
                self._needed = before
            if in_backward and unit.training_state is TrainingState.BACKWARD:
                self._start("backward", label, job)

        return ensure_unsharded

    def _unshard_for_call(self, method: Callable[..., None]) -> Callable[..., None]:
        def unshard_for_call(unit: Unit, in_backward: bool) -> None:
            num_jobs, job = len(self.record.jobs), self._gathers.get(unit.label)
            method(unit, in_backward)
            if unit.depth == 1 and not in_backward:
                if job is None:
                    job = self._last_gather_since(num_jobs, unit.label)
                self._start("forward", unit.label, job)

        return unshard_for_call

    def _last_gather_since(self, start: int, unit: str) -> int | None:
        jobs = self.record.jobs
        found = (i for i in range(start, len(jobs)) if jobs[i].unit == unit)
        return next((i for i in found if jobs[i].kind == "gather"), None)

    def _free_after_forward(self, method: Callable[..., None]) -> Callable[..., None]:
        def free_after_forward(unit: Unit, grad_enabled: bool) -> None:
            self._close("forward", unit.label)
            method(unit, grad_enabled)

        return free_after_forward

    def _free_in_backward(self, method: Callable[..., None]) -> Callable[..., None]:
        def free_in_backward(unit: Unit, *args: Any, **kwargs: Any) -> None:
            self._close("backward", unit.label)
            method(unit, *args, **kwargs)

        return free_in_backward


class _Range:
    """A range of the engine, inside the range of torch's profiler."""

    __slots__ = ("_action", "_inner", "_recorder", "_state", "_unit")

    def __init__(self, recorder: Recorder, inner: Any, action: str, unit: str) -> None:
        self._recorder = recorder
        self._inner = inner
        self._action = action
        self._unit = unit

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._state = self._recorder.enter_range(self._action, self._unit)

    def __exit__(self, *error: Any) -> None:
        self._recorder.exit_range(self._action, self._unit, self._state)
        self._inner.__exit__(*error)
