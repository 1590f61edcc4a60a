"""Marks memory with a bit pattern, so that tensors that were never written can be found.

In floating-point tensors the pattern is a NaN with a payload that arithmetic does not produce; in
other tensors it is an unlikely value.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import nn

from layerzero.flat.tensor_parallel import local_of
from layerzero.ops.reference import bits_of

_PATTERNS = {1: 0xA5, 2: 0x7FE5, 4: 0x7FE5A5A5, 8: 0x7FFA5A5A5A5A5A5A}
"""Bit pattern by the number of bytes of an element."""


class AwaitedBuffer(NamedTuple):
    """A buffer whose value is loaded after construction."""

    fqn: str
    """Name within the module whose wrapping allocated it."""
    module: weakref.ref[nn.Module]
    name: str


def fill(tensor: torch.Tensor) -> None:
    """Write the pattern into all of a tensor; of a DTensor, into the local tensor.

    Does nothing to meta, quantized and non-strided tensors.
    """
    bits = _bits_of(tensor)
    if bits is not None:
        bits.fill_(_PATTERNS[bits.element_size()])


def is_left(tensor: torch.Tensor) -> bool:
    """Whether a tensor still holds the pattern. Blocks the host until the device is done.

    One element is enough if no ordinary value has these bits. Otherwise (such as 8-bit dtypes and
    16-bit integers) all elements must hold it.
    """
    bits = _bits_of(tensor)
    if bits is None or not bits.numel():
        return False
    found = bits == _PATTERNS[bits.element_size()]
    is_rare = bits.element_size() > 2 or (tensor.is_floating_point() and bits.element_size() > 1)
    return bool(found.any() if is_rare else found.all())


def _bits_of(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.is_meta:
        return None
    local = local_of(tensor)
    if local.is_complex():
        local = torch.view_as_real(local)
    if local.is_quantized or local.layout is not torch.strided:
        return None
    return bits_of(local)
