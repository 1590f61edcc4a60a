"""Cost model that decides where gradients accumulate when `accumulation="auto"`. No collective.

Two ways to accumulate the gradients of M micro-batches (docs/reference/layered.md):

    unsharded   every rank keeps all gradients in float32, and runs the first hop once
    sharded     every rank keeps its shard after the first hop, and runs that hop M times

Unsharded costs memory: E more bytes resident. Sharded costs traffic: W more bytes sent, (M - 1)
times what a rank sends in the first hop. Unsharded is chosen if E <= W and E bytes fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from layerzero.step.handle import FlatParamHandle


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
