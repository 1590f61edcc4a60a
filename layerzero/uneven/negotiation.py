"""Negotiation: before each forward, backward, clipping and step, ranks agree on what comes next."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from layerzero.optional.exchange import Exchange
from layerzero.step.operations import Operations, remembers_failure
from layerzero.uneven.optimizers import JoinedOptimizers


class Kind(enum.IntEnum):
    """Kinds of requests; the lowest is chosen first."""

    BACKWARD = 0
    MICRO_FORWARD = 1
    EVALUATION = 2
    FORWARD = 3
    CLIP = 4
    REDUCE = 5
    STEP = 6
    CALL = 7
    """Another collective call: ranks without batches cannot take part in it."""
    OUT = 8


_TEXTS = (
    *("backward", "a forward inside no_sync", "a forward without gradients", "a forward"),
    *("clip_grad_norm_", "reduce_gradients", "optimizer.step", "", "out of batches"),
)
FORWARDS = (Kind.MICRO_FORWARD, Kind.EVALUATION, Kind.FORWARD)
FOLLOWED = (Kind.BACKWARD, *FORWARDS, Kind.REDUCE)
"""What ranks without a batch for it follow collective by collective."""


class Request(NamedTuple):
    """What a rank wants to do next. Ranks with equal requests do it together."""

    kind: int
    which: int = 0
    """Of the unit called or clipped, of the forward that backward runs through, of the optimizer in
    the join's list."""
    is_training: int = False
    """Of a forward: whether its module is in training mode."""
    requires_sync: int = True
    """Of a backward: whether gradients are reduced."""
    max_norm: int = 0
    """`bits_of` that of `clip_grad_norm_`."""
    norm_type: int = 0
    """The same."""

    def __str__(self) -> str:
        return _TEXTS[self.kind]


OUT = Request(Kind.OUT)


@dataclass(kw_only=True, eq=False)
class Negotiation:
    operations: Operations
    exchange: Exchange
    optimizers: JoinedOptimizers
    averages_active: bool
    """Whether gradients are means over the ranks that are not out of batches."""
    notify: Callable[[], Any] = lambda: None
    """Function called before each exchange while this rank is not out; in torch's Join its
    `notify_join_context`."""
    is_enabled: Callable[[], bool] = lambda: True
    """Whether torch's Join around the loop is on."""
    hook: Callable[[], object] = lambda: True
    """Weak reference to what torch's Join holds as long as it lives."""
    participants: frozenset[int] = frozenset()
    """Units whose gradients are means over the ranks that had one."""
    num_active: int = 0
    """Ranks that were not out at the last exchange, of `num_ranks`."""
    num_ranks: int = 0
    is_common: bool = False
    """Whether all ranks had the request that was chosen."""
    is_following: bool = False
    """Whether this rank takes part in what others run."""
    makes_graph: bool = False
    """Whether the open forward has gradients."""
    has_ended: bool = False
    """Whether an error, of which every rank has heard, ends the join."""

    @property
    def is_abandoned(self) -> bool:
        """Whether an error ended torch's Join, which does not report that."""
        return self.hook() is None

    @property
    def is_idle(self) -> bool:
        """Whether calls of this rank are no steps of the join now."""
        return self.is_following or self.is_abandoned or not self.is_enabled()

    @remembers_failure
    def choose(self, request: Request, what: str = "", is_last: bool = False) -> Request | None:
        """Exchange requests. Collective.

        Args:
            what: the call, in messages.
            is_last: whether all ranks are out of batches, and this one was among the last.

        Returns:
            The request that all ranks follow; None: all ranks are out of batches. `is_common` says
            whether all ranks have it.

        Raises:
            RuntimeError: on every rank: ranks came to different calls.
        """
        looks = is_last or (
            self.num_active < self.num_ranks and request.kind in (Kind.BACKWARD, Kind.REDUCE)
        )
        optimizers = self.optimizers
        notified = None if request == OUT else self.notify()
        row = [self.exchange.rank, *map(int, request), int(is_last)]
        rows = self.exchange([*row, *optimizers.gradient_states(looks), *optimizers.options()])
        if notified is not None:
            notified.wait()
        width = 1 + len(request)
        requests = [Request(*row[1:width]) for row in rows]
        running = [each for each in requests if each != OUT]
        self.num_active, self.num_ranks = len(running), len(requests)
        if request == OUT and not is_last:
            self._follow_optimizers([row[width:] for row in rows], requests)
        chosen = min(running, default=None)
        if chosen is not None:
            # What every rank with batches left must do together.
            if chosen.kind >= Kind.FORWARD and any(each != chosen for each in running):
                self._end(what, "ranks of a join came to different calls", request)
            if OUT in requests and chosen.kind == Kind.CALL:
                error = "a call inside a join needs every rank, but some have no batches"
                self._end(what, error, request)
        self.is_common = all(each == chosen for each in requests)
        return chosen

    def compare_lists(self) -> None:
        """Compare the optimizers. Collective.

        Raises:
            ValueError: ranks have different ones.
        """
        own = len(self.optimizers.all), len(self.optimizers.options())
        rows = self.exchange([self.exchange.rank, *own])
        if any(row[1:] != rows[0][1:] for row in rows):
            raise ValueError(
                "join: optimizers differ between ranks; pass the same to each. By rank, with their "
                f"number and that of options in their groups: {rows}"
            )

    def _follow_optimizers(self, rows: Sequence[list[int]], requests: Sequence[Request]) -> None:
        """This rank is out: its options and gradients are as those of ranks that are not.

        Args:
            rows: of every rank: `is_last`, `gradient_states` and `options`.
        """
        others = [row for row, each in zip(rows, requests, strict=True) if each != OUT]
        others = others or [row for row in rows if row[0]]
        if others:
            options = 1 + len(self.optimizers.all)
            self.optimizers.copy_options(others[0][options:])
            self.optimizers.zero_like([row[1:options] for row in others])

    def _end(self, what: str, error: str, request: Request) -> NoReturn:
        """Raise on every rank, with what each one came to."""
        self.has_ended = True
        texts = self.exchange.texts(what if request != OUT else str(OUT))
        found = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        raise RuntimeError(f"{error} ({found})")
