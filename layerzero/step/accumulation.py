"""Where the gradients of micro-batches add up, and what decides that for `accumulation="auto"`.

Two ways to accumulate the gradients of M micro-batches (docs/reference/layered.md):

    unsharded   every rank keeps all gradients in float32, and runs the first hop once
    sharded     every rank keeps its shard after the first hop, and runs that hop M times

Unsharded costs memory: E more bytes resident. Sharded costs traffic: W more bytes sent, (M - 1)
times what a rank sends in the first hop. Unsharded is chosen if E <= W and E bytes fit. M is
that of the last step that had several. No collective: every rank decides alike.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from layerzero.step.handle import FlatParamHandle

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AccumulationCosts:
    """Costs of the two ways on this rank; equal on all ranks.

    Attributes:
        unsharded_nbytes: bytes of accumulated unsharded gradients, in float32 at least.
        sharded_nbytes: bytes of accumulated gradient shards after the first hop.
        sent_nbytes: bytes a rank sends in the first hop of one micro-batch.
        state_nbytes: bytes a rank keeps anyway: main shard, gradient, two moments of Adam, and the
            compute shard.
    """

    unsharded_nbytes: int
    sharded_nbytes: int
    sent_nbytes: int
    state_nbytes: int

    @classmethod
    def of(cls, handles: Iterable[FlatParamHandle]) -> AccumulationCosts:
        unsharded = sharded = sent = state = 0
        for handle in handles:
            state += handle.main_shard.nbytes
            if handle.has_compute_shard:
                state += handle.compute_shard.nbytes
            gradients = handle.gradients
            if not gradients.layout.trainable or not handle.placement.sums_in_shards:
                continue
            state += 3 * handle.main_shard.nbytes
            size = handle.placement.reduce_groups[0].size
            unsharded += gradients.sum_nbytes
            sharded += gradients.sum_nbytes // size
            sent += gradients.buffer_nbytes * (size - 1) // size
        return cls(unsharded, sharded, sent, state)


class Accumulation:
    """Where one model adds up micro-batches."""

    sums_sharded: bool
    """Whether after the first hop of the reduction instead of before it."""
    may_decide: bool
    """Whether the engine chooses; the user did not."""
    num_micro_batches: int
    """Micro-batches of the last step that had several; 2 before."""

    def __init__(self, policy: str) -> None:
        """`policy`: the argument `accumulation` of `ZeRO3`."""
        self.sums_sharded = policy == "sharded"
        self.may_decide = self._is_auto = policy == "auto"
        self.num_micro_batches = 2
        self._reason = ""

    def decide(self, sharded: bool) -> None:
        """Add up there from now on. Between steps."""
        self.sums_sharded, self._is_auto = sharded, False

    def begin_step(self, handles: Sequence[FlatParamHandle], budget_nbytes: int | None) -> None:
        """The first micro-batch of several begins; later ones must add up in the same place."""
        if not self._is_auto:
            return
        costs = AccumulationCosts.of(handles)
        self.sums_sharded, reason = choose_sharded(costs, self.num_micro_batches, budget_nbytes)
        if reason != self._reason and all(handle.placement.is_first for handle in handles):
            _logger.info("accumulation='auto': %s", reason)
        self._reason = reason

    def end_step(self, num_micro_batches: int) -> None:
        """The sum of several micro-batches is delivered."""
        self.num_micro_batches = num_micro_batches


def choose_sharded(
    costs: AccumulationCosts, num_micro_batches: int, budget_nbytes: int | None
) -> tuple[bool, str]:
    """Decide where to accumulate.

    Args:
        num_micro_batches: M, at least 2.
        budget_nbytes: bytes that `limit_all_gathers` allows; None: `costs.state_nbytes`.

    Returns:
        Whether to accumulate sharded, and the reason in one line.
    """
    extra = costs.unsharded_nbytes - costs.sharded_nbytes
    saved = (num_micro_batches - 1) * costs.sent_nbytes
    room = costs.state_nbytes if budget_nbytes is None else budget_nbytes
    limit = "as shards and optimizer state" if budget_nbytes is None else "limit_all_gathers"
    if extra == 0:
        return False, "unsharded, because the first hop shards nothing"
    facts = (
        f"accumulating {num_micro_batches} micro-batches unsharded takes {_mb(extra)} more memory "
        f"and sends {_mb(saved)} less per step"
    )
    if extra > room:
        return True, f"sharded, because {facts}, but at most {_mb(room)} are allowed ({limit})"
    if saved < extra:
        return True, f"sharded, because {facts}"
    return False, f"unsharded, because {facts}, and up to {_mb(room)} are allowed ({limit})"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB"
