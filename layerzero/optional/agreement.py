"""Agreement: what all ranks do next at a place; see the notes in __init__.py."""

from __future__ import annotations

from collections import deque
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)

from layerzero.optional.exchange import Exchange
from layerzero.optional.places import Places
from layerzero.watch.diagnosis import CollectiveError, PeerRaised

GO_ON = -1
"""Stands for no event, but the next required collective."""
_RAISED = -2
_WORD = 62
"""Bits in an integer of an exchange."""


class Agreement:
    """Keeps the ranks of one model in step through a pass.

    Events are integers, as in places.py.
    """

    is_open: bool
    """Whether a pass runs."""
    places: Places
    """What has happened in the open pass, and where it is."""
    needed: frozenset[int]
    """Optional units that may come in the pass."""
    _bits: Callable[[], Sequence[bool]]

    def __init__(
        self,
        exchange: Exchange,
        region_of: Mapping[int, str],
        label_of: Callable[[int], str],
        take_part: Callable[[int], None],
        before_event: Callable[[], None],
    ) -> None:
        """
        Args:
            region_of: index of each optional unit, and the name of its region.
            label_of: a unit's name in messages.
            take_part: takes part in an event that this rank has no use for.
            before_event: called before any event that all agreed on.
        """
        self._exchange = exchange
        self._region_of = region_of
        self._label_of = label_of
        self._take_part = take_part
        self._before_event = before_event
        self.places = Places()
        self._contract: deque[int] = deque()
        self.abort()

    # Passes -----------------------------------------------------------------------------------

    def begin(
        self,
        kind: Hashable,
        needed: Iterable[int],
        bits: Callable[[], Sequence[bool]],
        exchanges: bool,
        repeats: bool = True,
    ) -> None:
        """Begin a pass.

        Args:
            needed: see `Places.begin`.
            bits: what this rank brings to each exchange; as many on every rank.
            exchanges: whether ranks also exchange at places where an optional unit came before. If
                not, they take part in what came there.
            repeats: whether a rank may want an event more often than it came before. Then they
                exchange after that.
        """
        self.abort()
        self.needed = frozenset(needed)
        if self.needed:
            self.places.begin(kind, self.needed, roam=exchanges)
        self._bits = bits
        self._exchanges = exchanges
        self._may_expect = not exchanges
        self._repeats = repeats
        self.is_open = True

    def begin_call(self, part: str) -> None:
        """Name the exchanges that follow after the part of the model that is called by itself; "":
        the whole model is."""
        self._exchange.name(f" in a call of {part!r} outside the model's forward" if part else "")

    def required(self, collective: int) -> bool:
        """This rank comes to a required collective: first settle what others want before it.

        Returns:
            Whether there was any optional event since the required collective before.
        """
        if not self.needed:
            return False
        self.settle(collective)
        had_events = self.places.has_events
        self.places.required(collective)
        self._may_expect = not self._exchanges
        return had_events

    def want(self, event: int, at_end: bool = False) -> bool:
        """This rank wants an optional event now; take part in what comes before it.

        At a place where no recorded pass had optional events, this rank alone may know of this one.
        A reduction can wait. For a gather it asks nonetheless: the others answer if they are about
        to leave the recorded path, too; else the ranks have parted, and each raises.

        Args:
            at_end: whether all ranks call `exchange_at_end` or this.

        Returns:
            Whether all ranks take part now; False: the reduction has to wait for the end.
        """
        if self._may_expect:
            self._expect()
        while event not in self._contract:
            self._finish_contract()
            if at_end or self._may_exchange:
                self._meet(event)
            elif event % 2:
                return False
            else:
                self._ask_out_of_place(event)
        while (other := self._contract.popleft()) != event:
            self._pass_over(other)
        self._begin_event(event)
        return True

    def next_gathers(self, depth: int) -> list[int]:
        """Units whose gathers come next on every rank, at most `depth`.

        Those of optional units as far as no rank has to be asked, and those of required units. It
        ends before a unit that the pass has gathered already: whether that is still resident may
        differ between ranks. The same on every rank that calls it behind the same event.
        """
        if self._may_expect:
            self._expect()
        came = self.places.came
        gathers: list[int] = []
        for event in self._ahead():
            if len(gathers) == depth or event in came:
                break
            if event % 2 == 0:
                gathers.append(event // 2)
        return gathers

    def _ahead(self) -> Iterator[int]:
        yield from list(self._contract)
        for collective, expected in self.places.ahead():
            yield collective
            if expected and not (self._exchanges or self._may_exchange_where(expected)):
                yield from self._needed_of(expected)

    def finish(self) -> None:
        """The pass ends: settle what others want."""
        self.settle(None)

    def exchange_at_end(self) -> None:
        """Exchange until no rank wants anything. Call it after `finish`, on every rank."""
        while self._meet(GO_ON):
            self._finish_contract()

    def gather(self, bits: Sequence[bool]) -> list[list[bool]]:
        """Every rank's bits, in rank order. Collective; for use between passes."""
        self._bits = lambda: bits
        self._say(GO_ON)
        return self.answers

    def end(self, is_final: bool = True) -> None:
        """The pass has ended: learn from it.

        Args:
            is_final: whether every rank has ended it, or `Places.take_back` may follow.
        """
        self.places.end(is_final)
        self.abort()

    def abort(self) -> None:
        """Drop the open pass, if any."""
        self.places.abort()
        self._contract.clear()
        self._bits = lambda: ()
        self._rows: list[list[int]] = []
        self._num_bits = 0
        self._answers: list[list[bool]] | None = None
        self._may_expect = False
        self._exchanges = self._repeats = True
        self.is_open = False
        self.needed = frozenset()

    def report(self, error: BaseException) -> None:
        """This rank leaves the pass with an error: raise on ranks that exchange here, too."""
        if self.is_open and self.needed and self._may_exchange:
            self._finish_contract()
            self._say(_RAISED)
            self._exchange.texts(f"{type(error).__name__}: {error}".splitlines()[0])

    # One place --------------------------------------------------------------------------------

    @property
    def _may_exchange(self) -> bool:
        """Whether all ranks exchange at this place."""
        return self._may_exchange_where(self.places.expected)

    def _may_exchange_where(self, expected: list[int]) -> bool:
        if not self.places.is_known:
            return True
        # Where a gather comes twice (recomputation), how often depends on what a rank ran.
        return bool(expected) and (self._repeats or len(set(expected)) < len(expected))

    def settle(self, collective: int | None) -> None:
        """This rank is done with the place; `collective` comes next (None: the end of the pass)."""
        if not self.needed:
            return
        if self._may_expect:
            self._expect()
        if self._contract:
            self._finish_contract()
        if self._may_exchange or not self.places.goes_on_with(collective):
            self.exchange_at_end()

    def _expect(self) -> None:
        """Where ranks do not exchange, take what came here before as agreed."""
        if self._may_expect and self.places.is_known:
            self._may_expect = False
            self._contract.extend(self._needed_of(self.places.expected))

    def _needed_of(self, expected: list[int]) -> list[int]:
        return [event for event in expected if event // 2 in self.needed]

    def _finish_contract(self) -> None:
        while self._contract:
            self._pass_over(self._contract.popleft())

    def _pass_over(self, event: int) -> None:
        self._begin_event(event)
        self._take_part(event)

    def _begin_event(self, event: int) -> None:
        self.places.happened(event)
        self._before_event()

    def _meet(self, wish: int) -> bool:
        """Exchange wishes; if any rank wants an event, extend the contract by it and what follows.

        Raises:
            RuntimeError: a rank raised at this place.
        """
        wishes = self._say(wish)
        if _RAISED in wishes:
            self.abort()
            rank, text = next(iter(self._exchange.texts(None).items()))
            raise PeerRaised(f"rank {rank} raised between or inside optional modules: {text}")
        wanted = {wish for wish in wishes if wish >= 0}
        if not wanted:
            return False
        order = {event: place for place, event in enumerate(self._candidates())}
        self._follow(min(wanted, key=lambda event: (order.get(event, len(order)), event)))
        return True

    def _candidates(self) -> list[int]:
        """What came here before; of several wishes the first of these is followed. In forward that
        is what came behind the latest event here: a rank that goes on as before need not ask."""
        expected = list(dict.fromkeys(self.places.expected))
        last = self.places.last_event
        if self._exchanges and self.places.has_events and last in expected:
            begin = expected.index(last) + 1
            return expected[begin:] + expected[:begin]
        return expected

    def _follow(self, first: int) -> None:
        """All ranks take part in this event next, and in what followed it."""
        self._contract.append(first)
        # In backward, what came before has come already: nothing more follows from one wish.
        expected = list(dict.fromkeys(self.places.expected)) if self._exchanges else []
        begin = expected.index(first) + 1 if first in expected else len(expected)
        for event in expected[begin:]:
            if self._region_of[event // 2] != self._region_of[first // 2]:
                break
            self._contract.append(event)

    def _say(self, wish: int) -> list[int]:
        bits = self._bits()
        self._rows = self._exchange([self._exchange.rank, wish, *pack_bits(bits)])
        self._num_bits, self._answers = len(bits), None
        return [row[1] for row in self._rows]

    @property
    def answers(self) -> list[list[bool]]:
        """Of the last exchange in the pass, in rank order: the bits that each rank brought."""
        if self._answers is None:
            self._answers = [unpack_bits(row[2:], self._num_bits) for row in self._rows]
        return self._answers

    def _ask_out_of_place(self, gather: int) -> None:
        try:
            self._meet(gather)
        except CollectiveError as error:
            raise CollectiveError(
                f"{error}\n{self._label_of(gather // 2)}: this optional module was called, or ran "
                "backward, at a place of the pass where it never did before, while others went "
                "on as they did before; call it between the same modules in every step"
            ) from error


def pack_bits(bits: Sequence[bool]) -> list[int]:
    words = []
    for start in range(0, len(bits), _WORD):
        word = 0
        for place, bit in enumerate(bits[start : start + _WORD]):
            if bit:
                word |= 1 << place
        words.append(word)
    return words


def unpack_bits(words: Sequence[int], number: int) -> list[bool]:
    return [bool(words[place // _WORD] >> place % _WORD & 1) for place in range(number)]
