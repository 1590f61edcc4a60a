"""ChunkSquares: sums of squares of gradients, taken in the pass that sums them over ranks.

Only where the engine itself adds, on the CPU (`ordered_sum_`). A sum is valid while its chunk is
the same tensor in the same version: adding to `.grad`, or scaling it, changes the version.
"""

from __future__ import annotations

import torch

from layerzero.ops import ordered_sum_, ordered_sum_squares_


class ChunkSquares:
    """Sums of squares of the chunks of the backward pass that is running."""

    def __init__(self) -> None:
        self._squares: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def add(self, out: torch.Tensor, parts: list[torch.Tensor], scale: float) -> None:
        """`ordered_sum_`. May be called from several threads."""
        if out.device.type != "cpu" or out.dtype.is_complex:
            ordered_sum_(out, parts, scale)
            return
        squares = ordered_sum_squares_(out, parts, scale)
        # The chunk itself, so that its `id` stays its own.
        self._squares[id(out)] = out, out._version, squares

    def of(self, chunk: torch.Tensor) -> torch.Tensor | None:
        """The sum of its squares as it is now, a float64 scalar; None: unknown."""
        found = self._squares.get(id(chunk))
        return None if found is None or found[1] != chunk._version else found[2]

    def clear(self) -> None:
        """Drop all sums: the chunks are delivered, or dropped."""
        self._squares.clear()
