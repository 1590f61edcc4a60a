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

MAX_KINDS = 64
"""Number of kinds kept; the least recently seen one is dropped."""
MAX_AGE = 32
"""Passes of its kind after which an order that was not seen again is dropped."""


class ExecOrderRecorder:
    """Records visits of units (integers) by pass and predicts the next ones."""

    def __init__(self) -> None:
        self._recorded: OrderedDict[Hashable, _Orders] = OrderedDict()
        self._before: tuple[Hashable, _Orders | None, tuple[Hashable, _Orders] | None] | None = None
        """State that `take_back` restores: a kind, its orders, and the kind dropped for it."""
        self._kind: Hashable | None = None
        self.trace: list[int] = []
        """Visits of the open pass."""
        self._candidates: list[Order] = []

    @property
    def is_recording(self) -> bool:
        return self._kind is not None

    def begin(self, kind: Hashable) -> None:
        """Start a pass. Only one pass can be open."""
        assert self._kind is None, f"a pass of kind {self._kind} is still open"
        self._kind = kind
        self._candidates = self.orders(kind)
        if self._candidates:
            self._recorded.move_to_end(kind)

    def visit(self, unit: int) -> None:
        """The pass needs `unit` now."""
        position = len(self.trace)
        self.trace.append(unit)
        self._candidates = [
            order for order in self._candidates if len(order) > position and order[position] == unit
        ]

    def predict(self, depth: int) -> list[int]:
        """The next units, at most `depth`, as far as all candidates agree."""
        start = len(self.trace)
        ahead = self._candidates[0][start : start + depth] if self._candidates else ()
        for order in self._candidates:
            while order[start : start + len(ahead)] != ahead:
                ahead = ahead[:-1]
        return [*ahead]

    def end(self, is_final: bool = True) -> Order:
        """Finish the pass, record its order and return it.

        Args:
            is_final: whether `take_back` leaves the record.
        """
        assert self._kind is not None, "no pass is open"
        order = tuple(self.trace)
        before, dropped = self._recorded.get(self._kind), None
        self._recorded[self._kind] = (before or _Orders()).with_pass(order)
        if len(self._recorded) > MAX_KINDS:
            dropped = self._recorded.popitem(last=False)
        self._before = None if is_final else (self._kind, before, dropped)
        self.abort()
        return order

    def take_back(self) -> bool:
        """Drop the record of the latest pass that ended, unless that is final. Returns whether it
        did."""
        if self._before is None:
            return False
        (kind, before, dropped), self._before = self._before, None
        if before is None:
            del self._recorded[kind]
        else:
            self._recorded[kind] = before
        if dropped is not None:
            self._recorded[dropped[0]] = dropped[1]
            self._recorded.move_to_end(dropped[0], last=False)
        return True

    def abort(self) -> None:
        """Drop the open pass, if any; recorded orders stay."""
        self._kind = None
        self.trace = []
        self._candidates = []

    def forget(self) -> None:
        """Drop all recorded orders. Between passes."""
        self._recorded.clear()
        self._before = None

    def orders(self, kind: Hashable) -> list[Order]:
        """The orders recorded for a kind."""
        return list(self._recorded[kind].last_seen) if kind in self._recorded else []


class _Orders:
    """The orders of one kind, each with the number of the pass that last followed it; never
    changed."""

    def __init__(self, num_passes: int = 0, last_seen: dict[Order, int] | None = None) -> None:
        self.num_passes = num_passes
        self.last_seen = last_seen or {}

    def with_pass(self, order: Order) -> _Orders:
        number = self.num_passes + 1
        last_seen = {**self.last_seen, order: number}
        if len(last_seen) > 1:
            last_seen = {o: seen for o, seen in last_seen.items() if seen > number - MAX_AGE}
        return _Orders(number, last_seen)
