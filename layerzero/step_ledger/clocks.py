"""The clock of a lane, and the offset between the clocks of ranks.

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

from layerzero.comm.exchanges import gather_small
from layerzero.flat.device_streams import stream_interface
from layerzero.flat.placement import ShardGroup
from layerzero.step.operations import Operations
from layerzero.step_ledger.records import Stamp

_ROUNDS = 16
host_s = time.perf_counter


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

    See Note [Offset of two clocks]. Collective over each group; blocks the host.

    Args:
        groups: inner first; together they connect all ranks.
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
