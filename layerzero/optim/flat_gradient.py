"""The gradients of a home's parameters as one buffer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

_base_of: Callable[[Any], Any] = attrgetter("_base")
_address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


class Gradient(NamedTuple):
    """Gradients of members in one buffer."""

    numbers: list[int] | None
    """Of the members that have one; None: all have."""
    flat: torch.Tensor
    offsets: list[int]
    is_copy: bool
    """Whether they were copied into `flat`; else it is what they are views of."""


def find_buffer(
    numbers: list[int] | None, parts: list[torch.Tensor], dtype: torch.dtype
) -> Gradient | None:
    """The buffer that gradients are views of, if there is one."""
    # Those without elements are tensors of their own.
    bases = [*compress(map(_base_of, parts), map(torch.Tensor.numel, parts))]
    base = next(iter(bases), None)
    if not (
        base is not None
        and base.dtype == dtype
        and base.is_contiguous()
        and all(map(is_, bases, repeat(base)))
        and all(map(torch.Tensor.is_contiguous, parts))
    ):
        return None
    # By address: a view stays one of its base where somebody has assigned its `.data`.
    start, end, itemsize = base.data_ptr(), base.data_ptr() + base.nbytes, base.itemsize
    addresses = [address or start for address in map(_address_of, parts)]  # Of no elements: 0.
    if min(addresses) < start or max(addresses) > end:
        return None
    offsets = [(address - start) // itemsize for address in addresses]
    return Gradient(numbers, base.detach().view(-1), offsets, False)


def copy_of(numbers: list[int] | None, parts: list[torch.Tensor], dtype: torch.dtype) -> Gradient:
    """Gradients copied into one buffer.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    if any(each.layout is not torch.strided for each in parts):
        raise RuntimeError("AdamW: expected dense gradients, got a sparse one; use to_dense()")
    end = 0
    offsets = []
    for each in parts:
        offsets.append(end)
        end += each.numel()
    copied = torch.cat([each.detach().reshape(-1).to(dtype) for each in parts])
    return Gradient(numbers, copied, offsets, True)
