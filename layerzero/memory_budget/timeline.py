"""Timeline: the bytes that a step held which kept nothing full, and what it would hold otherwise.

    events      unshard a   reshard a   unshard b  ...  unshard a   reshard a
    segments  0           1           2                           n           n + 1

A segment is the time between two events, and has one number: the most bytes that were live in it.
To keep a unit adds its bytes to each segment in which it was not full. One more unit may be
gathered ahead at any time of a pass. So the highest sum is a bound on what the other step holds.
Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


class Event(NamedTuple):
    """A moment of a step."""

    action: str
    """"unshard": its gather begins; "reshard": it has been freed; others only divide segments."""
    unit: int
    in_backward: bool


class Settings(NamedTuple):
    """What a budget decides."""

    kept: frozenset[int] = frozenset()
    """Indices of the units that stay full between forward and backward."""
    forward_depth: int = 0
    prefetches_in_backward: bool = False


@dataclass(frozen=True)
class Timeline:
    """A step in which each unit is gathered when it is needed and freed after its use."""

    events: tuple[Event, ...]
    peaks: tuple[int, ...]
    """The most live bytes in each segment; one more than events."""
    gathers: Mapping[int, int] = field(default_factory=dict)
    """How many gathers of a unit in backward keeping it would save."""
    is_whole: bool = True
    """False: steps or ranks differed, and there is one segment for all of the step."""

    @classmethod
    def of(cls, events: Sequence[Event], peaks: Sequence[int]) -> Timeline:
        counts: dict[bool, dict[int, int]] = {False: {}, True: {}}
        for event in events:
            if event.action == "unshard":
                of_pass = counts[event.in_backward]
                of_pass[event.unit] = of_pass.get(event.unit, 0) + 1
        forward, backward = counts[False], counts[True]
        saved = {u: min(n, forward[u]) for u, n in backward.items() if u in forward}
        return cls(tuple(events), tuple(peaks), saved)

    @classmethod
    def highest(cls, timelines: Sequence[Timeline]) -> Timeline:
        """The highest bytes of several steps; in one segment if they differ in their events."""
        first = timelines[0]
        if all(each.events == first.events for each in timelines):
            peaks = zip(*(each.peaks for each in timelines), strict=True)
            return Timeline(first.events, tuple(map(max, peaks)), first.gathers)
        units = {unit for each in timelines for unit in each.gathers}
        saved = {unit: min(each.gathers.get(unit, 0) for each in timelines) for unit in units}
        return Timeline((), (max(each.peak for each in timelines),), saved, is_whole=False)

    @property
    def peak(self) -> int:
        return max(self.peaks)

    def with_peaks(self, peaks: Sequence[int]) -> Timeline:
        return Timeline(self.events, tuple(peaks), self.gathers, self.is_whole)

    def in_one_segment(self) -> Timeline:
        return Timeline((), (self.peak,), self.gathers, is_whole=False)

    def bound(self, settings: Settings, sizes: Sequence[int]) -> int:
        """The most bytes that a step with these settings can hold.

        Args:
            sizes: bytes of each unit's full buffers.
        """
        is_ahead = settings.forward_depth or settings.prefetches_in_backward
        extra = [self._largest_ahead(sizes) if is_ahead else 0] * len(self.peaks)
        if self.is_whole and self.events:
            extra[0] = extra[-1] = 0  # Before the first gather, and after the last reduction.
        for unit in settings.kept:
            for segment in set(self._kept(unit)).difference(*self._spans(unit)):
                extra[segment] += sizes[unit]
        return max(map(sum, zip(self.peaks, extra, strict=True)))

    def _spans(self, unit: int) -> list[range]:
        """The segments in which the unit was full."""
        spans, start = [], -1
        for index, event in enumerate(self.events):
            if event.unit == unit and event.action == "unshard":
                start = index + 1
            elif event.unit == unit and event.action == "reshard" and start >= 0:
                spans.append(range(start, index + 1))
                start = -1
        if start >= 0:
            spans.append(range(start, len(self.peaks)))
        return spans

    def _kept(self, unit: int) -> range:
        """From the first gather of the step to the last use; also between several forwards."""
        if not self.is_whole:
            return range(len(self.peaks))
        spans = self._spans(unit)
        return range(spans[0].start, spans[-1].stop) if spans else range(0)

    def _largest_ahead(self, sizes: Sequence[int]) -> int:
        """Bytes of the largest unit that may be full before its use; all but the first of a pass
        may, while any other one runs."""
        gathers = [event for event in self.events if event.action == "unshard"]
        pairs = pairwise(gathers)
        ahead = {later.unit for first, later in pairs if first.in_backward == later.in_backward}
        return max((sizes[unit] for unit in ahead), default=max(sizes))
