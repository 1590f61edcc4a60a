"""Meeting: before each forward, backward, clipping and step, ranks agree on what they do next."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NoReturn

from layerzero.optional.exchange import Exchange
from layerzero.step.operations import Operations, remembers_failure
from layerzero.uneven.agreement import JoinedAgreement
from layerzero.uneven.scheduler import JoinedScheduler
from layerzero.uneven.seat import Seat
from layerzero.uneven.table import GO_ON, Entry, Table
from layerzero.uneven.wishes import IN_FORWARD, OUT, RAISED, Kind, Parted, Wish, choose
from layerzero.watch.diagnosis import CollectiveError


class EndedByPeer(RuntimeError):
    """Another rank's error ended the join."""


class Meeting:
    """Where the ranks of one join say what they want to do next."""

    def __init__(
        self,
        seat: Seat,
        operations: Operations,
        exchange: Exchange,
        scheduler: JoinedScheduler,
        agreement: JoinedAgreement,
        num_bits: int,
    ) -> None:
        self.operations = operations
        self._seat = seat
        self._scheduler = scheduler
        self._agreement = agreement
        self._table = Table(exchange, num_bits, seat.optimizers)

    @remembers_failure
    def meet(self, wish: Wish, what: str = "", is_last: bool = False) -> Wish | None:
        """Exchange wishes. Collective.

        Args:
            what: the call, in messages.
            is_last: see `Entry`.

        Returns:
            The wish that all ranks follow; `IN_FORWARD`: a forward went on, in which this rank took
            part, so exchange again; None: all ranks are out of batches.

        Raises:
            RuntimeError: on every rank: one raised, or ranks came to different calls.
        """
        seat = self._seat
        looks = is_last or (
            seat.num_active < seat.num_ranks and wish.kind in (Kind.BACKWARD, Kind.REDUCE)
        )
        entries = self._exchange(wish, is_last, looks)
        if entries is None:
            return IN_FORWARD
        wishes = [entry.wish for entry in entries]
        seat.count(sum(each != OUT for each in wishes), len(wishes))
        if wish == OUT and not is_last:
            self._follow_optimizers(entries)
        try:
            chosen = choose(wishes)
        except Parted:
            chosen = None
        if chosen == RAISED:
            self._raise_of(wish, what)
        is_out = OUT in wishes
        if seat.throws and chosen is not None and is_out:
            self._end(what, "throw_on_early_termination: some ranks are out of batches", wish)
        if chosen is None and seat.num_active:
            self._end(what, "ranks of a join came to different calls", wish)
        if chosen is not None and chosen.kind == Kind.CALL and is_out:
            self._end(what, "a call inside a join needs every rank, but some have no batches", wish)
        return chosen

    def inside_forward(self, event: int, bits: Sequence[bool]) -> list[Entry]:
        """An exchange of a rank whose forward goes on; see `JoinedAgreement.sit`. Collective."""
        return self._bring(IN_FORWARD, False, False, event, bits)

    def tell_of(self, error: Exception) -> None:
        """This rank leaves the join with an error: raise on the others, too. Collective."""
        first_line = (str(error).splitlines() or [""])[0]
        try:
            while self.meet(RAISED, f"{type(error).__name__}: {first_line}") == IN_FORWARD:
                pass
        except (CollectiveError, EndedByPeer):
            pass

    def compare_lists(self) -> None:
        """Compare the optimizers. Collective.

        Raises:
            ValueError: ranks have different ones.
        """
        optimizers, scalers = self._seat.optimizers, self._seat.scalers
        found = self._table.compare(len(optimizers), len(optimizers.options()), len(scalers.all))
        if any(numbers != next(iter(found.values())) for numbers in found.values()):
            texts = {
                rank: f"{count} with {options} numbers in their groups, {scaler_count} scalers"
                for rank, (count, options, scaler_count) in found.items()
            }
            raise ValueError(f"join: optimizers differ between ranks: {texts}")

    def _exchange(self, wish: Wish, is_last: bool, looks: bool) -> list[Entry] | None:
        bring = functools.partial(self._bring, wish, is_last, looks)
        if not self._agreement.is_unsettled:
            return bring()
        entries = self._agreement.settle_with(bring)
        if entries is not None:
            self._scheduler.settle_order()
        return entries

    def _bring(
        self, wish: Wish, is_last: bool, looks: bool, event: int = GO_ON, bits: Sequence[bool] = ()
    ) -> list[Entry]:
        notified = None if wish == OUT else self._seat.notify()
        entries = self._table(wish, is_last=is_last, looks=looks, event=event, bits=bits)
        if notified is not None:
            notified.wait()
        return entries

    def _follow_optimizers(self, entries: list[Entry]) -> None:
        """This rank is out: its options and gradients are as those of ranks that are not."""
        optimizers = self._seat.optimizers
        others = [entry for entry in entries if entry.wish != OUT]
        others = others or [entry for entry in entries if entry.is_last]
        if others:
            optimizers.copy_options(others[0].options)
            optimizers.zero_like([entry.gradient_states for entry in others])

    def _raise_of(self, wish: Wish, what: str) -> NoReturn:
        self._seat.all_know_of_error()
        texts = self._table.texts(what if wish == RAISED else None)
        rank, text = next(iter(texts.items()))
        raise EndedByPeer(f"rank {rank} left the join with an error: {text}")

    def _end(self, what: str, error: str, wish: Wish) -> NoReturn:
        """Raise on every rank, with what each one came to."""
        self._seat.all_know_of_error()
        texts = self._table.texts(what if wish != OUT else "out of batches")
        found = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        raise RuntimeError(f"{error} ({found})")
