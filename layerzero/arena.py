"""Arena: full buffers and reduction inputs of a model at addresses that stay (`arena=True`).

In the first step of an order buffers are allocated as without an arena. Before the next forward
they are laid out by what that step took and gave back (arena_layout.py), in memory that the arena
keeps. From then on taking a buffer swaps the data pointer of its storage with that of its place, so
the views that autograd saved follow, as when the storage is resized.

A buffer whose places are all in use, in an order that was not seen before or outside of passes, is
allocated as without an arena; where that was in a pass, it gets one more place before the next one.
Once an order has come again, places stay, and so does their memory: a graph that was captured may
replay. Orders that come before are laid out together.

Note [Who wrote there before]
    On a device, memory of the arena passes from one stream to another without the allocator. Full
    buffers belong to the unshard stream, which waits for compute before one is given back
    (`RuntimeContext.before_free`); it does so here for reduction inputs. Compute waits for gathers
    and reductions before it gives anything back. New memory is compute's. On CPU the host's order
    serves, and what is prefetched behind reductions is taken once their thread has given back
    their inputs.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Collection, Container
from itertools import count
from math import inf
from typing import Any

import torch

from layerzero.arena_layout import (
    Event,
    Pass,
    Place,
    Prefetching,
    Visits,
    aligned,
    demand,
    last_gives,
    lay_out,
    with_prefetch,
)
from layerzero.comm.gloo.threads import FinishingStream
from layerzero.config import BackwardPrefetch
from layerzero.flat.buffer import prefer_huge_pages
from layerzero.step.extension import Extension
from layerzero.step.root import RootState

_logger = logging.getLogger(__name__)
_MOST_PLACES = 4
"""Places of one buffer, after which it is allocated as without an arena where all are in use."""


class Lease:
    """One buffer's places in the arena."""

    def __init__(self, arena: Arena, nbytes: int, is_input: bool) -> None:
        self.buffer = next(arena.numbers)
        self.nbytes = nbytes
        self.places: list[tuple[Place, torch.UntypedStorage]] = []
        self._arena = arena
        self._is_input = is_input
        self._lent: torch.UntypedStorage | None = None

    def note(self, is_behind: bool) -> None:
        """The host issues the gather that takes the buffer; see `Event`."""
        self._arena.reserve(self, is_behind)

    def take(self, storage: torch.UntypedStorage) -> bool:
        """Put an empty storage on a free place. Returns False if there is none."""
        if self._is_input:
            self.note(is_behind=False)
        self._lent = self._arena.take(self.buffer, self.places)
        if self._lent is None:
            return False
        storage._swap_data_ptr_(self._lent)  # type: ignore[attr-defined]
        return True

    def give_back(self, storage: torch.UntypedStorage) -> bool:
        """Empty the storage. Returns False if it is on no place. May be called twice."""
        lent, self._lent = self._lent, None
        if lent is not None:
            storage._swap_data_ptr_(lent)  # type: ignore[attr-defined]
        self._arena.give_back(self.buffer)
        return lent is not None


def _outside(passes: list[Pass], alive: Container[int]) -> list[Pass]:
    """The passes without buffers that are gone, as if nothing had lain in the arena."""
    return [
        Pass(
            each.is_backward,
            {buffer: None for buffer in each.taken if buffer in alive},
            [event for event in each.events if event.buffer in alive],
        )
        for each in passes
    ]


class Arena(Extension):
    """The arena of one model. It grows between passes; once an order came again, places stay."""

    nbytes: int
    """Bytes of the memory that it keeps."""
    taken_nbytes: int
    """The most bytes that a pass had taken at once, of those that were laid out."""

    def __init__(self, root: RootState) -> None:
        self.nbytes = self.taken_nbytes = 0
        self.numbers = count()
        self._root_ref = weakref.ref(root)
        self._context = root.context
        self._has_thread = isinstance(root.streams.reduce, FinishingStream)
        self._leases: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()
        self._unit_of: dict[int, int] = {}
        self._inputs: set[int] = set()
        self._taken: dict[int, Place | None] = {}
        """Buffers that are taken, or reserved for a gather; None: outside the arena."""
        self._in_flight: set[int] = set()
        """Inputs taken in the pass that runs."""
        self._lock = threading.Lock()
        self._passes: list[Pass] = []
        self._events: list[Event] | None = None
        """Events of the pass that runs, the last of `_passes`."""
        self._missed: set[int] = set()
        """Buffers that found no place in a pass since the last layout."""
        self._orders: set[tuple[bool, tuple[int, ...]]] = set()
        self._first: list[Pass] = []
        """The first pass of each order, until the places are final."""
        self._is_final = False
        """Whether an order has come again since there are places: then none is taken back."""
        self._pieces: list[tuple[int, torch.Tensor]] = []
        """The memory, each piece with the place where it starts."""
        for unit in root.units:
            for handle in unit.handles:
                if handle.full_nbytes:
                    handle.buffer.lease = self._lease(handle.full_nbytes, is_input=False)
                    if not unit.is_optional:
                        self._unit_of[handle.buffer.lease.buffer] = unit.index
                if handle.placement.num_ranks > 1:
                    handle.gradients.use_arena(self.lease_input)

    def lease_input(self, nbytes: int) -> Lease | None:
        return self._lease(nbytes, is_input=True) if nbytes else None

    def _lease(self, nbytes: int, is_input: bool) -> Lease:
        lease = Lease(self, nbytes, is_input)
        self._leases[lease.buffer] = lease
        if is_input:
            self._inputs.add(lease.buffer)
        return lease

    def reserve(self, lease: Lease, is_behind: bool) -> None:
        """Choose the place: in the order of the host, which is the same in every step."""
        buffer, is_behind = lease.buffer, is_behind and self._has_thread
        if self._events is not None:
            self._events.append(Event(True, buffer, is_behind))
        with self._lock:
            left = self._in_flight if is_behind else ()
            busy = self._busy(buffer, left)
            free = (place for place, _ in lease.places if not any(map(place.overlaps, busy)))
            self._taken[buffer] = next(free, None)
            if buffer in self._inputs:
                self._in_flight.add(buffer)
            self._note_missed(buffer)

    def take(
        self, buffer: int, places: list[tuple[Place, torch.UntypedStorage]]
    ) -> torch.UntypedStorage | None:
        """The storage of the place that was chosen; None: there was none, or it is in use still."""
        with self._lock:
            place = self._taken.get(buffer)
            if place is not None and any(map(place.overlaps, self._busy(buffer))):
                place = self._taken[buffer] = None  # Of a sum that waits for more micro-batches.
                self._note_missed(buffer)
        return next((storage for each, storage in places if each == place), None)

    def _busy(self, buffer: int, left: Collection[int] = ()) -> list[Place]:
        taken = self._taken.items()
        return [p for other, p in taken if p is not None and other != buffer and other not in left]

    def _note_missed(self, buffer: int) -> None:
        if self._taken[buffer] is None and self._events is not None:
            self._missed.add(buffer)

    def give_back(self, buffer: int) -> None:
        if self._events is not None:
            self._events.append(Event(False, buffer))
        with self._lock:
            place = self._taken.pop(buffer, None)
            self._in_flight.discard(buffer)
        if place is not None and buffer in self._inputs and self._context.streams.are_apart:
            self._context.before_free()  # See Note [Who wrote there before].

    def before_forward(self, unit: Any, forward_pass: Any) -> None:
        root = self._root_ref()
        assert root is not None, "a forward of it begins"
        if not root.reducer.kept.adds_up:  # All micro-batches of a step are laid out together.
            self._lay_out(root)
        self._begin(is_backward=False)

    def after_forward(self) -> None:
        self._events = None

    def before_backward(self, order: tuple[int, ...]) -> None:
        self._begin(is_backward=True)

    def end_backward(self, forwards: Any) -> None:
        self._events = None

    def after_abort(self) -> None:
        self._events, self._passes = None, []
        self._missed.clear()

    def _begin(self, is_backward: bool) -> None:
        self._events = []
        self._in_flight.clear()
        self._passes.append(Pass(is_backward, dict(self._taken), self._events))

    @property
    def _borders(self) -> list[int]:
        return [start + piece.numel() for start, piece in self._pieces]

    def _lay_out(self, root: RootState) -> None:
        """Give places to the buffers that the passes since the last call show to need any."""
        passes, self._passes = self._passes, []
        missed, self._missed = self._missed, set()
        leases = dict(self._leases)
        shown, is_new = [], False
        for each in passes:
            alive = [e for e in each.events if e.buffer in leases]
            taken = {b: place for b, place in each.taken.items() if b in leases}
            each = Pass(each.is_backward, taken, last_gives(alive))
            order = (each.is_backward, tuple(Visits.of(each.events, self._unit_of).units))
            if order in self._orders:
                self._is_final = self._is_final or bool(self._pieces)
            else:
                self._orders.add(order)
                is_new, each = True, with_prefetch(each, self._prefetching(root))
                if not self._has_thread:
                    events = [event._replace(is_behind=False) for event in each.events]
                    each = each._replace(events=events)
            shown.append(each)
        if self._is_final:
            self._first = []
        elif is_new:
            self._first += shown
        if not (is_new or missed):
            return
        nbytes = {buffer: lease.nbytes for buffer, lease in leases.items()}
        places = {b: [place for place, _ in lease.places] for b, lease in leases.items()}
        needs = demand(shown, nbytes, places, self._inputs)
        if needs.unplaced and self._pieces and not (self._is_final or any(self._taken.values())):
            # No order has come again yet, and nothing lies here: lay all of them out together.
            self._pieces, self.nbytes = [], 0
            places = {buffer: [] for buffer in leases}
            for lease in leases.values():
                lease.places.clear()
            needs = demand(_outside(self._first, places), nbytes, places, self._inputs)
        needs.unplaced.update(missed & leases.keys())
        full = {b for b in needs.unplaced if len(places[b]) >= _MOST_PLACES}
        needs.unplaced.difference_update(full)
        self.taken_nbytes = max(self.taken_nbytes, needs.peak)
        if needs.unplaced:
            self._add(leases, lay_out(needs, nbytes, self._borders))

    def _add(self, leases: dict[int, Lease], found: dict[int, Place]) -> None:
        """Add memory up to the end of the last place, and make the storages of all places."""
        start, end = self.nbytes, aligned(max(place.stop for place in found.values()))
        # A tensor made in inference mode could not be written in place outside it.
        with torch.inference_mode(False), torch.no_grad():
            if end > start:
                piece = torch.empty(end - start, dtype=torch.uint8, device=self._context.device)
                prefer_huge_pages(piece, collapse=False)
                self._pieces.append((start, piece))
                self.nbytes = end
                _logger.info("%s", self)
            for buffer, place in found.items():
                start, piece = next(p for p in reversed(self._pieces) if p[0] <= place.start)
                part = piece[place.start - start : place.stop - start]
                # A storage of its own over the same memory, which it keeps alive.
                leases[buffer].places.append((place, torch.from_dlpack(part).untyped_storage()))
        self._context.before_free()  # New memory is compute's, and was so before.

    def __repr__(self) -> str:
        return f"Arena({self.nbytes} bytes for {self.taken_nbytes} that are taken at once)"

    def _prefetching(self, root: RootState) -> Prefetching:
        scheduler, budget = root.scheduler, root.context.limiter.budget
        mode = scheduler.backward_prefetch
        return Prefetching(
            unit_of=self._unit_of,
            nbytes={unit.index: unit.nbytes for unit in root.units},
            forward_depth=scheduler.forward_depth,
            backward_depth=0 if mode is None else scheduler.backward_depth,
            when_done=mode is BackwardPrefetch.BACKWARD_POST,
            max_units=inf if budget.max_units is None else budget.max_units,
            max_nbytes=inf if budget.max_nbytes is None else budget.max_nbytes,
        )
