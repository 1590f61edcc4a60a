"""Defines the schemas of the ops; the reference is the kernel of every backend without its own.

The library built from csrc/ adds kernels for CPU and CUDA. If it is loaded, dispatch prefers them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerzero.ops import reference

LIBRARY = torch.library.Library("layerzero", "DEF")
"""Registrations live as long as this object."""

LIBRARY.define(
    "pack_(Tensor(a!) out, Tensor[] srcs, Tensor segs, float scale, bool nt=False) -> ()"
)
LIBRARY.define("ordered_sum_(Tensor(a!) out, Tensor[] parts, float scale) -> ()")
LIBRARY.define("crc32(Tensor data, int value=0) -> int")
LIBRARY.impl("pack_", reference.pack_, "CompositeExplicitAutograd")
LIBRARY.impl("ordered_sum_", reference.ordered_sum_, "CompositeExplicitAutograd")
LIBRARY.impl("crc32", reference.crc32, "CompositeExplicitAutograd")


def _fake_pack(
    out: torch.Tensor,
    srcs: Sequence[torch.Tensor],
    segs: torch.Tensor,
    scale: float,
    nt: bool = False,
) -> None:
    reference.check_pack(out, srcs, segs)


def _fake_ordered_sum(out: torch.Tensor, parts: Sequence[torch.Tensor], scale: float) -> None:
    reference.check_ordered_sum(out, parts)


torch.library.register_fake("layerzero::pack_", _fake_pack, lib=LIBRARY)
torch.library.register_fake("layerzero::ordered_sum_", _fake_ordered_sum, lib=LIBRARY)
