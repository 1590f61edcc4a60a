"""Agreement: ranks exchange what each wants next, and all take part in one of these requests."""

from __future__ import annotations

from collections.abc import Sequence

from layerzero.optional.exchange import Exchange
from layerzero.watch.diagnosis import PeerRaised

NOTHING = -1
"""The request of a rank that wants nothing."""
_RAISED = -2
_WORD = 62
"""Bits in an integer of an exchange."""


class Agreement:
    """What the ranks of one model say to each other inside a pass. Each call is one exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def agree(self, request: int) -> int:
        """Exchange requests; the lowest is followed. Collective; blocks the host.

        Returns:
            The request that all ranks take part in now; NOTHING: no rank wants anything.

        Raises:
            PeerRaised: another rank has raised.
        """
        requests = [row[1] for row in self._exchange([self._exchange.rank, request])]
        if _RAISED in requests:
            rank, text = next(iter(self._exchange.texts(None).items()))
            raise PeerRaised(
                f"rank {rank} raised between or inside units that ranks may skip: {text}"
            )
        return min((each for each in requests if each >= 0), default=NOTHING)

    def report(self, error: BaseException) -> None:
        """Raise on the ranks that ask; see `ask`. Collective."""
        self._exchange([self._exchange.rank, _RAISED])
        self._exchange.texts(f"{type(error).__name__}: {error}".splitlines()[0])

    def bits(self, own: Sequence[bool]) -> list[list[bool]]:
        """Every rank's bits, in rank order; as many on every rank. Collective; blocks the host."""
        rows = self._exchange([self._exchange.rank, *_pack(own)])
        return [_unpack(row[1:], len(own)) for row in rows]


def _pack(bits: Sequence[bool]) -> list[int]:
    words = [bits[start : start + _WORD] for start in range(0, len(bits), _WORD)]
    return [sum(1 << place for place, bit in enumerate(word) if bit) for word in words]


def _unpack(words: Sequence[int], number: int) -> list[bool]:
    return [bool(words[place // _WORD] >> place % _WORD & 1) for place in range(number)]
