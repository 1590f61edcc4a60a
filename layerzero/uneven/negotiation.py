"""Negotiation: before each forward, backward, clipping and step, ranks agree on what comes next."""

from __future__ import annotations

import contextlib
from typing import NamedTuple, NoReturn

from layerzero.optional.exchange import Exchange
from layerzero.step.operations import Operations, remembers_failure
from layerzero.uneven.requests import OUT, RAISED, WIDTH, Different, Kind, Request, choose
from layerzero.uneven.state import JoinState
from layerzero.watch.diagnosis import CollectiveError


class _Entry(NamedTuple):
    """What one rank brings to an exchange."""

    request: Request
    is_last: bool
    """Whether all ranks are out of batches, and this one was among the last."""
    gradient_states: list[int]
    """`JoinedOptimizers.gradient_states`"""
    options: list[int]
    """`JoinedOptimizers.options`"""


class EndedByPeer(RuntimeError):
    """Another rank's error ended the join."""


class Negotiation:
    """Exchanges the requests of the ranks of one join, with what else each brings."""

    def __init__(self, state: JoinState, operations: Operations, exchange: Exchange) -> None:
        self.operations = operations
        self._state = state
        self._exchange = exchange

    @remembers_failure
    def choose(self, request: Request, what: str = "", is_last: bool = False) -> Request | None:
        """Exchange requests. Collective.

        Args:
            what: the call, in messages.
            is_last: see `_Entry`.

        Returns:
            The request that all ranks follow; None: all ranks are out of batches.
            `JoinState.is_common` says whether all ranks have it.

        Raises:
            RuntimeError: on every rank: one raised, or ranks came to different calls.
        """
        state = self._state
        looks = is_last or (
            state.num_active < state.num_ranks and request.kind in (Kind.BACKWARD, Kind.REDUCE)
        )
        entries = self._bring(request, is_last, looks)
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
        state.is_common = all(each == chosen for each in requests)
        return chosen

    def raise_everywhere(self, error: Exception) -> None:
        """This rank leaves the join with an error: raise on the others, too. Collective."""
        first_line = (str(error).splitlines() or [""])[0]
        with contextlib.suppress(CollectiveError, EndedByPeer):
            self.choose(RAISED, f"{type(error).__name__}: {first_line}")

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

    def _bring(self, request: Request, is_last: bool, looks: bool) -> list[_Entry]:
        """Exchange this rank's entry, whose optimizers' part is as they are now. Collective.

        Args:
            looks: see `JoinedOptimizers.gradient_states`.

        Returns:
            Every rank's entry, in rank order.
        """
        notified = None if request == OUT else self._state.notify()
        optimizers = self._state.optimizers
        row = [self._exchange.rank, *map(int, request), is_last]
        row += [*optimizers.gradient_states(looks), *optimizers.options()]
        options = 2 + WIDTH + len(optimizers)
        entries = [
            _Entry(
                Request(*each[1 : 1 + WIDTH]),
                bool(each[1 + WIDTH]),
                each[2 + WIDTH : options],
                each[options:],
            )
            for each in self._exchange(row)
        ]
        if notified is not None:
            notified.wait()
        return entries

    def _follow_optimizers(self, entries: list[_Entry]) -> None:
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
