"""Loads state dicts, sharded or full, in the format that get_state_dict.py returns."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from layerzero.comm.exchanges import broadcast, broadcast_from_first
from layerzero.flat.names import clean_name
from layerzero.flat.parameter_info import get_info
from layerzero.optim.whole_tensor.inner import options_of
from layerzero.state_dict.checkpoint_group import checkpoint_group_of
from layerzero.state_dict.dtype_names import DTYPES, dtype_name
from layerzero.state_dict.errors import CheckpointError
from layerzero.state_dict.json_codec import decode, encode
from layerzero.state_dict.module_state import local_part, shard_of
from layerzero.state_dict.names import Names, names_in_groups
from layerzero.state_dict.optimizer_state import (
    options_of_groups,
    put_state,
    refuse_other_class,
)
from layerzero.state_dict.optimizers import (
    check_optimizer,
    copied,
    fill_slots,
    keeps_whole_states,
    map_values,
    parameters_with_state,
    take_tensors,
)
from layerzero.state_dict.parameter_shard import ParameterShard, RankLocal
from layerzero.state_dict.preconditions import refuse_experts, root_state_of
from layerzero.step.root import RootState
from layerzero.step.unit import get_unit

StateDict = dict[str, Any]


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: StateDict,
    *,
    strict: bool = True,
    broadcast_from_rank0: bool = False,
) -> _IncompatibleKeys:
    """Load a state dict from `get_model_state_dict` or from an unwrapped model.

    Args:
        model: a ZeRO3 module, between steps.
        model_state_dict: shards of the same sharding, or full tensors, by name; with
            `broadcast_from_rank0`, only that of the first rank is used.
        strict: raise for missing and unexpected names.
        broadcast_from_rank0: only the first rank has the values, and broadcasts them one full
            tensor at a time. Collective only then.

    Returns:
        `missing_keys` and `unexpected_keys`, as `load_state_dict` does.

    Raises:
        RuntimeError: names or shapes do not fit; the model is in backward.
        CollectiveError: a rank died, or did not take part within the timeout.
    """
    state = root_state_of(model, "set_model_state_dict", broadcast_from_rank0)
    if broadcast_from_rank0:
        names = Names(model)
        sharded_params = {f"[{name}]": p for p, found in names.parameters for name in found}
        model_state_dict = _from_first(state, model_state_dict, sharded_params)
    own_names = {clean_name(name): name for name in model.state_dict(keep_vars=True)}
    renamed = {own_names.get(name, name): value for name, value in model_state_dict.items()}
    unit = get_unit(model)
    # The class may name entries otherwise, here as in `state_dict`: of a wrapper, the class inside.
    module = model if unit is None else unit.module
    found: _IncompatibleKeys = module.load_state_dict(renamed, strict=strict)
    return found


def set_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    optim_state_dict: StateDict,
    *,
    strict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a state dict from `get_optimizer_state_dict`, made here or under `fully_shard`.

    Groups get the options that their parameters had, regardless of the order of groups.

    Args:
        model, optimizer: as for `get_optimizer_state_dict`.
        optim_state_dict: {"state": ..., "param_groups": ...} by name, with tensors of the same
            sharding or full ones; for a WholeTensorOptimizer, full ones; with
            `broadcast_from_rank0`, only that of the first rank is used.
        broadcast_from_rank0: as for `set_model_state_dict`.
        strict: raise for parameters that were in no group.

    Raises:
        CheckpointError: it does not fit; names the parameter and the reason.
        RuntimeError: the model is in backward.
        CollectiveError: a rank died, or did not take part within the timeout.
    """
    check_optimizer(optimizer, "set_optimizer_state_dict: optimizer")
    root = root_state_of(model, "set_optimizer_state_dict", broadcast_from_rank0)
    names = Names(model)
    if broadcast_from_rank0:
        sharded_params = {f"[state][{found[0]}]": p for p, found in names.parameters}
        # Whole states have other shapes than shards are cut from.
        cut = {} if keeps_whole_states(optimizer) else sharded_params
        optim_state_dict = _from_first(root, optim_state_dict, cut)
    saved = [(options_of(group), group["params"]) for group in optim_state_dict["param_groups"]]
    groups, given = names_in_groups(names, optimizer), optim_state_dict["state"]
    options = options_of_groups(groups, saved, strict, "the state dict")
    owned = {parameter: names.first(parameter) for parameter in parameters_with_state(optimizer)}
    states = {parameter: given[name] for parameter, name in owned.items() if name in given}
    if keeps_whole_states(optimizer):
        for parameter, state in states.items():
            for key, value in state.items():
                if isinstance(value, (ParameterShard, RankLocal)):
                    raise CheckpointError(
                        f"optimizer state {key!r} of {owned[parameter]} is a shard, but "
                        f"{type(optimizer).__name__} keeps whole states: pass a state dict that "
                        "was made with full=True"
                    )
        # Copies, because the optimizer will write to them.
        states = {parameter: map_values(state, copied) for parameter, state in states.items()}
        refuse_other_class(optimizer, options, states, names.first)
        put_state(optimizer, options, states, exact=True)
        return
    put_state(optimizer, options, states)
    for parameter in states:  # Copies afterwards: of shards alone, where full tensors were given.
        optimizer.state[parameter] = map_values(optimizer.state[parameter], copied)


def _from_first(
    root: RootState, state_dict: StateDict, sharded_params: dict[str, nn.Parameter]
) -> StateDict:
    """The first rank's state dict on every rank, with shards for its tensors. Collective.

    Args:
        sharded_params: by path, as `take_tensors` writes it; tensors at a path, or one level below
            it, have the original shape of the parameter.
    """
    refuse_experts(root, "broadcast_from_rank0")
    together = checkpoint_group_of(root, None)
    given: dict[str, torch.Tensor] = {}

    def describe() -> list[Any]:
        # Numbers travel as values: optimizers keep them on the CPU.
        rest, found = take_tensors(state_dict, "", lambda tensor: tensor.ndim > 0)
        given.update(found)
        kinds = [[path, dtype_name(t.dtype, path), list(t.shape)] for path, t in found.items()]
        return [encode(rest, "state dict"), kinds]

    rest, kinds = together.from_first("state dict", describe)
    values: dict[str, torch.Tensor] = {}
    for path, dtype, shape in kinds:
        full = torch.empty(shape, dtype=DTYPES[dtype], device=root.device)
        if together.is_first:
            full.copy_(given[path])
        name = partial(root.operations.next, "state dict", path)
        for group in root.tensor_parallel_groups:
            broadcast(full, group, name(group)).wait()
        broadcast_from_first(full, root.groups, name)
        sharded_param = sharded_params.get(path, sharded_params.get(path.rpartition("[")[0]))
        if sharded_param is not None and get_info(sharded_param) is not None:
            values[path] = shard_of(sharded_param, local_part(full, sharded_param).clone())
        else:
            values[path] = full
    result: StateDict = fill_slots(decode(rest), values.__getitem__)
    return result
