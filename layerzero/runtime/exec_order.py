"""ExecOrderRecorder: which unit comes next, learnt from earlier passes. Pure Python, no torch.

A pass is one forward or one backward; its *kind* says which orders it can be compared with (for a
forward: the module called, training or eval; for a backward: the forward it belongs to). Several
orders are kept for each kind, so that branches and modes live side by side. While a pass runs,
the orders that agree with it so far are the candidates, and the next unit is known only as long as
all candidates agree. Hence a prediction is never a guess between two branches; an unseen order
simply has no predictions and is recorded. An order that was not seen for many passes of its kind
is dropped, so that one odd pass does not stand in the way for ever. All of it depends on the
sequence of visits alone: ranks that take the same path predict, and prefetch, the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

Order = tuple[int, ...]


class ExecOrderRecorder:
    """Records visits of units (integers) by pass and predicts the next ones."""

    def __init__(self, max_kinds: int = 64, max_age: int = 32) -> None:
        """
        Args:
            max_kinds: kinds remembered; the least recently seen one makes room.
            max_age: passes of its kind after which an order that was not seen again is dropped.
        """
        self._max_kinds = max_kinds
        self._max_age = max_age
        self._known: OrderedDict[Hashable, _Orders] = OrderedDict()
        self._kind: Hashable | None = None
        self._trace: list[int] = []
        self._candidates: list[Order] = []
        self._is_first = False

    @property
    def is_recording(self) -> bool:
        return self._kind is not None

    @property
    def is_first(self) -> bool:
        """Whether no order was known for the kind of the open pass when it began."""
        return self._is_first

    def begin(self, kind: Hashable) -> None:
        """Start a pass. One pass at a time."""
        assert self._kind is None, f"a pass of kind {self._kind} is still open"
        self._kind = kind
        self._trace = []
        self._candidates = self.orders(kind)
        self._is_first = not self._candidates

    def visit(self, unit: int) -> None:
        """The pass needs `unit` now."""
        position = len(self._trace)
        self._trace.append(unit)
        self._candidates = [
            order for order in self._candidates if len(order) > position and order[position] == unit
        ]

    def predict(self, depth: int) -> list[int]:
        """The next units, at most `depth`, as far as all matching orders agree."""
        if not self._candidates:
            return []
        first, *others = self._candidates
        start = len(self._trace)
        predicted: list[int] = []
        for position in range(start, min(start + depth, len(first))):
            unit = first[position]
            if any(len(order) <= position or order[position] != unit for order in others):
                break
            predicted.append(unit)
        return predicted

    def end(self) -> Order:
        """Finish the pass and remember its order."""
        assert self._kind is not None, "no pass is open"
        order = tuple(self._trace)
        self._known.setdefault(self._kind, _Orders()).note(order, self._max_age)
        self._known.move_to_end(self._kind)
        if len(self._known) > self._max_kinds:
            self._known.popitem(last=False)
        self.abort()
        return order

    def abort(self) -> None:
        """Drop the open pass, if any; what was learnt before stays."""
        self._kind = None
        self._trace = []
        self._candidates = []
        self._is_first = False

    def orders(self, kind: Hashable) -> list[Order]:
        """The orders remembered for a kind."""
        return list(self._known[kind].last_seen) if kind in self._known else []


class _Orders:
    """The orders of one kind, each with the number of the pass that last had it."""

    def __init__(self) -> None:
        self.num_passes = 0
        self.last_seen: dict[Order, int] = {}

    def note(self, order: Order, max_age: int) -> None:
        self.num_passes += 1
        self.last_seen[order] = self.num_passes
        if len(self.last_seen) > 1:
            oldest = self.num_passes - max_age
            self.last_seen = {o: seen for o, seen in self.last_seen.items() if seen > oldest}
