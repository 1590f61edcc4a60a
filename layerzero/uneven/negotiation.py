"""Negotiation: before each forward, backward, clipping and step, ranks agree on what comes next."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NoReturn

from layerzero.optional.agreement import GO_ON, pack_bits, unpack_bits
from layerzero.optional.exchange import Exchange
from layerzero.step.operations import Operations, remembers_failure
from layerzero.uneven.parts import Entry, JoinedSchedule
from layerzero.uneven.requests import (
    IN_FORWARD,
    OUT,
    RAISED,
    WIDTH,
    Different,
    Kind,
    Request,
    choose,
)
from layerzero.uneven.state import JoinState
from layerzero.watch.diagnosis import CollectiveError


class EndedByPeer(RuntimeError):
    """Another rank's error ended the join."""


class Negotiation:
    """Exchanges the requests of the ranks of one join, with what else each brings."""

    def __init__(
        self,
        state: JoinState,
        operations: Operations,
        exchange: Exchange,
        schedule: JoinedSchedule,
        num_bits: int,
    ) -> None:
        """`num_bits`: at most so many are brought inside a forward."""
        self.operations = operations
        self._state = state
        self._exchange = exchange
        self._schedule = schedule
        self._num_bits = num_bits

    @remembers_failure
    def choose(self, request: Request, what: str = "", is_last: bool = False) -> Request | None:
        """Exchange requests. Collective.

        Args:
            what: the call, in messages.
            is_last: see `Entry`.

        Returns:
            The request that all ranks follow; `IN_FORWARD`: a forward went on, in which this rank
            took part, so exchange again; None: all ranks are out of batches.

        Raises:
            RuntimeError: on every rank: one raised, or ranks came to different calls.
        """
        state, agreement = self._state, self._schedule.agreement
        looks = is_last or (
            state.num_active < state.num_ranks and request.kind in (Kind.BACKWARD, Kind.REDUCE)
        )
        bring = functools.partial(self._bring, request, is_last, looks)
        if agreement.is_unsettled:
            entries = agreement.settle_with(bring)
            if entries is None:
                return IN_FORWARD
            self._schedule.settle_order()
        else:
            entries = bring()
        requests = [entry.request for entry in entries]
        state.num_active, state.num_ranks = sum(r != OUT for r in requests), len(requests)
        if request == OUT and not is_last:
            self._follow_optimizers(entries)
        try:
            chosen = choose(requests)
        except Different:
            self._end(what, "ranks of a join came to different calls", request)
        if chosen == RAISED:
            state.has_ended = True
            texts = self._exchange.texts(what if request == RAISED else None)
            rank, text = next(iter(texts.items()))
            raise EndedByPeer(f"rank {rank} left the join with an error: {text}")
        if chosen is not None and OUT in requests:
            if state.throws:
                error = "throw_on_early_termination: some ranks are out of batches"
                self._end(what, error, request)
            if chosen.kind == Kind.CALL:
                error = "a call inside a join needs every rank, but some have no batches"
                self._end(what, error, request)
        return chosen

    def inside_forward(self, event: int, bits: Sequence[bool]) -> list[Entry]:
        """An exchange of a rank whose forward goes on. Collective."""
        return self._bring(IN_FORWARD, False, False, event, bits)

    def raise_everywhere(self, error: Exception) -> None:
        """This rank leaves the join with an error: raise on the others, too. Collective."""
        first_line = (str(error).splitlines() or [""])[0]
        try:
            while self.choose(RAISED, f"{type(error).__name__}: {first_line}") == IN_FORWARD:
                pass
        except (CollectiveError, EndedByPeer):
            pass

    def compare_lists(self) -> None:
        """Compare the optimizers. Collective.

        Raises:
            ValueError: ranks have different ones.
        """
        optimizers, scalers = self._state.optimizers, self._state.scalers
        own = [len(optimizers), len(optimizers.options()), len(scalers.all)]
        rows = self._exchange([self._exchange.rank, *own])
        if any(row[1:] != rows[0][1:] for row in rows):
            texts = {
                rank: f"{count} with {options} numbers in their groups, {scaler_count} scalers"
                for rank, count, options, scaler_count in rows
            }
            raise ValueError(f"join: optimizers differ between ranks: {texts}")

    def _bring(
        self,
        request: Request,
        is_last: bool,
        looks: bool,
        event: int = GO_ON,
        bits: Sequence[bool] = (),
    ) -> list[Entry]:
        """Exchange this rank's entry, whose optimizers' part is as they are now. Collective.

        Args:
            looks: see `JoinedOptimizers.gradient_states`.

        Returns:
            Every rank's entry, in rank order.
        """
        notified = None if request == OUT else self._state.notify()
        optimizers = self._state.optimizers
        words = pack_bits([*bits, *[False] * (self._num_bits - len(bits))])
        row = [self._exchange.rank, *map(int, request), is_last, event, *words]
        row += [*optimizers.gradient_states(looks), *optimizers.options()]
        states = 3 + WIDTH + len(words)
        options = states + len(optimizers)
        entries = [
            Entry(
                Request(*row[1 : 1 + WIDTH]),
                bool(row[1 + WIDTH]),
                row[2 + WIDTH],
                unpack_bits(row[3 + WIDTH : states], self._num_bits),
                row[states:options],
                row[options:],
            )
            for row in self._exchange(row)
        ]
        if notified is not None:
            notified.wait()
        return entries

    def _follow_optimizers(self, entries: list[Entry]) -> None:
        """This rank is out: its options and gradients are as those of ranks that are not."""
        optimizers = self._state.optimizers
        others = [entry for entry in entries if entry.request != OUT]
        others = others or [entry for entry in entries if entry.is_last]
        if others:
            optimizers.copy_options(others[0].options)
            optimizers.zero_like([entry.gradient_states for entry in others])

    def _end(self, what: str, error: str, request: Request) -> NoReturn:
        """Raise on every rank, with what each one came to."""
        self._state.has_ended = True
        texts = self._exchange.texts(what if request != OUT else "out of batches")
        found = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        raise RuntimeError(f"{error} ({found})")
