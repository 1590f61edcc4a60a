"""The schemas of the native ops, and the kernel of every backend without its own.

The library built from csrc/ adds kernels for CPU and CUDA. If it is loaded, dispatch prefers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_SCHEMAS = (
    "pack_(Tensor(a!) out, Tensor[] srcs, Tensor segs, float scale, bool nt=False) -> ()",
    "ordered_sum_(Tensor(a!) out, Tensor[] parts, float scale) -> ()",
    "flat_step_(Tensor(a!)[] main, Tensor[] grad, Tensor(b!)[] states, "
    "Tensor(c!)[] scales, Tensor[] table, Tensor[] rows, Tensor factor, float grad_scale, "
    "int seed) -> ()",
    "word_sums_(Tensor(a!) out, Tensor[] xs) -> ()",
    "sum_squares_(Tensor(a!) out, Tensor x) -> ()",
    "crc32(Tensor data, int value=0) -> int",
    "copy_crc32_(Tensor(a!) out, Tensor data) -> int",
    "find_changed_(Tensor(a!) indices, Tensor(b!) values, Tensor main, Tensor(c!) snapshot, "
    "int start, bool update=False, int nan=0) -> (int, int)",
)
_LIBRARY = torch.library.Library("layerzero", "DEF")
"""Registrations live as long as this object."""


def use_everywhere(kernel: Callable[..., Any]) -> None:
    """Let a function in plain torch run the op of its name, where there is no other kernel."""
    _LIBRARY.impl(kernel.__name__, kernel, "CompositeExplicitAutograd")


def _writes(*_: Any) -> None:
    """Stands for a kernel where tensors are fake."""


for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)
    if _schema.endswith("-> ()"):  # What the others return depends on the data.
        _name = _schema.partition("(")[0]
        torch.library.register_fake(f"layerzero::{_name}", _writes, lib=_LIBRARY)
