"""Lists the tensors of a model's checkpoint, and this rank's shard of each. No collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layerzero.checkpoint.format.manifest import OF_OPTIMIZER
from layerzero.errors import CheckpointError
from layerzero.flat.parameter_info import ParameterInfo, get_info
from layerzero.optim.decay import original_ndim
from layerzero.optim.whole_tensor.inner import options_of
from layerzero.state_dict.json_codec import encode
from layerzero.state_dict.names import Names, extent_of, group_text, name_among_all, named_buffers
from layerzero.state_dict.optimizers import (
    Optimizers,
    keeps_whole_states,
    parameters_with_state,
    refuse_shared,
    take_tensors,
)
from layerzero.state_dict.ranges import Extent, Run, runs
from layerzero.step.handle import FlatParamHandle
from layerzero.step.unit import get_unit

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


def entry_of(
    names: Names,
    kind: str,
    found: tuple[str, ...],
    parameter: torch.Tensor,
    tensor: torch.Tensor,
    index: int,
    has_owner: bool = False,
) -> Entry:
    """The entry of `tensor`, which is `parameter`, or state of it.

    A tensor shaped like a sharded parameter is a shard; any other is whole on every rank, or, with
    `has_owner`, on this rank alone.

    Args:
        found: its names.
        index: sorts it among those that are of no sharded parameter.
    """
    place, info = names.place_of(parameter), get_info(parameter)
    extent, start, stop, replica = Extent.whole(tensor.shape), 0, tensor.numel(), 0
    is_shard = place is not None and not has_owner and tensor.shape == parameter.shape
    if is_shard and place is not None and info is not None:
        extent, (start, stop) = extent_of(info), info.range
        replica = replica_of(place[0], info, names)
    return Entry(
        *(kind, found[0], found[1:], extent, start, stop),
        tensor=tensor.detach().reshape(-1),
        order=(len(names.handles), index) if place is None else place[1],
        is_whole=not is_shard,
        announces=has_owner or names.announces(parameter),
        replica=replica,
    )


def model_entries(model: nn.Module, names: Names) -> list[Entry]:
    """Entries of the parameters, and of the buffers that are part of the state dict."""
    entries = [
        entry_of(names, MODEL, found, parameter, parameter, index)
        for index, (parameter, found) in enumerate(names.parameters)
    ]
    for buffer, found in named_buffers(model):
        entries.append(entry_of(names, MODEL, found, buffer, buffer, len(entries)))
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


def optimizer_groups(optimizers: Optimizers, names: Names) -> list[dict[str, Any]]:
    """The optimizers' parameter groups, encoded, with parameters by name.

    Raises:
        CheckpointError: as `refuse_shared`, or an option cannot be encoded.
    """
    refuse_shared(optimizers, names)
    groups = []
    for name, optimizer in optimizers.items():
        of_whom = {OF_OPTIMIZER: name} if name else {}
        members = names.in_groups(optimizer, name)
        for number, group in enumerate(optimizer.param_groups):
            options = {
                key: encode(value, f"option {key!r} of {group_text(name, number)}")
                for key, value in options_of(group).items()
            }
            groups.append({"options": options, "params": members[number], **of_whom})
    return groups


def scalar_key(optimizer: str, key: str) -> str:
    """A key of state as the manifest lists it; `optimizer` is "" for one without a name."""
    return f"{optimizer}{_STATE_SEPARATOR}{key}" if optimizer else key


def optimizer_parts(
    optimizers: Optimizers, names: Names
) -> tuple[list[Entry], list[str], dict[str, dict[str, Any]]]:
    """List the state of optimizers: the entries of its tensors; keys whose tensors are scalars and
    not shaped like the parameter, as `scalar_key` writes them; and other values, encoded, by
    parameter and key.

    Raises:
        CheckpointError: a tensor is neither shaped like its shard nor a scalar, or another value
            cannot be encoded.
    """
    entries, scalar_keys, values = list[Entry](), list[str](), dict[str, dict[str, Any]]()
    for optimizer_name, optimizer in optimizers.items():
        is_whole = keeps_whole_states(optimizer)
        states: Any = optimizer.state
        for index, parameter in enumerate(parameters_with_state(optimizer)):
            owner = names.first(parameter)
            for key, value in states.get(parameter, {}).items():
                where = f"optimizer state {key!r} of {owner}"
                is_tensor = isinstance(value, torch.Tensor)
                _check_key(key, where)
                rest, tensors = take_tensors(value, key)
                if not is_whole:
                    for tensor in tensors.values():
                        _check_shape(tensor, parameter, where, is_tensor)
                    rest, tensors = value, tensors if is_tensor else {}
                if not is_tensor:
                    values.setdefault(owner, {})[key] = encode(rest, where)
                for own_key, tensor in tensors.items():
                    name = (f"{owner}{_STATE_SEPARATOR}{own_key}",)
                    _check_key(own_key, where)
                    entries.append(
                        entry_of(names, OPTIMIZER, name, parameter, tensor, index, is_whole)
                    )
                    listed = scalar_key(optimizer_name, own_key)
                    # Of a scalar parameter, only the usual name tells a number.
                    is_number = own_key == "step" or original_ndim(parameter) > 0
                    if not tensor.ndim and is_number and listed not in scalar_keys:
                        scalar_keys.append(listed)
    return entries, scalar_keys, values


def _check_key(key: Any, where: str) -> None:
    if not isinstance(key, str) or _STATE_SEPARATOR in key:
        raise CheckpointError(f"{where}: expected a name without {_STATE_SEPARATOR!r}, got {key!r}")


def _check_shape(tensor: torch.Tensor, parameter: nn.Parameter, where: str, alone: bool) -> None:
    if tensor.ndim and not (alone and tensor.shape == parameter.shape):
        raise CheckpointError(
            f"{where}: shape {tuple(tensor.shape)}{'' if alone else ' in a container'} for a shard "
            f"of shape {tuple(parameter.shape)}; expected a scalar or the shape of the shard, as "
            "element-wise optimizers keep. layerzero.optim.WholeTensorOptimizer keeps any shape"
        )


def split_state_name(name: str) -> tuple[str, str]:
    """(parameter, state key) of an optimizer entry's name."""
    parameter, _, key = name.rpartition(_STATE_SEPARATOR)
    return parameter, key
