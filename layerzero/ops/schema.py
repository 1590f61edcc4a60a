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


def _checks(check: Callable[..., None], *places: int) -> Callable[..., None]:
    """A fake kernel that checks the arguments at these places, and writes nothing."""

    def fake(*given: Any) -> None:
        check(*(given[place] for place in places))

    return fake


def _fake_flat_step(*given: Any) -> None:
    for tensors in step_reference.split_steps(given)[0]:
        step_reference.check_flat_step(tensors)


_OPS: dict[str, tuple[Callable[..., Any], Callable[..., None] | None]] = {
    "pack_(Tensor(a!) out, Tensor[] srcs, Tensor segs, float scale, bool nt=False) -> ()": (
        reference.pack_,
        _checks(reference.check_pack, 0, 1, 2),
    ),
    "ordered_sum_(Tensor(a!) out, Tensor[] parts, float scale) -> ()": (
        reference.ordered_sum_,
        _checks(reference.check_ordered_sum, 0, 1),
    ),
    "flat_step_(Tensor(a!)[] main, Tensor[] grad, Tensor(b!)[] states, "
    "Tensor(c!)[] scales, Tensor[] table, Tensor[] rows, Tensor factor, float grad_scale, "
    "int seed, int phase) -> ()": (step_reference.flat_step_, _fake_flat_step),
    "checked_sum_(Tensor(a!) out, Tensor(b!) sums, Tensor[] parts, float scale, int skip=-1)"
    " -> ()": (reference.checked_sum_, _checks(reference.check_ordered_sum, 0, 2)),
    "word_sums_(Tensor(a!) out, Tensor[] xs) -> ()": (reference.word_sums_, _checks(lambda: None)),
    "sum_squares_(Tensor(a!) out, Tensor x) -> ()": (
        step_reference.sum_squares_,
        _checks(lambda: None),
    ),
    "crc32(Tensor data, int value=0) -> int": (reference.crc32, None),
    "copy_crc32_(Tensor(a!) out, Tensor data) -> int": (reference.copy_crc32_, None),
}
"""The kernel of every backend without its own, and what a fake tensor runs (None: what the op
returns depends on the data), by schema."""

for _schema, (_kernel, _fake) in _OPS.items():
    _name = _schema.partition("(")[0]
    LIBRARY.define(_schema)
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    if _fake is not None:
        torch.library.register_fake(f"layerzero::{_name}", _fake, lib=LIBRARY)
