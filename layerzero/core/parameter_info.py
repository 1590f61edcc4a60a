"""The mark on a sharded parameter: `parameter.layerzero` tells what it is a piece of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from layerzero.core.tensor_parallel import TensorParallelSplit

_ATTRIBUTE = "layerzero"
_PIECE = "_layerzero_piece"


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


def keep_piece(parameter: nn.Parameter, piece: nn.Parameter) -> None:
    """A full parameter that was gathered from `piece`, which may be its piece again."""
    setattr(parameter, _PIECE, piece)


def take_kept_piece(parameter: nn.Parameter) -> nn.Parameter | None:
    """What `keep_piece` noted; the note is gone then."""
    piece: nn.Parameter | None = parameter.__dict__.pop(_PIECE, None)
    return piece


def copy_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Carry over what a framework put on a parameter (`tensor_model_parallel`, `shared`, ...).

    Its class as well, where that is derived from `nn.Parameter`.
    """
    attributes = dict(source.__dict__)
    attributes.pop(_ATTRIBUTE, None)
    attributes.pop("_is_param", None)  # How torch marks a parameter that is of a tensor subclass.
    target.__dict__.update(attributes)
    if nn.Parameter in type(source).__mro__ and type(target) is nn.Parameter:
        target.__class__ = type(source)  # type: ignore[assignment]


def foreign_class(parameter: nn.Parameter) -> type | None:
    """The class of a parameter that is more than its elements, so that flat ones would lose it.

    None for an ordinary parameter, a DTensor, and a class derived from `nn.Parameter` that leaves
    torch's operations alone.
    """
    cls = type(parameter)
    if isinstance(parameter, DTensor) or cls is nn.Parameter:
        return None
    is_plain = (
        nn.Parameter in cls.__mro__
        and cls.__torch_function__ is nn.Parameter.__torch_function__
        and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not hasattr(cls, "__tensor_flatten__")
    )
    return None if is_plain else cls
