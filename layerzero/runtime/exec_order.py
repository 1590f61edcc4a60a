"""ExecOrderRecorder: predicts the next unit from earlier passes. Pure Python, no torch.

A pass is one forward or one backward. Its *kind* determines which orders it is compared with (for
a forward: the module called, training or eval; for a backward: the order of its forward). Several
orders are kept for each kind, so that branches and modes coexist. While a pass runs, the orders
that match it so far are the candidates, and the next unit is predicted only while all candidates
agree. So a prediction never guesses between two branches, and an unseen order has no predictions
and is recorded. An order that was not seen for many passes of its kind is dropped, so that one odd
pass does not block predictions for ever. Everything depends only on the sequence of visits: ranks
that take the same path predict, and prefetch, alike.
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
            max_kinds: number of kinds kept; the least recently seen one is dropped.
            max_age: passes of its kind after which an order not seen again is dropped.
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
        """Whether no order was recorded for the kind of the open pass when it began."""
        return self._is_first

    def begin(self, kind: Hashable) -> None:
        """Start a pass. Only one pass can be open."""
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
        """The next units, at most `depth`, as far as all candidates agree."""
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
        """Finish the pass, record its order and return it."""
        assert self._kind is not None, "no pass is open"
        order = tuple(self._trace)
        self._known.setdefault(self._kind, _Orders()).note(order, self._max_age)
        self._known.move_to_end(self._kind)
        if len(self._known) > self._max_kinds:
            self._known.popitem(last=False)
        self.abort()
        return order

    def abort(self) -> None:
        """Drop the open pass, if any; recorded orders stay."""
        self._kind = None
        self._trace = []
        self._candidates = []
        self._is_first = False

    def forget(self) -> None:
        """Drop all recorded orders. Between passes."""
        self._known.clear()

    def orders(self, kind: Hashable) -> list[Order]:
        """The orders recorded for a kind."""
        return list(self._known[kind].last_seen) if kind in self._known else []


class _Orders:
    """The orders of one kind, each with the number of the pass that last followed it."""

    def __init__(self) -> None:
        self.num_passes = 0
        self.last_seen: dict[Order, int] = {}

    def note(self, order: Order, max_age: int) -> None:
        self.num_passes += 1
        self.last_seen[order] = self.num_passes
        if len(self.last_seen) > 1:
            oldest = self.num_passes - max_age
            self.last_seen = {o: seen for o, seen in self.last_seen.items() if seen > oldest}
