"""Makes `state_dict()` of an optimizer of sharded parameters return shards, and load accept them.

As for modules, entries with the shape of a parameter become `ParameterShard`s, which carry the
original shape and range. `load_state_dict` accepts shards, full tensors or plain tensors of the
sharded shape; it raises before anything changes if an entry does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from layerzero.errors import CheckpointError
from layerzero.flat.parameter_info import get_info
from layerzero.notices import some
from layerzero.optim import attach
from layerzero.optim.decay import original_ndim
from layerzero.optim.whole_tensor import WholeTensorOptimizer
from layerzero.state_dict.module_state import local_part, shard_of
from layerzero.state_dict.optimizer_state import refuse_other_class
from layerzero.state_dict.optimizers import map_values
from layerzero.state_dict.parameter_shard import ParameterShard, RankLocal, rank_local

StateDict = dict[str, Any]


@attach.on_sharded_params
def install(optimizer: torch.optim.Optimizer) -> None:
    """Put the hooks on an optimizer."""
    if isinstance(optimizer, WholeTensorOptimizer):
        # Each rank has the states of other tensors, which torch's tools would take for all states.
        optimizer.register_state_dict_post_hook(_mark_whole, prepend=True)
        optimizer.register_load_state_dict_pre_hook(_unmark_whole)
        return
    # The first hook after `state_dict` and the last before a load, so that other hooks see the same
    # entries as torch's own tools.
    optimizer.register_state_dict_post_hook(_show_shards, prepend=True)
    optimizer.register_load_state_dict_pre_hook(_take_shards)


def _show_shards(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    states = dict(state_dict["state"])
    for number, parameter in _numbered(optimizer, state_dict).items():
        if number in states and get_info(parameter) is not None:
            states[number] = shards_of_state(parameter, states[number])
    return {**state_dict, "state": states}


def _mark_whole(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    def marked(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return rank_local(value, "the state of a whole tensor") if is_tensor else value

    return {**state_dict, "state": map_values(state_dict["state"], marked)}


def _unmark_whole(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    return {**state_dict, "state": map_values(state_dict["state"], _plain)}


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, RankLocal) else value


def shards_of_state(parameter: nn.Parameter, state: Mapping[str, Any]) -> StateDict:
    """State of a parameter, in which tensors of its sharded shape become shards."""
    info = get_info(parameter)

    def shown(key: str, item: Any) -> Any:
        if info is None or not isinstance(item, torch.Tensor) or not item.ndim:
            return item
        if item.shape == parameter.shape:
            return shard_of(parameter, item.detach())
        return rank_local(item, f"optimizer state {key!r} of {info.fqn}")

    return {key: map_values(value, partial(shown, key)) for key, value in state.items()}


def _numbered(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> dict[Any, nn.Parameter]:
    """The optimizer's parameters by their keys in the state dict; {} if the groups do not match."""
    own = [group["params"] for group in optimizer.param_groups]
    theirs = [group["params"] for group in state_dict["param_groups"]]
    if [len(group) for group in own] != [len(group) for group in theirs]:
        return {}  # torch's `load_state_dict` raises.
    return {
        number: parameter
        for numbers, parameters in zip(theirs, own, strict=True)
        for number, parameter in zip(numbers, parameters, strict=True)
    }


def _take_shards(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    parameters = _numbered(optimizer, state_dict)
    states = dict(state_dict["state"])
    given = {p: states[n] for n, p in parameters.items() if isinstance(states.get(n), dict)}
    refuse_other_class(optimizer, state_dict["param_groups"], given, _name_of)
    misfits: list[str] = []
    # State shaped like a scalar parameter cannot be told from a number by its shape: as in a
    # checkpoint, other parameters' state tells what is a number.
    numbers = {"step"} | {
        key
        for parameter in filter(original_ndim, given)
        for key, value in given[parameter].items()
        if isinstance(value, torch.Tensor) and not value.ndim
    }
    for number, parameter in parameters.items():
        info = get_info(parameter)
        if parameter not in given or info is None:
            continue
        own: StateDict = {}
        for key, value in given[parameter].items():
            try:
                own[key] = _taken(value, parameter, key not in numbers)
            except ValueError as error:
                misfits.append(f"{key!r} of {info.fqn}: {error}")
        states[number] = own
    if misfits:
        raise CheckpointError(f"optimizer state {some(misfits)}")
    return {**state_dict, "state": states}


def _name_of(parameter: nn.Parameter) -> str:
    info = get_info(parameter)
    return f"a parameter of shape {tuple(parameter.shape)}" if info is None else info.fqn


def _taken(value: Any, parameter: nn.Parameter, is_shaped: bool) -> Any:
    def part(item: torch.Tensor) -> torch.Tensor:
        found = local_part(item, parameter)
        # A view would keep the full tensor alive, and the optimizer would write to it.
        return found if found.numel() == item.numel() else found.clone()

    def taken(item: Any) -> Any:
        return part(item) if isinstance(item, ParameterShard) else _plain(item)

    # The intended shape of plain tensors inside a container is unknown.
    is_plain = isinstance(value, torch.Tensor) and not isinstance(
        value, (RankLocal, ParameterShard)
    )
    return part(value) if is_plain and (value.ndim or is_shaped) else map_values(value, taken)
