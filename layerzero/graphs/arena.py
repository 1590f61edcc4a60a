"""Arena: full buffers and reduction inputs of a model at addresses that stay (`arena=True`).

In the first step of an order buffers lie in gaps of the arena, or are allocated as without one.
Before the next forward the order is laid out by what that step took and gave back
(arena_layout.py). From then on taking a buffer swaps the data pointer of its storage with that of
its place, so the views that autograd saved follow, as when the storage is resized.

All orders lie in one memory, each at addresses of its own. Until one has come again, a larger one
replaces the memory. Then memory and places stay, as a captured graph may replay: it adds a piece.

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
from collections.abc import Hashable
from itertools import count
from math import inf
from typing import Any, NamedTuple

import torch

from layerzero.comm.gloo.threads import FinishingStream
from layerzero.config import BackwardPrefetch
from layerzero.flat.buffer import Buffer, BufferEvents
from layerzero.graphs.arena_layout import (
    Event,
    Pass,
    Place,
    Prefetching,
    Roots,
    Take,
    aligned,
    cleaned,
    demand,
    fit,
    lay_out,
    prune,
    with_prefetch,
)
from layerzero.step.extension import Extension
from layerzero.step.root import RootState

_logger = logging.getLogger(__name__)
_MOST_TAKES = 200_000
"""Takes of all orders, after which no order is laid out any more: some models never run one again,
and the host's memory would fill."""


class ArenaBuffer(Buffer):
    """A buffer that lies in the arena, or is allocated by itself where that has no place for it."""

    def __init__(
        self, arena: Arena, tensor: torch.Tensor, events: BufferEvents, is_input: bool
    ) -> None:
        super().__init__(tensor, events)
        self.number = next(arena.numbers)
        self.is_input = is_input
        self._arena = arena
        self._lent: torch.UntypedStorage | None = None

    def note(self, is_behind: bool) -> None:
        """The host issues the gather that takes the buffer; see `Event`."""
        self._arena.reserve(self, is_behind)

    def allocate(self) -> None:
        if self.is_input:
            self.note(is_behind=False)
        self._lent = self._arena.take(self.number)
        if self._lent is None:
            super().allocate()
        else:
            self.storage._swap_data_ptr_(self._lent)  # type: ignore[attr-defined]

    def free(self) -> bool:
        lent, self._lent = self._lent, None
        if lent is not None:
            self.storage._swap_data_ptr_(lent)  # type: ignore[attr-defined]
        self._arena.give_back(self)
        return lent is not None or super().free()


class _Taken(NamedTuple):
    """A buffer that is taken, or reserved for a gather."""

    take: Take | None = None
    """None: the pass has left the orders that are laid out."""
    place: Place | None = None
    """None: outside the arena."""


class Arena(Extension):
    """The arena of one model. It grows between passes; once an order came again, places stay."""

    nbytes = 0
    """Bytes of the memory that it keeps."""
    taken_nbytes = 0
    """The most bytes that an order takes at once."""
    _is_final = False
    """Whether an order has come again since there are places: then none is taken back."""
    _has_missed = False
    """Whether a buffer found no place of its own in a pass since the last layout."""
    _kind: Hashable = None
    _events: list[Event] | None = None
    """Events of the pass that runs, the last of `_passes`; None: outside of passes."""
    _num_visits = 0
    """Visits of units that are among these events."""

    def __init__(self, root: RootState) -> None:
        self.numbers = count()
        self._root: RootState = weakref.proxy(root)
        self._context = root.context
        self._has_thread = isinstance(root.streams.reduce, FinishingStream)
        self._buffers: weakref.WeakValueDictionary[int, ArenaBuffer]
        self._buffers = weakref.WeakValueDictionary()
        self._unit_of: dict[int, int] = {}
        self._taken: dict[int, _Taken] = {}
        """Buffers that a pass has taken."""
        self._in_flight: set[int] = set()
        """Inputs taken in the pass that runs."""
        self._lock = threading.Lock()
        self._roots: Roots = {}
        self._last: dict[bool, Take | None] = {}
        """The last take of the pass that runs: of reduction inputs (True), and of full buffers."""
        self._passes: list[Pass] = []
        """Passes since the last layout."""
        self._first: list[Pass] = []
        """The first step of each order, until places are final."""
        self._pieces: list[tuple[int, torch.Tensor]] = []
        """The memory, each piece with the place where it starts."""
        self._storages: dict[Place, torch.UntypedStorage] = {}
        for unit in root.units:
            for handle in unit.handles:
                if handle.full_nbytes:
                    handle.buffer = buffer = self._buffer(handle.full, handle.events, False)
                    if not unit.is_optional:
                        self._unit_of[buffer.number] = unit.index
                handle.gradients.use_buffers(self._input)

    def _buffer(self, tensor: torch.Tensor, events: BufferEvents, is_input: bool) -> ArenaBuffer:
        buffer = ArenaBuffer(self, tensor, events, is_input)
        self._buffers[buffer.number] = buffer
        return buffer

    def _input(self, tensor: torch.Tensor, events: BufferEvents) -> Buffer:
        if tensor.nbytes:
            return self._buffer(tensor, events, is_input=True)
        return Buffer(tensor, events)

    def reserve(self, taken: ArenaBuffer, is_behind: bool) -> None:
        """Choose the place: in the order of the host, which is the same in every step."""
        if self._events is None:
            return  # What is taken outside of passes lies outside the arena.
        buffer, is_behind = taken.number, is_behind and self._has_thread
        self._note(Event("take", buffer, is_behind))
        with self._lock:
            if not self._last:
                before = frozenset(each.take for each in self._taken.values())
                self._last = dict.fromkeys((False, True), self._roots.get((self._kind, before)))
            last = self._last[taken.is_input]
            take = self._last[taken.is_input] = last and last.next.get(buffer)
            busy = self._busy(buffer, is_behind)
            places = take.places if take else ()
            place = next((each for each in places if not any(map(each.overlaps, busy))), None)
            if place is None:
                self._has_missed = self._pass_missed = True
                gap = fit(taken.nbytes, self._busy(buffer), self._borders, self.nbytes)
                place = gap if gap.stop <= self.nbytes else None
            self._taken[buffer] = _Taken(take, place)
            if taken.is_input:
                self._in_flight.add(buffer)

    def take(self, buffer: int) -> torch.UntypedStorage | None:
        """The storage of the place that was chosen; None: there was none, or it is in use still."""
        with self._lock:
            take, place = self._taken.get(buffer, _Taken())
            if place and any(map(place.overlaps, self._busy(buffer))):
                # Of a sum that waits for more micro-batches.
                self._taken[buffer], place = _Taken(take), None
                self._has_missed = self._pass_missed = True
        return place and (self._storages.get(place) or self._show(place))

    def _busy(self, buffer: int, is_behind: bool = False) -> list[Place]:
        left = self._in_flight if is_behind else ()
        taken = self._taken.items()
        return [at for b, (_, at) in taken if at is not None and b != buffer and b not in left]

    def give_back(self, buffer: ArenaBuffer) -> None:
        self._note(Event("give", buffer.number))
        with self._lock:
            taken = self._taken.pop(buffer.number, _Taken())
            self._in_flight.discard(buffer.number)
        if taken.place and buffer.is_input and self._context.streams.are_apart:
            self._context.before_free()  # See Note [Who wrote there before].

    def _note(self, event: Event) -> None:
        """Record an event of a pass, and the visits of units before it."""
        with self._lock:
            if self._events is not None:
                visits = self._root.scheduler.recorder.trace[self._num_visits :]
                self._num_visits += len(visits)
                self._events += [*(Event("visit", unit) for unit in visits), event]

    def before_forward(self, unit: Any, forward_pass: Any) -> None:
        if not self._root.reducer.kept.adds_up:  # Micro-batches are laid out together.
            passes, self._passes = self._passes, []
            if self._has_missed:
                self._has_missed = False
                self._lay_out(passes)
        self._begin(None)

    def after_forward(self, forwards: Any = None) -> None:
        self._events = None
        # In a model whose orders never come again, the first eight steps are laid out together.
        if self._last and (not self._pass_missed or len(self._first) >= 16):
            self._is_final, self._first = True, []

    end_backward = after_forward

    def before_backward(self, forward_pass: Any) -> None:
        self._begin((forward_pass.order, self._root.reducer.requires_sync, torch.is_grad_enabled()))

    def after_abort(self) -> None:
        self._events, self._passes, self._has_missed = None, [], False

    def _begin(self, kind: Hashable) -> None:
        self._kind, self._events, self._last, self._pass_missed = kind, [], {}, False
        self._num_visits = len(self._root.scheduler.recorder.trace)
        self._in_flight.clear()
        taken = {buffer: each.take for buffer, each in self._taken.items()}
        self._passes.append(Pass(kind, taken, self._events))

    @property
    def _borders(self) -> list[int]:
        return [start + piece.numel() for start, piece in self._pieces]

    def _lay_out(self, recorded: list[Pass]) -> None:
        """Give places to the buffers that these passes show to need any."""
        nbytes = {number: buffer.nbytes for number, buffer in self._buffers.items()}
        inputs = {number for number, buffer in self._buffers.items() if buffer.is_input}
        if prune(self._roots, nbytes) > _MOST_TAKES:
            return
        raw = [cleaned(each, nbytes) for each in recorded]
        passes = [with_prefetch(each, self._prefetching) for each in raw]
        needs = demand(passes, nbytes, self._roots, inputs)
        if not needs.unplaced:  # Something else is prefetched: the user's lists.
            passes, needs = raw, demand(raw, nbytes, self._roots, inputs)
        found = lay_out(needs, self._borders)
        end = max((aligned(place.stop) for place in found.values()), default=0)
        self._first += passes
        if self._is_final:
            self._first = []
        elif end > self.nbytes and not any(each.place for each in self._taken.values()):
            # No order has come again yet, and nothing lies here: lay all of them out together.
            self._pieces, self.nbytes, self._roots = [], 0, {}
            self._first = [cleaned(each, nbytes) for each in self._first]
            needs = demand(self._first, nbytes, self._roots, inputs)
            found = lay_out(needs)
            end = max(aligned(place.stop) for place in found.values())
        self.taken_nbytes = max(self.taken_nbytes, needs.peak)
        for take, place in found.items():
            take.places.append(place)
        # What is taken now lies where it is, but the next pass of this kind finds it there.
        self._taken = {b: each._replace(take=needs.taken.get(b)) for b, each in self._taken.items()}
        self._storages.clear()
        if end > self.nbytes:
            self._add(end)

    def _add(self, end: int) -> None:
        # A tensor made in inference mode could not be written in place outside it.
        with torch.inference_mode(False), torch.no_grad():
            piece = torch.empty(end - self.nbytes, dtype=torch.uint8, device=self._context.device)
        self._pieces.append((self.nbytes, piece))
        self.nbytes = end
        self._context.before_free()  # New memory is compute's, and was so before.
        _logger.info("%s", self)

    def _show(self, place: Place) -> torch.UntypedStorage:
        """A storage of its own over this memory, which it keeps alive."""
        start, piece = next(each for each in reversed(self._pieces) if each[0] <= place.start)
        with torch.inference_mode(False), torch.no_grad():
            part = piece[place.start - start : place.stop - start]
            self._storages[place] = torch.from_dlpack(part).untyped_storage()
        return self._storages[place]

    def __repr__(self) -> str:
        return f"Arena({self.nbytes} bytes for {self.taken_nbytes} that are taken at once)"

    @property
    def _prefetching(self) -> Prefetching:
        root = self._root
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
            is_behind=self._has_thread,
        )
