"""Defines the schemas of the ops; the reference is the kernel of every backend without its own.

The library built from csrc/ adds kernels for CPU and CUDA. If it is loaded, dispatch prefers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layerzero.ops import reference, step_reference

LIBRARY = torch.library.Library("layerzero", "DEF")
"""Registrations live as long as this object."""


def _writes(*_: Any) -> None:
    """Stands for a kernel where tensors are fake."""


_OPS: dict[str, Callable[..., Any]] = {
    "pack_(Tensor(a!) out, Tensor[] srcs, Tensor segs, float scale, bool nt=False) -> ()": (
        reference.pack_
    ),
    "ordered_sum_(Tensor(a!) out, Tensor[] parts, float scale) -> ()": reference.ordered_sum_,
    "flat_step_(Tensor(a!)[] main, Tensor[] grad, Tensor(b!)[] states, "
    "Tensor(c!)[] scales, Tensor[] table, Tensor[] rows, Tensor factor, float grad_scale, "
    "int seed) -> ()": step_reference.flat_step_,
    "word_sums_(Tensor(a!) out, Tensor[] xs) -> ()": reference.word_sums_,
    "sum_squares_(Tensor(a!) out, Tensor x) -> ()": step_reference.sum_squares_,
    "crc32(Tensor data, int value=0) -> int": reference.crc32,
    "copy_crc32_(Tensor(a!) out, Tensor data) -> int": reference.copy_crc32_,
}
"""The kernel of every backend without its own, by schema."""

for _schema, _kernel in _OPS.items():
    _name = _schema.partition("(")[0]
    LIBRARY.define(_schema)
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    if _schema.endswith("()"):  # What the others return depends on the data.
        torch.library.register_fake(f"layerzero::{_name}", _writes, lib=LIBRARY)
