"""JoinedAgreement: the exchange that ends a pass is one that ranks need anyway.

Before a forward begins, all ranks know that it comes (`Meeting`), so they follow the recorded order
of its gathers without an exchange. What a rank wants besides, the others learn in the exchange
before what they do next; until then the pass is *unsettled*. After a backward it is the exchange in
which ranks compare which gradients exist.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from layerzero.optional.agreement import Agreement
from layerzero.uneven.table import GO_ON, Bring, Entry


class JoinedAgreement(Agreement):
    """An `Agreement` with as few exchanges as a join can do with."""

    is_unsettled: bool
    """Whether this rank has ended a forward in which others may still want something."""
    _stays_open = False
    """Whether `end` left the pass open: an `ExecOrderRecorder` ends with `end` and then `abort`."""

    def sit(self, bring: Bring, exchanges_at_end: Callable[[], bool]) -> None:
        """
        Args:
            bring: an exchange of this rank inside a forward, which takes an event and bits.
            exchanges_at_end: whether the next collective after a backward is `exchange_at_end`.
        """
        self._bring_inside = bring
        self._exchanges_at_end = exchanges_at_end

    def begin(
        self,
        kind: Hashable,
        needed: Iterable[int],
        bits: Callable[[], Sequence[bool]],
        exchanges: bool,
        repeats: bool = True,
    ) -> None:
        # With `repeats`, ranks exchange at the end of every backward: a shadowing rank cannot know
        # what those that run it want.
        super().begin(kind, needed, bits, exchanges, repeats=True)
        self._is_forward = exchanges
        self._follows = exchanges and self._places.is_known
        if self._follows:
            self._contract.extend(self._places.expected)

    def finish(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        self._expect()
        self._finish_contract()
        if self._follows:
            self.is_unsettled = True
        elif self._is_forward:
            super().finish()
        else:
            # Asked before each exchange: what all ranks have taken part in decides.
            while self.needed and not self._exchanges_at_end() and self._meet(GO_ON):
                self._finish_contract()
        return self._places.events

    def end(self, is_final: bool = True) -> None:
        if self.is_unsettled:
            self._stays_open = True
        else:
            super().end(is_final)

    def abort(self) -> None:
        if self._stays_open:
            self._stays_open = False
            return
        super().abort()
        self.is_unsettled = self._follows = self._is_forward = False
        self._entries: list[Entry] = []
        self._bring: Bring | None = None

    def report(self, error: BaseException) -> bool:
        if self.is_open:
            self._expect()  # What the others take part in before they exchange.
        return super().report(error)

    # An unsettled forward -------------------------------------------------------------------------

    def settle_with(self, bring: Bring) -> list[Entry] | None:
        """One exchange after an unsettled forward.

        Returns:
            What ranks brought; None: some wanted a gather, in which this rank took part.
        """
        self._bring = bring
        if self._meet(GO_ON):
            self._finish_contract()
            return None
        return self._entries

    @property
    def events(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """What has happened in the open pass, as `finish` returns it."""
        return self._places.events

    def settled(self) -> None:
        """Every rank has ended the forward: learn from it."""
        self.is_unsettled = False
        self.end()

    def _say(self, wish: int) -> list[int]:
        if not self._follows:
            return super()._say(wish)
        bits = list(self._bits())
        self._entries = (self._bring or self._bring_inside)(wish, bits)
        self._answers = [entry.bits[: len(bits)] for entry in self._entries]
        return [entry.event for entry in self._entries]
