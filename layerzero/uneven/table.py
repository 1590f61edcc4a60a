"""Table: the one exchange of a join: what every rank brings to it, and finds there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from layerzero.optional.exchange import Exchange
from layerzero.uneven.optimizers import JoinedOptimizers
from layerzero.uneven.wishes import WIDTH, Wish

GO_ON = -1
"""Stands for no event of a pass; see agreement.py."""
_WORD = 62
"""Bits in an integer of an exchange."""


class Entry(NamedTuple):
    """What one rank brings."""

    rank: int
    wish: Wish
    is_last: bool
    """Whether all ranks are out of batches, and this one was among the last."""
    event: int
    """What it wants in an unsettled forward, as in `Agreement`."""
    bits: list[bool]
    """What an `OptionalScheduler` compares of a forward."""
    gradient_states: list[int]
    """`JoinedOptimizers.gradient_states`"""
    options: list[int]
    """`JoinedOptimizers.options`"""


Bring = Callable[[int, Sequence[bool]], list[Entry]]


class Table:
    """Exchanges entries, all of one size, between the ranks of a join."""

    def __init__(self, exchange: Exchange, num_bits: int, optimizers: JoinedOptimizers) -> None:
        self._exchange = exchange
        self._num_bits = num_bits
        self._num_words = -(-num_bits // _WORD)
        self._optimizers = optimizers

    def __call__(
        self,
        wish: Wish,
        *,
        is_last: bool = False,
        looks: bool = False,
        event: int = GO_ON,
        bits: Sequence[bool] = (),
    ) -> list[Entry]:
        """Exchange this rank's entry, whose optimizers' part is as they are now. Collective.

        Args:
            looks: see `JoinedOptimizers.gradient_states`.

        Returns:
            Every rank's entry, in rank order.
        """
        words = [0] * self._num_words
        for place, bit in enumerate(bits):
            words[place // _WORD] |= int(bit) << place % _WORD
        row = [self._exchange.rank, *wish.to_row(), is_last, event, *words]
        row += self._optimizers.gradient_states(looks)
        return [self._entry(found) for found in self._exchange([*row, *self._optimizers.options()])]

    def compare(self, *numbers: int) -> dict[int, list[int]]:
        """Every rank's numbers. Collective."""
        rows = self._exchange([self._exchange.rank, *numbers])
        return {row[0]: list(row[1:]) for row in rows}

    def texts(self, text: str | None) -> dict[int, str]:
        """See `Exchange.texts`."""
        return self._exchange.texts(text)

    def _entry(self, row: Sequence[int]) -> Entry:
        place = 1 + WIDTH
        is_last, event = row[place : place + 2]
        states = place + 2 + self._num_words
        options = states + len(self._optimizers)
        words = row[place + 2 : states]
        bits = [bool(words[i // _WORD] >> i % _WORD & 1) for i in range(self._num_bits)]
        wish = Wish.from_row(row[1:place])
        return Entry(
            row[0], wish, bool(is_last), event, bits, list(row[states:options]), list(row[options:])
        )
