"""What a checkpoint of a model consists of, and which part of it this rank has. No collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from layerzero.core.parameter_info import ParameterInfo, get_info
from layerzero.runtime.flat_param_handle import FlatParamHandle
from layerzero.runtime.unit import get_unit
from layerzero.state_dict.errors import CheckpointError
from layerzero.state_dict.json_codec import encode
from layerzero.state_dict.names import (
    Names,
    extent_of,
    name_among_all,
    name_in_group,
    named_buffers,
)
from layerzero.state_dict.ranges import Extent, Run, runs

MODEL, OPTIMIZER = "model", "optimizer"
_STATE_SEPARATOR = "/"


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint, and the piece of it that this rank has."""

    kind: str
    """MODEL or OPTIMIZER: the set of files it is in."""
    name: str
    aliases: tuple[str, ...]
    """Other names of the same tensor (tied weights)."""
    extent: Extent
    start: int
    stop: int
    """The piece is elements [start, stop) of the flattened block `extent`."""
    tensor: torch.Tensor
    """The piece: [stop - start], contiguous, sharing memory with what it is taken of."""
    order: tuple[int, int]
    """Place among the tensors of a file: a rank's pieces then lie side by side."""
    is_whole: bool
    """Whether every rank has all of it."""
    announces: bool
    """Whether this rank tells the others of it: the owner of the first element does."""
    replica: int
    """Which copy of the pieces of all ranks this one belongs to."""

    def runs(self) -> Iterator[Run]:
        return runs(self.extent, self.start, self.stop)


def _replica(handle: FlatParamHandle, info: ParameterInfo, names: Names) -> int:
    """Which copy of the pieces this rank's is of: outer ranks may have copies, and so have
    tensor-parallel ranks of what is not split over them."""
    replica, split = handle.placement.replica, info.tensor_parallel
    for axis, group in enumerate(names.tensor_parallel_groups):
        is_copied = split is None or split.placements[axis].is_replicate()
        replica = replica * group.size + (group.rank if is_copied else 0)
    return replica


class _Place(NamedTuple):
    extent: Extent
    start: int
    stop: int
    replica: int
    order: tuple[int, int]
    is_first: bool


class Places:
    """Where each piece of a model is."""

    def __init__(self, names: Names) -> None:
        self._found: dict[int, _Place] = {}
        for number, handle in enumerate(names.handles):
            for index, parameter in enumerate(handle.sharded_params):
                info = get_info(parameter)
                assert info is not None, "every piece has its mark"
                start, stop = info.range
                self._found[id(parameter)] = _Place(
                    extent_of(info),
                    start,
                    stop,
                    _replica(handle, info, names),
                    (number, index),
                    names.announces(parameter),
                )
        self._num_handles = len(names.handles)

    def entry(
        self,
        kind: str,
        names: tuple[str, ...],
        parameter: torch.Tensor,
        tensor: torch.Tensor,
        index: int,
    ) -> Entry:
        """The entry of `tensor`: `parameter`, or state of it: shaped like it, or one number."""
        found = self._found.get(id(parameter))
        is_whole = found is None or tensor.shape != parameter.shape
        if is_whole:
            order = (self._num_handles, index) if found is None else found.order
            announces = found is None or found.is_first
            place = _Place(Extent.whole(tensor.shape), 0, tensor.numel(), 0, order, announces)
        else:
            assert found is not None
            place = found
        return Entry(
            kind=kind,
            name=names[0],
            aliases=names[1:],
            extent=place.extent,
            start=place.start,
            stop=place.stop,
            tensor=tensor.detach().reshape(-1),
            order=place.order,
            is_whole=is_whole,
            announces=place.is_first,
            replica=place.replica,
        )


def model_entries(model: nn.Module, names: Names, places: Places) -> list[Entry]:
    """Parameters, and buffers that are part of the state dict."""
    entries = [
        places.entry(MODEL, found, parameter, parameter, index)
        for index, (parameter, found) in enumerate(names.parameters)
    ]
    for buffer, found in named_buffers(model):
        entries.append(places.entry(MODEL, found, buffer, buffer, len(entries)))
    return entries


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that keep state of their own making (`get_extra_state`), by name."""
    found = {}
    for name, module in model.named_modules():
        unit = get_unit(module)
        own = module if unit is None else unit.module  # and not the wrapper around it
        if type(own).get_extra_state is not nn.Module.get_extra_state:
            found[name_among_all(model, name)] = own
    return found


def optimizer_groups(optimizer: torch.optim.Optimizer, names: Names) -> list[dict[str, Any]]:
    """The optimizer's parameter groups with names for parameters, encoded.

    Raises:
        CheckpointError: a parameter is not the model's, or an option cannot be saved.
    """
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {
            key: encode(value, f"option {key!r} of the optimizer's group {number}")
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        params = [name_in_group(names, parameter, number) for parameter in group["params"]]
        groups.append({"options": options, "params": params})
    return groups


class OptimizerParts(NamedTuple):
    """An optimizer's state, by what it is."""

    entries: list[Entry]
    """Tensors."""
    scalar_keys: list[str]
    """Keys whose tensors are one number each, and not shaped like the parameter."""
    values: dict[str, dict[str, Any]]
    """By parameter, what is no tensor, encoded."""


def optimizer_parts(
    optimizer: torch.optim.Optimizer, names: Names, places: Places
) -> OptimizerParts:
    """Take stock of an optimizer's state.

    Raises:
        CheckpointError: a state is neither element-wise, nor a scalar, nor plain.
    """
    parts = OptimizerParts([], [], {})
    for index, (parameter, state) in enumerate(optimizer.state.items()):
        found = names.of(parameter)
        if found is None:
            continue  # refused, with the group's number, by `optimizer_groups`
        for key, value in state.items():
            where = f"optimizer state {key!r} of {found[0]}"
            if not isinstance(key, str) or _STATE_SEPARATOR in key:
                raise CheckpointError(f"{where}: expected a name without {_STATE_SEPARATOR!r}")
            name = (f"{found[0]}{_STATE_SEPARATOR}{key}",)
            if not isinstance(value, torch.Tensor):
                parts.values.setdefault(found[0], {})[key] = encode(value, where)
            elif value.shape == parameter.shape:
                parts.entries.append(places.entry(OPTIMIZER, name, parameter, value, index))
            elif value.ndim == 0:
                parts.entries.append(places.entry(OPTIMIZER, name, parameter, value, index))
                if key not in parts.scalar_keys:
                    parts.scalar_keys.append(key)
            else:
                raise CheckpointError(
                    f"{where}: shape {tuple(value.shape)} on a piece of {tuple(parameter.shape)}; "
                    "expected a scalar or the piece's own shape, which is what element-wise "
                    "optimizers keep"
                )
    return parts


def split_state_name(name: str) -> tuple[str, str]:
    """(parameter, state key) of an optimizer entry's name."""
    parameter, _, key = name.rpartition(_STATE_SEPARATOR)
    return parameter, key
