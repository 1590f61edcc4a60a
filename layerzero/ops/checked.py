"""checked_pack_, checked_sum_: what `pack_` and `ordered_sum_` do, with checksums of what is sent
or received, which they touch anyway.

The reference here runs where the library built from csrc/ has no kernel (schema.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerzero.ops.word_sums import word_sums_


def checked_pack_(
    out: torch.Tensor,
    sums: torch.Tensor,
    srcs: Sequence[torch.Tensor],
    segs: torch.Tensor,
    scale: float,
    skip: int = -1,
    nt: bool = False,
) -> None:
    """`pack_`; and the checksum of each of the equal chunks of `out`, as many as `sums` has.

    Args:
        skip: the chunk that needs no checksum: 0 is written.

    Raises:
        ValueError: as `pack_`; or `out` has no such chunks.
    """
    if not sums.numel() or out.numel() % sums.numel():
        raise ValueError(
            f"checked_pack_: out has {out.numel()} elements, which are no {sums.numel()} equal "
            "chunks"
        )
    torch.ops.layerzero.pack_.default(out, srcs, segs, scale, nt)
    _sum_all_but(skip, sums, list(out.detach().view(sums.numel(), -1).unbind()))


def checked_sum_(
    out: torch.Tensor,
    sums: torch.Tensor,
    parts: Sequence[torch.Tensor],
    scale: float,
    skip: int = -1,
) -> None:
    """`ordered_sum_`; and the checksum of each part, as it was before. `skip`: as above.

    Raises:
        ValueError: as `ordered_sum_`; or `sums` has another size than the list.
    """
    if len(parts) != sums.numel():
        raise ValueError(f"checked_sum_: {len(parts)} parts, but room for {sums.numel()} checksums")
    # Before the sum, which may overwrite a part.
    _sum_all_but(skip, sums, list(parts))
    torch.ops.layerzero.ordered_sum_.default(out, list(parts), scale)


def _sum_all_but(skip: int, sums: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    contiguous = [each.detach().contiguous() for each in tensors]
    if 0 <= skip < len(contiguous):
        contiguous[skip] = contiguous[skip].new_empty(0)
    word_sums_(sums, contiguous)
