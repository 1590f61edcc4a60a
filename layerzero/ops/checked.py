"""checked_sum_: what `ordered_sum_` does, with checksums of the parts, which it touches anyway.

The reference here runs where the library built from csrc/ has no kernel (schema.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerzero.ops.word_sums import word_sums_


def checked_sum_(
    out: torch.Tensor,
    sums: torch.Tensor,
    parts: Sequence[torch.Tensor],
    scale: float,
    skip: int = -1,
) -> None:
    """`ordered_sum_`; and the checksum of each part, as it was before.

    Args:
        skip: the part that needs no checksum: 0 is written.

    Raises:
        ValueError: as `ordered_sum_`; or `sums` has another size than the list.
    """
    if len(parts) != sums.numel():
        raise ValueError(f"checked_sum_: {len(parts)} parts, but room for {sums.numel()} checksums")
    contiguous = [each.detach().contiguous() for each in parts]
    if 0 <= skip < len(contiguous):
        contiguous[skip] = contiguous[skip].new_empty(0)
    # Before the sum, which may overwrite a part.
    word_sums_(sums, contiguous)
    torch.ops.layerzero.ordered_sum_.default(out, list(parts), scale)
