"""The gradients of a home's parameters as one buffer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import torch

_base_of: Callable[[Any], Any] = vars(torch._C.TensorBase)["_base"].__get__
_offset_of: Callable[[torch.Tensor], Any] = torch.Tensor.storage_offset


class Gradient(NamedTuple):
    """Gradients of members in one buffer."""

    numbers: list[int] | None
    """Of the members that have one; None: all have."""
    parts: list[torch.Tensor]
    flat: torch.Tensor
    offsets: list[int]
    is_copy: bool

    def is_of(self, numbers: list[int] | None, parts: list[torch.Tensor]) -> bool:
        """Whether it is made of these tensors."""
        return (
            self.numbers == numbers
            and len(self.parts) == len(parts)
            and all(map(is_, self.parts, parts))
        )


def flatten(numbers: list[int] | None, parts: list[torch.Tensor], dtype: torch.dtype) -> Gradient:
    """The buffer that gradients are views of; or, if there is none, a copy of them in one.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    base = next((each._base for each in parts if each.numel()), None)
    if (
        base is not None
        and base.dtype == dtype
        and base.is_contiguous()
        and all(map(is_, map(_base_of, parts), repeat(base)))
        and all(map(torch.Tensor.is_contiguous, parts))
    ):
        start = base.storage_offset()
        offsets = [offset - start for offset in map(_offset_of, parts)]
        return Gradient(numbers, parts, base.detach().view(-1), offsets, is_copy=False)
    if any(each.layout is not torch.strided for each in parts):
        raise RuntimeError("sparse gradients are not supported; use to_dense()")
    end = 0
    offsets = []
    for each in parts:
        offsets.append(end)
        end += each.numel()
    copied = torch.cat([each.detach().reshape(-1).to(dtype) for each in parts])
    return Gradient(numbers, parts, copied, offsets, is_copy=True)
