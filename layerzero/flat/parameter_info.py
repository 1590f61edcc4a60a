"""ParameterInfo, the mark on a sharded parameter (`parameter.layerzero`): FQN, shape and range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from layerzero.flat.parameter_hooks import STEPPED_BY_TORCH
from layerzero.flat.tensor_parallel import TensorParallelSplit

_ATTRIBUTE = "layerzero"
_SHARDED_PARAM = "_layerzero_sharded_param"
_BEFORE_USE = "_layerzero_before_use"
_PLACE = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


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
    gather: Callable[[], torch.Tensor] | None = field(default=None, repr=False, compare=False)
    """Implements `full_tensor`; None where the parameter was only read from a file."""

    def full_tensor(self) -> torch.Tensor:
        """The whole parameter in its original shape, new, on every rank; `p.full_tensor()` as well.

        Collective over the ranks that share the model. Differentiable, as that of a DTensor.

        Raises:
            RuntimeError: the parameter was copied or read from a file.
            ValueError: its model was deleted.
            CollectiveError: a rank died, or did not take part within the timeout.
        """
        if self.gather is None:
            raise RuntimeError(
                f"full_tensor: {self.fqn!r} was copied or read from a file, and belongs to no "
                "model; call it on one of model.parameters()"
            )
        return self.gather()

    def __reduce__(self) -> tuple[type[ParameterInfo], tuple[Any, ...]]:
        # Without `gather`, which leads to the parameter itself.
        return ParameterInfo, (self.fqn, self.shape, self.range, self.tensor_parallel)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the original parameter."""
        return len(self.shape)


def get_info(parameter: torch.Tensor) -> ParameterInfo | None:
    """The mark of a sharded parameter; None for any other."""
    return getattr(parameter, _ATTRIBUTE, None)


def info_of(sharded_param: nn.Parameter) -> ParameterInfo:
    info = get_info(sharded_param)
    assert info is not None, "sharded parameters have ParameterInfo"
    return info


def set_info(parameter: nn.Parameter, info: ParameterInfo) -> None:
    parameter.__dict__.update({_ATTRIBUTE: info, "full_tensor": info.full_tensor})


def change_info(parameter: nn.Parameter, **changes: Any) -> None:
    """Change fields of the mark of a sharded parameter."""
    set_info(parameter, replace(info_of(parameter), **changes))


num_marked = 0
"""Number of calls of `set_sharded_param` so far; callers search again once it grows."""


def set_sharded_param(
    parameter: nn.Parameter,
    sharded_param: nn.Parameter,
    before_use: Callable[[], None] | None = None,
) -> None:
    """Record which sharded parameter stands for a full one: the original, or a gathered copy.

    An optimizer that holds the full one is given the sharded one instead (optim/attach.py), and
    `rewrap` uses the sharded one again.

    Args:
        before_use: called each time before the sharded one is handed out.
    """
    global num_marked
    num_marked += 1
    setattr(parameter, _SHARDED_PARAM, sharded_param)
    if before_use is not None:
        setattr(parameter, _BEFORE_USE, before_use)


def sharded_param_of(parameter: torch.Tensor) -> nn.Parameter | None:
    """The parameter that `set_sharded_param` recorded; None if there is none."""
    if before_use := getattr(parameter, _BEFORE_USE, None):
        before_use()
    return getattr(parameter, _SHARDED_PARAM, None)


def copy_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the attributes that a framework set (`tensor_model_parallel`, `shared`, ...).

    Copies the class as well, if that is derived from `nn.Parameter`.
    """
    left_out = {
        *(_ATTRIBUTE, "full_tensor", _SHARDED_PARAM, _BEFORE_USE, STEPPED_BY_TORCH, *_PLACE),
        "_is_param",  # torch's mark on parameters that are tensor subclasses.
    }
    target.__dict__.update({k: v for k, v in source.__dict__.items() if k not in left_out})
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
