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
        self._recorded: OrderedDict[Hashable, dict[Order, int]] = OrderedDict()
        """Orders of each kind, each with the number of the pass that last followed it."""
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

    def end(self) -> Order:
        """Finish the pass, record its order and return it."""
        assert self._kind is not None, "no pass is open"
        order = tuple(self.trace)
        before = self._recorded.get(self._kind, {})
        number = max(before.values(), default=0) + 1
        recent = {each: seen for each, seen in before.items() if seen > number - MAX_AGE}
        self._recorded[self._kind] = {**recent, order: number}
        if len(self._recorded) > MAX_KINDS:
            self._recorded.popitem(last=False)
        self.abort()
        return order

    def abort(self) -> None:
        """Drop the open pass, if any; recorded orders stay."""
        self._kind = None
        self.trace = []
        self._candidates = []

    def forget(self) -> None:
        """Drop all recorded orders. Between passes."""
        self._recorded.clear()

    def orders(self, kind: Hashable) -> list[Order]:
        """The orders recorded for a kind."""
        return [*self._recorded.get(kind, ())]
