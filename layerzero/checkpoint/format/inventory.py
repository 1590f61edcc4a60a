"""Lists the tensors of a model's checkpoint, and this rank's shard of each. No collectives."""

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
    """A tensor of the checkpoint, and this rank's shard of it."""

    kind: str
    """MODEL or OPTIMIZER: which set of files it is in."""
    name: str
    aliases: tuple[str, ...]
    """Other names of the same tensor (tied weights)."""
    extent: Extent
    start: int
    stop: int
    """The shard is elements [start, stop) of the flattened block `extent`."""
    tensor: torch.Tensor
    """The shard: [stop - start], contiguous, sharing memory with its parameter, buffer or state."""
    order: tuple[int, int]
    """Sort key among the tensors of a file; makes a rank's shards adjacent."""
    is_whole: bool
    """Whether every rank has the whole tensor."""
    announces: bool
    """Whether this rank announces the tensor; the owner of its first element does."""
    replica: int
    """Index of the copy that this shard belongs to; copy 0 is saved."""

    def runs(self) -> Iterator[Run]:
        return runs(self.extent, self.start, self.stop)


def replica_of(handle: FlatParamHandle, info: ParameterInfo, names: Names) -> int:
    """Index of the copy that this rank's shard belongs to.

    Outer ranks may have copies, and tensor-parallel ranks have copies of parameters that are not
    split over them.
    """
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
    """Positions of this rank's shards in the full parameters."""

    def __init__(self, names: Names) -> None:
        self._found: dict[int, _Place] = {}
        for number, handle in enumerate(names.handles):
            for index, parameter in enumerate(handle.sharded_params):
                info = get_info(parameter)
                assert info is not None, "sharded parameters have ParameterInfo"
                start, stop = info.range
                self._found[id(parameter)] = _Place(
                    extent_of(info),
                    start,
                    stop,
                    replica_of(handle, info, names),
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
        """The entry of `tensor`, which is `parameter`, or state of it.

        A tensor shaped like a sharded parameter is a shard; any other is whole on every rank.
        """
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
    """Entries of the parameters, and of the buffers that are part of the state dict."""
    entries = [
        places.entry(MODEL, found, parameter, parameter, index)
        for index, (parameter, found) in enumerate(names.parameters)
    ]
    for buffer, found in named_buffers(model):
        entries.append(places.entry(MODEL, found, buffer, buffer, len(entries)))
    return entries


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with extra state (`get_extra_state`), by name."""
    found = {}
    for name, module in model.named_modules():
        unit = get_unit(module)
        own = module if unit is None else unit.module  # The module inside a ZeRO3 wrapper.
        if type(own).get_extra_state is not nn.Module.get_extra_state:
            found[name_among_all(model, name)] = own
    return found


def optimizer_groups(optimizer: torch.optim.Optimizer, names: Names) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, encoded, with parameters by name.

    Raises:
        CheckpointError: a parameter does not belong to the model, or an option cannot be encoded.
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
    """An optimizer's state: tensors and other values."""

    entries: list[Entry]
    """State tensors."""
    scalar_keys: list[str]
    """Keys whose tensors are scalars and not shaped like the parameter."""
    values: dict[str, dict[str, Any]]
    """Other values, encoded, by parameter and key."""


def optimizer_parts(
    optimizer: torch.optim.Optimizer, names: Names, places: Places
) -> OptimizerParts:
    """List an optimizer's state.

    Raises:
        CheckpointError: a tensor is neither shaped like its shard nor a scalar, or another value
            cannot be encoded.
    """
    parts = OptimizerParts([], [], {})
    for index, (parameter, state) in enumerate(optimizer.state.items()):
        found = names.of(parameter)
        if found is None:
            continue  # `optimizer_groups` raises for it, with the number of its group.
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
                    f"{where}: shape {tuple(value.shape)} for a shard of shape "
                    f"{tuple(parameter.shape)}; expected a scalar or the shape of the shard, as "
                    "element-wise optimizers keep"
                )
    return parts


def split_state_name(name: str) -> tuple[str, str]:
    """(parameter, state key) of an optimizer entry's name."""
    parameter, _, key = name.rpartition(_STATE_SEPARATOR)
    return parameter, key
