"""ParameterInfo, the mark on a sharded parameter (`parameter.layerzero`): FQN, shape and range."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from layerzero.flat.tensor_parallel import TensorParallelSplit

_ATTRIBUTE = "layerzero"
_SHARDED_PARAM = "_layerzero_sharded_param"


@dataclass(frozen=True)
class ParameterInfo:
    """Describes the original parameter of a sharded parameter, and this rank's part of it."""

    fqn: str
    """Original dotted name in the outermost wrapped module."""
    shape: torch.Size
    """Original shape; of a DTensor, that of the whole parameter, as `DTensor.shape`."""
    range: tuple[int, int]
    """(start, stop) of this rank's part in the flattened original; with `tensor_parallel`, in the
    flattened local tensor. Equal numbers if the rank owns nothing of it."""
    tensor_parallel: TensorParallelSplit | None = None
    """How a DTensor is split over tensor-parallel ranks; None for an ordinary parameter."""

    @property
    def ndim(self) -> int:
        """Number of dimensions of the original parameter."""
        return len(self.shape)


def get_info(parameter: torch.Tensor) -> ParameterInfo | None:
    """The mark of a sharded parameter; None for any other."""
    return getattr(parameter, _ATTRIBUTE, None)


def set_info(parameter: nn.Parameter, info: ParameterInfo) -> None:
    setattr(parameter, _ATTRIBUTE, info)


def rename(parameter: nn.Parameter, fqn: str) -> None:
    """Set the FQN of a sharded parameter, because its model became part of another."""
    info = get_info(parameter)
    assert info is not None
    set_info(parameter, replace(info, fqn=fqn))


_num_marked = 0


def set_sharded_param(parameter: nn.Parameter, sharded_param: nn.Parameter) -> None:
    """Record which sharded parameter stands for a full one: the original, or a gathered copy.

    An optimizer that holds the full one is given the sharded one instead (optim/attach.py), and
    `rewrap` uses the sharded one again.
    """
    global _num_marked
    _num_marked += 1
    setattr(parameter, _SHARDED_PARAM, sharded_param)


def sharded_param_of(parameter: torch.Tensor) -> nn.Parameter | None:
    """The parameter that `set_sharded_param` recorded; None if there is none."""
    return getattr(parameter, _SHARDED_PARAM, None)


def num_marked() -> int:
    """Number of calls of `set_sharded_param` so far; callers search again once it grows."""
    return _num_marked


def copy_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the attributes that a framework set (`tensor_model_parallel`, `shared`, ...).

    Copies the class as well, if that is derived from `nn.Parameter`.
    """
    attributes = dict(source.__dict__)
    attributes.pop(_ATTRIBUTE, None)
    attributes.pop(_SHARDED_PARAM, None)
    attributes.pop("_is_param", None)  # torch's mark on parameters that are tensor subclasses.
    target.__dict__.update(attributes)
    if nn.Parameter in type(source).__mro__ and type(target) is nn.Parameter:
        target.__class__ = type(source)  # type: ignore[assignment]


def foreign_class(parameter: nn.Parameter) -> type | None:
    """The class of a parameter that cannot be flattened, because it is more than its elements.

    None for an ordinary parameter, a DTensor, and a class derived from `nn.Parameter` that does not
    change torch's operations.
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
