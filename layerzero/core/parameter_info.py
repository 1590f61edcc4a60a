"""The mark on a sharded parameter: `parameter.layerzero` tells what it is a piece of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from layerzero.core.tensor_parallel import TensorParallelSplit

_ATTRIBUTE = "layerzero"


@dataclass(frozen=True)
class ParameterInfo:
    """What a sharded parameter is a piece of."""

    fqn: str
    """Original dotted name in the outermost wrapped module."""
    shape: torch.Size
    """Original shape."""
    range: tuple[int, int]
    """(start, stop) of this rank's piece in the flattened original, or where `tensor_parallel` is
    not None in the flattened local tensor; equal when it has none."""
    tensor_parallel: TensorParallelSplit | None = None
    """Of a DTensor how it is split over tensor-parallel ranks; None for an ordinary parameter."""


def get_info(parameter: nn.Parameter) -> ParameterInfo | None:
    """The mark of a sharded parameter; None for any other."""
    return getattr(parameter, _ATTRIBUTE, None)


def set_info(parameter: nn.Parameter, info: ParameterInfo) -> None:
    setattr(parameter, _ATTRIBUTE, info)


def rename(parameter: nn.Parameter, fqn: str) -> None:
    """Give a marked parameter the name it has in a module that now contains its own."""
    info = get_info(parameter)
    assert info is not None
    set_info(parameter, replace(info, fqn=fqn))


def copy_attributes(source: nn.Parameter, target: nn.Parameter) -> None:
    """Carry over what a framework put on a parameter (`tensor_model_parallel`, `shared`, ...)."""
    attributes = dict(source.__dict__)
    attributes.pop("_is_param", None)  # How torch marks a parameter that is of a tensor subclass.
    target.__dict__.update(attributes)
