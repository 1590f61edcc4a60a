"""Names of a model's parameters and buffers, and the extents of sharded parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from layerzero.errors import CheckpointError
from layerzero.experts.names import global_name
from layerzero.flat.names import clean_name
from layerzero.flat.parameter_info import ParameterInfo, get_info
from layerzero.flat.placement import ShardGroup
from layerzero.state_dict.preconditions import roots_inside
from layerzero.state_dict.ranges import Extent
from layerzero.step.handle import FlatParamHandle


class Names:
    """Names of a model's parameters as in `named_parameters`, with global numbers of experts."""

    def __init__(self, model: nn.Module) -> None:
        roots = roots_inside(model)  # Several: parts that were wrapped one after the other.
        units = [unit for root in roots for unit in root.units_inside(model)]
        self.handles = [handle for unit in units for handle in unit.handles]
        groups = (root.tensor_parallel_groups for root in roots)
        self.tensor_parallel_groups: Sequence[ShardGroup] = next(filter(None, groups), ())
        self._sharded_params = {
            id(shown): sharded
            for handle in self.handles
            for shown, sharded in zip(handle.unsharded_params, handle.sharded_params, strict=True)
        }
        names: dict[int, tuple[nn.Parameter, list[str]]] = {}
        for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
            parameter = self._sharded_params.get(id(parameter), parameter)
            names.setdefault(id(parameter), (parameter, []))[1].append(name_among_all(model, name))
        self.parameters = [(each, tuple(dict.fromkeys(found))) for each, found in names.values()]
        """Every parameter, sharded or not, with all its names."""
        self._by_id = {id(parameter): found for parameter, found in self.parameters}
        self._places = {
            id(parameter): (handle, (number, index))
            for number, handle in enumerate(self.handles)
            for index, parameter in enumerate(handle.sharded_params)
        }

    def of(self, parameter: torch.Tensor) -> tuple[str, ...] | None:
        """All names of a parameter of the model; None for any other."""
        return self._by_id.get(id(parameter))

    def first(self, parameter: torch.Tensor) -> str:
        """The first name of a parameter of the model."""
        return self._by_id[id(parameter)][0]

    def place_of(self, tensor: torch.Tensor) -> tuple[FlatParamHandle, tuple[int, int]] | None:
        """The handle of a sharded parameter, and its numbers there; None for any other tensor."""
        return self._places.get(id(tensor))

    def unsharded(self) -> list[tuple[nn.Parameter, tuple[str, ...]]]:
        """Parameters that are not sharded (ignored ones), with all their names."""
        return [(p, found) for p, found in self.parameters if id(p) not in self._places]

    def announces(self, parameter: torch.Tensor) -> bool:
        """Whether this rank reports a parameter to the others.

        The owner of the first element of a sharded parameter does, and every rank of one that is
        not sharded.
        """
        place, info = self.place_of(parameter), get_info(parameter)
        if place is None or info is None:
            return True
        if not math.prod(info.shape):
            return place[0].placement.is_first
        start, stop = info.range
        return start == 0 < stop and not any(extent_of(info).offsets)

    def in_groups(self, optimizer: torch.optim.Optimizer, name: str = "") -> list[list[str]]:
        """The first name of each parameter, by group of the optimizer. `name`: the optimizer's.

        Raises:
            CheckpointError: one does not belong to the model.
        """
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if self.of(parameter) is None:
                    raise CheckpointError(
                        f"{group_text(name, number)} has a parameter of shape "
                        f"{tuple(parameter.shape)} that does not belong to the model: build the "
                        "optimizer from the wrapped model's parameters(), or make the parameter "
                        "part of the model"
                    )
        return [[self.first(each) for each in group["params"]] for group in optimizer.param_groups]


def name_among_all(model: nn.Module, name: str) -> str:
    """A name in the model, with global instead of local numbers of experts."""
    return clean_name(global_name(model, name))


def extent_of(info: ParameterInfo) -> Extent:
    """The original shape of a sharded parameter, and this rank's tensor-parallel block of it."""
    split = info.tensor_parallel
    if split is None:
        return Extent.whole(info.shape)
    return Extent(tuple(info.shape), tuple(split.local_shape), split.offset)


def named_buffers(model: nn.Module) -> list[tuple[torch.Tensor, tuple[str, ...]]]:
    """Persistent buffers with all their names."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                full_name = name_among_all(model, f"{prefix}.{name}" if prefix else name)
                found.setdefault(id(buffer), (buffer, []))[1].append(full_name)
    return [(buffer, tuple(dict.fromkeys(names))) for buffer, names in found.values()]


def group_text(optimizer: str, number: int) -> str:
    """A parameter group, for messages; `optimizer` is "" for one without a name."""
    if optimizer:
        return f"group {number} of the optimizer {optimizer!r}"
    return f"the optimizer's group {number}"
