"""RuntimeContext: the state that all units of one model share.

It holds the streams, the names of collectives, the rate limiter, and the events that order one
unit's memory traffic after another's. It lies below the unit, so code that works on a unit through
it depends neither on the root nor on other units.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from layerzero.comm.streams import NOTHING, Event, Streams
from layerzero.config import GatherBudget
from layerzero.step.extension import Extensions
from layerzero.step.operations import Operations

_logger = logging.getLogger(__name__)
_profiling = torch.autograd._profiler_enabled


@dataclass
class RateLimiter:
    """Counts resident full buffers against a budget: of units, or of bytes.

    Only in the order of issue, which is the same on every rank, so ranks never disagree and the
    host never blocks. The count also bounds *device* memory, because the unshard stream waits for
    the event of the last free before it writes a new full buffer (docs/internals/streams.md).
    """

    budget: GatherBudget
    num_units = nbytes = 0

    def make_room_for(self, depth: int) -> None:
        """Raise the default budget for prefetch lists of this length; never the user's own."""
        budget = self.budget
        if budget.is_default and budget.max_units is not None:
            self.budget = replace(budget, max_units=max(budget.max_units, depth + 2))

    def reset(self) -> None:
        """Nothing is resident."""
        self.num_units = self.nbytes = 0

    def admits(self, nbytes: int) -> bool:
        """Whether a prefetch of `nbytes` fits the budget. Gathers needed now are not checked."""
        budget = self.budget
        if budget.max_units is not None and self.num_units + 1 > budget.max_units:
            return False
        return budget.max_nbytes is None or self.nbytes + nbytes <= budget.max_nbytes

    def acquire(self, nbytes: int) -> None:
        self.num_units += 1
        self.nbytes += nbytes

    def release(self, nbytes: int) -> None:
        self.num_units -= 1
        self.nbytes -= nbytes


@dataclass(eq=False)
class RuntimeContext:
    """Shared by the units of one model. Units reference it; it references no unit."""

    device: torch.device
    streams: Streams
    operations: Operations
    limiter: RateLimiter
    owner: Callable[[], object | None]
    """Weak reference to the root state, for code above the unit (`root_of` in root.py)."""
    extensions: Extensions
    replaced: list[str] = field(default_factory=list)
    """Names of unsharded parameters that the model's forward has replaced by other objects."""
    in_backward = False
    """Whether autograd is running a backward pass of this model."""
    weights_written: Event = None
    """Event after the last change of main shards on the compute stream."""
    shard_uploaded: Event = None
    """Event after the last copy of a main shard from the host; None once the host waited for it."""
    _logs = False

    def set_in_backward(self, in_backward: bool) -> None:
        self.in_backward = in_backward
        # Once a pass: a logger's level check costs as much as the rest of `profile`.
        self._logs = _logger.isEnabledFor(logging.DEBUG)

    # Events: each is recorded after an access; the next conflicting access waits for it ----

    def note_weights(self) -> None:
        """Main shards may have been written on the compute stream, and gathers read them next."""
        self.weights_written = self.streams.record_compute_event()
        self._logs = _logger.isEnabledFor(logging.DEBUG)
        for weights_written in self.extensions.weights_written:
            weights_written()

    def before_free(self, used_on: Sequence[Any] = ()) -> None:
        """Order the unshard stream, which owns full buffers, after their last use on compute: on
        these streams, or by default the current one.

        Before they are freed, and not only before the next all-gather: memory that leaves the pool
        of its stream (`empty_cache`, a retry after out of memory, expandable segments,
        `cudaMallocAsync`) is given back as soon as *that* stream is done with it.
        """
        if self.streams.are_apart:
            for stream in used_on or [self.streams.current()]:
                self.streams.unshard.wait(self.streams.record_compute_event(stream))

    def before_deletion(self) -> None:
        """Order the streams that own memory of the model after all that is queued on any of them.

        `before_free` for an object that is deleted with its memory in use. Does not block the host.
        """
        streams = self.streams
        if not streams.are_apart or sys.is_finalizing():
            return  # On CPU a wait would block the host until peers take part.
        streams.join()
        streams.fork()

    def note_upload(self, copied: Event) -> None:
        self.shard_uploaded = copied

    def wait_for_uploads(self) -> None:
        """Block the host until the device has read all main shards on the host; then they may be
        written."""
        self.streams.wait_on_host(self.shard_uploaded)
        self.shard_uploaded = None

    def profile(self, action: str, unit: str) -> AbstractContextManager[object]:
        """A range in the profiler's timeline, an action for extensions, and a DEBUG log record.

        `unit` is a unit's label. Costs next to nothing if nothing reads any of these.
        """
        if self._logs:
            _logger.debug("LayerZeRO3.%s(%s)", action, unit)
        inner: AbstractContextManager[object] = NOTHING
        if _profiling():
            inner = torch.profiler.record_function(f"LayerZeRO3.{action}({unit})")
        if self.extensions.begin_action:
            return self._watched(action, unit, inner)
        return inner

    @contextmanager
    def _watched(
        self, action: str, unit: str, inner: AbstractContextManager[object]
    ) -> Iterator[None]:
        with inner:
            for begin_action in self.extensions.begin_action:
                begin_action(action, unit)
            yield
            for end_action in self.extensions.end_action:
                end_action(action, unit)
