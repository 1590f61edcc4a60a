"""RuntimeContext: what the units of one model share, handed down to all that works for them.

It lies below the unit: streams, names of collectives, the rate limiter, and the four events that
order one unit's memory traffic after another's. Whoever holds it needs to know neither the root nor
any other unit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from layerzero.comm.streams import Event, Streams
from layerzero.core.groups import ShardGroup
from layerzero.runtime.operations import Operations
from layerzero.runtime.rate_limiter import RateLimiter

_logger = logging.getLogger(__name__)
_NOTHING: AbstractContextManager[object] = nullcontext()


class RuntimeContext:
    """Shared by the units of one model. Units hold it; it holds none of them."""

    device: torch.device
    streams: Streams
    operations: Operations
    limiter: RateLimiter
    tensor_parallel_groups: tuple[ShardGroup, ...]
    """Along the axes of the mesh of DTensor parameters."""
    owner: Callable[[], object | None]
    """A weak reference to the root state, for code above it (`root_of` in root.py)."""
    replaced: list[str]
    """Names of full parameters that calls of their modules have put others in place of."""
    in_backward: bool
    """Whether autograd is running a backward pass of this model."""
    weights_written: Event
    """Behind the last change of main shards on the compute stream."""
    full_freed: Event
    """Behind the last use of any full buffer that was freed."""
    chunk_offloaded: Event
    """Behind the last copy of a reduced chunk to the host."""
    shard_uploaded: Event
    """Behind the last copy of a main shard from the host, until the host waited for it."""

    def __init__(
        self,
        device: torch.device,
        streams: Streams,
        operations: Operations,
        limiter: RateLimiter,
        tensor_parallel_groups: Sequence[ShardGroup],
        owner: Callable[[], object | None],
    ) -> None:
        self.device = device
        self.streams = streams
        self.operations = operations
        self.limiter = limiter
        self.tensor_parallel_groups = tuple(tensor_parallel_groups)
        self.owner = owner
        self.replaced = []
        self.in_backward = False
        self.weights_written = None
        self.full_freed = None
        self.chunk_offloaded = None
        self.shard_uploaded = None
        self._profiling = torch.autograd._profiler_enabled
        self._logs = False

    def set_in_backward(self, in_backward: bool) -> None:
        self.in_backward = in_backward
        self._look_at_level()

    def _look_at_level(self) -> None:
        # Once a pass: asking a logger costs as much as all else that `profile` does.
        self._logs = _logger.isEnabledFor(logging.DEBUG)

    def note_replaced(self, names: Sequence[str]) -> None:
        self.replaced += names

    def take_replaced(self) -> list[str]:
        """What `note_replaced` was told since the last time this was asked."""
        replaced, self.replaced = self.replaced, []
        return replaced

    # Events: each is recorded behind one access, and waited for before the next of its kind ----

    def note_weights(self) -> None:
        """Main shards may have been written on the compute stream; gathers read them next."""
        self.weights_written = self.streams.record_compute_event()
        self._look_at_level()

    def note_free(self) -> None:
        """Full buffers are about to be freed; the next gather may be given their memory."""
        self.full_freed = self.streams.record_compute_event()

    def note_offload(self, copied: Event) -> None:
        """`copied` stands behind a copy of a chunk, whose memory the next reduction may get."""
        self.chunk_offloaded = copied

    def note_upload(self, copied: Event) -> None:
        """`copied` stands behind a copy of a main shard, which the optimizer may write next."""
        self.shard_uploaded = copied

    def wait_for_uploads(self) -> None:
        """Main shards on the host are read by the device no more: anybody may write them."""
        self.streams.wait_on_host(self.shard_uploaded)
        self.shard_uploaded = None

    # What was done --------------------------------------------------------------------------

    def profile(self, action: str, unit: str) -> AbstractContextManager[object]:
        """A range in the profiler's timeline, and a log record at DEBUG where it begins.

        `unit` is its label. Free when no profiler runs and the level is off.
        """
        if self._logs:
            _logger.debug("LayerZeRO3.%s(%s)", action, unit)
        if self._profiling():
            return torch.profiler.record_function(f"LayerZeRO3.{action}({unit})")
        return _NOTHING
