"""Sums of squares of gradients, taken in the pass that sums them over ranks.

Only where the engine itself adds, on the CPU (`ordered_sum_`). A sum stays with its chunk, and is
valid while that is in the same version: adding to `.grad`, or scaling it, changes the version.
"""

from __future__ import annotations

import torch

from layerzero.ops import ordered_sum_, ordered_sum_squares_

_MARK = "_layerzero_squares"


def add_with_squares(out: torch.Tensor, parts: list[torch.Tensor], scale: float) -> None:
    """`ordered_sum_`. May be called from several threads."""
    if out.device.type != "cpu" or out.dtype.is_complex:
        ordered_sum_(out, parts, scale)
    else:
        squares = ordered_sum_squares_(out, parts, scale)
        setattr(out, _MARK, (out._version, squares))


def squares_of_chunk(chunk: torch.Tensor) -> torch.Tensor | None:
    """The sum of its squares as it is now, a float64 scalar; None: unknown."""
    version, squares = getattr(chunk, _MARK, (-1, None))
    return squares if version == chunk._version else None
