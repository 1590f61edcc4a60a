"""Defines the schemas of the ops; the reference is the kernel of every backend without its own.

The library built from csrc/ adds kernels for CPU and CUDA. If it is loaded, dispatch prefers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from layerzero.ops import checked, reference, step_reference
from layerzero.ops.word_sums import word_sums_

LIBRARY = torch.library.Library("layerzero", "DEF")
"""Registrations live as long as this object."""

LIBRARY.define(
    "pack_(Tensor(a!) out, Tensor[] srcs, Tensor segs, float scale, bool nt=False) -> ()"
)
LIBRARY.define("ordered_sum_(Tensor(a!) out, Tensor[] parts, float scale) -> ()")
LIBRARY.define(
    "ordered_sum_squares_(Tensor(a!) out, Tensor(b!) squares, Tensor[] parts, float scale) -> ()"
)
LIBRARY.define("crc32(Tensor data, int value=0) -> int")
LIBRARY.define("copy_crc32_(Tensor(a!) out, Tensor data) -> int")
LIBRARY.define(
    "flat_step_(int kind, Tensor(a!)[] main, Tensor[] grad, Tensor(b!)[] states, "
    "Tensor(c!)[] scales, Tensor(d!)[] copy, Tensor(e!)[] edges, Tensor[] table, Tensor[] rows, "
    "Tensor factor, float grad_scale, int seed, int phase) -> ()"
)
LIBRARY.define(
    "checked_pack_(Tensor(a!) out, Tensor(b!) sums, Tensor[] srcs, Tensor segs, float scale, "
    "int skip=-1, bool nt=False) -> ()"
)
LIBRARY.define(
    "checked_sum_(Tensor(a!) out, Tensor(b!) sums, Tensor[] parts, float scale, int skip=-1) -> ()"
)
LIBRARY.define("word_sums_(Tensor(a!) out, Tensor[] xs) -> ()")
LIBRARY.define("sum_squares_(Tensor(a!) out, Tensor x) -> ()")
LIBRARY.impl("flat_step_", step_reference.flat_step_, "CompositeExplicitAutograd")
LIBRARY.impl("sum_squares_", step_reference.sum_squares_, "CompositeExplicitAutograd")
LIBRARY.impl(
    "ordered_sum_squares_", step_reference.ordered_sum_squares_, "CompositeExplicitAutograd"
)
LIBRARY.impl("word_sums_", word_sums_, "CompositeExplicitAutograd")
LIBRARY.impl("checked_pack_", checked.checked_pack_, "CompositeExplicitAutograd")
LIBRARY.impl("checked_sum_", checked.checked_sum_, "CompositeExplicitAutograd")
LIBRARY.impl("pack_", reference.pack_, "CompositeExplicitAutograd")
LIBRARY.impl("ordered_sum_", reference.ordered_sum_, "CompositeExplicitAutograd")
LIBRARY.impl("crc32", reference.crc32, "CompositeExplicitAutograd")
LIBRARY.impl("copy_crc32_", reference.copy_crc32_, "CompositeExplicitAutograd")


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


def _fake_ordered_sum_squares(
    out: torch.Tensor, squares: torch.Tensor, parts: Sequence[torch.Tensor], scale: float
) -> None:
    reference.check_ordered_sum(out, parts)


def _fake_flat_step(kind: int, *given: Any) -> None:
    for tensors in step_reference.split_steps(given)[0]:
        step_reference.check_flat_step(kind, tensors)


def _fake_word_sums(out: torch.Tensor, xs: Sequence[torch.Tensor]) -> None:
    return


def _fake_checked_pack(
    out: torch.Tensor,
    sums: torch.Tensor,
    srcs: Sequence[torch.Tensor],
    segs: torch.Tensor,
    scale: float,
    skip: int = -1,
    nt: bool = False,
) -> None:
    reference.check_pack(out, srcs, segs)


def _fake_checked_sum(
    out: torch.Tensor,
    sums: torch.Tensor,
    parts: Sequence[torch.Tensor],
    scale: float,
    skip: int = -1,
) -> None:
    reference.check_ordered_sum(out, parts)


def _fake_sum_squares(out: torch.Tensor, x: torch.Tensor) -> None:
    return


torch.library.register_fake("layerzero::flat_step_", _fake_flat_step, lib=LIBRARY)
torch.library.register_fake("layerzero::sum_squares_", _fake_sum_squares, lib=LIBRARY)
torch.library.register_fake(
    "layerzero::ordered_sum_squares_", _fake_ordered_sum_squares, lib=LIBRARY
)
torch.library.register_fake("layerzero::word_sums_", _fake_word_sums, lib=LIBRARY)
torch.library.register_fake("layerzero::checked_pack_", _fake_checked_pack, lib=LIBRARY)
torch.library.register_fake("layerzero::checked_sum_", _fake_checked_sum, lib=LIBRARY)
torch.library.register_fake("layerzero::pack_", _fake_pack, lib=LIBRARY)
torch.library.register_fake("layerzero::ordered_sum_", _fake_ordered_sum, lib=LIBRARY)
