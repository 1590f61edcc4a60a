"""NonFinite: finds gradients that are not finite before they are delivered (`on_nonfinite`).

At the end of each backward that reduces, every rank sums the squares of its shard of the gradients,
in one pass over it, and the ranks tell each other in one small all-gather what they found. Then the
backward raises on all of them, or all drop the gradients. What is dropped is None: every optimizer
then leaves out the parameters, with their state.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import partial

import torch

from layerzero.comm.exchanges import gather_bytes
from layerzero.config import OnNonFinite
from layerzero.optim.norm import all_finite
from layerzero.step.extension import Extension
from layerzero.step.operations import remembers_failure
from layerzero.step.reduction import Reduction
from layerzero.step.root import RootState

_logger = logging.getLogger(__name__)


class NonFinite(Extension):
    """Judges the gradients of one model."""

    def __init__(self, root: RootState, action: OnNonFinite) -> None:
        self._root: RootState = weakref.proxy(root)
        self._action = action
        root.extensions.add(self)

    def before_write(self, reductions: Sequence[Reduction]) -> bool:
        """Whether to drop these gradients. Collective over the model; blocks the host.

        Raises:
            FloatingPointError: on every rank: one of them is not finite, and the action is "raise".
        """
        root = self._root
        name = _first_of_all(root, self._first_bad(root, reductions))
        if name is None:
            return False
        text = f"the gradient of {name!r} is not finite: it contains infinity or NaN on some rank"
        if self._action == "raise":
            raise FloatingPointError(
                f"{text}. This backward changed nothing; run it again with a smaller loss or "
                "another batch, or call zero_grad() to go on (on_nonfinite='raise')"
            )
        if root.placements[0].is_first:
            _logger.warning("%s; no optimizer steps this model now (on_nonfinite='skip')", text)
        return True

    @staticmethod
    def _first_bad(root: RootState, reductions: Sequence[Reduction]) -> str | None:
        """The first parameter of the model whose gradient is not finite on this rank."""
        values = []
        for reduction in reductions:
            root.streams.wait_on_host(reduction.landed)
            chunk, dtype = reduction.chunk, reduction.handle.main_shard.dtype
            # Rounded to the dtype of `.grad`, where that may overflow.
            values.append(chunk.to(dtype) if chunk.itemsize > dtype.itemsize else chunk)
        if all_finite(values, root.device):
            return None
        bad = {
            reduction.handle.fqns[index]
            for reduction, value in zip(reductions, values, strict=True)
            for index, part in reduction.handle.gradients.pieces(value)
            if not bool(torch.isfinite(part).all())
        }
        names = (fqn for unit in root.units for handle in unit.handles for fqn in handle.fqns)
        return next((fqn for fqn in names if fqn in bad), None)


@remembers_failure
def _first_of_all(root: RootState, own: str | None) -> str | None:
    """The name that the first rank with one has. Collective over the model, tensor-parallel ranks
    too; blocks the host."""
    groups = [*root.groups, *root.tensor_parallel_groups]
    name = partial(root.operations.next, "finite gradients", "the model")
    names = gather_bytes((own or "").encode(), groups, name, root.device)
    return next((each.decode() for each in names if each), None)
