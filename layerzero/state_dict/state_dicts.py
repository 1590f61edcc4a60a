"""Makes and loads state dicts in the format of `torch.distributed.checkpoint.state_dict`.

They are sharded or full. Sharded ones can be passed to `torch.distributed.checkpoint.save` and
`load`. Checkpoints written by a model under `fully_shard` load here, and vice versa.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from layerzero.comm.exchanges import broadcast, broadcast_from_first
from layerzero.errors import CheckpointError
from layerzero.flat.names import clean_name
from layerzero.flat.parameter_info import get_info
from layerzero.optim.whole_tensor.inner import options_of
from layerzero.state_dict.checkpoint_group import CheckpointGroup, checkpoint_group_of
from layerzero.state_dict.dtype_names import DTYPES, dtype_name
from layerzero.state_dict.full_tensors import gather
from layerzero.state_dict.json_codec import decode, encode
from layerzero.state_dict.module_state import local_part, shard_of
from layerzero.state_dict.names import Names
from layerzero.state_dict.optimizer_shards import shards_of_state
from layerzero.state_dict.optimizer_state import (
    options_of_groups,
    put_state,
    refuse_other_class,
    state_template,
)
from layerzero.state_dict.optimizers import (
    check_optimizer,
    copied,
    fill_slots,
    keeps_whole_states,
    map_values,
    on_device,
    parameters_with_state,
    take_tensors,
)
from layerzero.state_dict.parameter_shard import ParameterShard, RankLocal
from layerzero.state_dict.preconditions import refuse_experts, root_states_of
from layerzero.step.root import RootState
from layerzero.step.unit import get_unit

StateDict = dict[str, Any]
_States = Mapping[nn.Parameter, Mapping[str, Any]]


def _made(
    roots: Sequence[RootState], found: StateDict, full: bool, cpu_offload: bool, rank0_only: bool
) -> StateDict:
    """What was asked for, from a state dict of shards. Collective if `full`."""
    if rank0_only and not full:
        raise ValueError("rank0_only needs full=True: shards are on every rank")
    keepers = [checkpoint_group_of(roots[0], None).ranks[0]] if rank0_only else []
    if full:
        found = gather_shards(found, cpu_offload=cpu_offload, ranks_only=keepers)
    if keepers and dist.get_rank() not in keepers:
        return {}
    if cpu_offload:
        found = map_values(found, lambda v: v.cpu() if isinstance(v, torch.Tensor) else v)
    return found


def get_model_state_dict(
    model: nn.Module,
    *,
    full: bool = False,
    cpu_offload: bool = False,
    rank0_only: bool = False,
) -> StateDict:
    """The model's state by name: shards, or full tensors.

    Args:
        model: a ZeRO3 module, between steps.
        full: return copies of full tensors, gathered a unit at a time; collective. Otherwise a
            `ParameterShard` for each parameter, which shares its memory; not collective.
        cpu_offload: return tensors on the CPU.
        rank0_only: with `full`, only the first rank keeps them, and the others return {}.

    Raises:
        RuntimeError: the model is in backward.
        CollectiveError: a rank died, or did not take part within the timeout.
    """
    roots = root_states_of(model, "get_model_state_dict", full)
    entries = {clean_name(name): value for name, value in model.state_dict().items()}
    if full:
        # Copies, because these entries share memory with the model; a tied weight is gathered once.
        shards: dict[int, ParameterShard] = {}
        entries = {
            name: shards.setdefault(id(value.sharded_param and value.sharded_param()), value)
            if isinstance(value, ParameterShard)
            else copied(value)
            for name, value in entries.items()
        }
    return _made(roots, entries, full, cpu_offload, rank0_only)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    full: bool = False,
    cpu_offload: bool = False,
    rank0_only: bool = False,
) -> StateDict:
    """The optimizer's state, keyed by parameter names.

    Before the optimizer's first step the state has the keys and shapes that this step would create,
    filled with zeros, so that `torch.distributed.checkpoint.load` can read into it. The optimizer
    does not change. That of a WholeTensorOptimizer has no state before its first step.

    Args:
        model: the ZeRO3 module whose parameters the optimizer has, between steps.
        optimizer: an element-wise optimizer; or, with `full`, a WholeTensorOptimizer.
        full, cpu_offload, rank0_only: as for `get_model_state_dict`.

    Returns:
        {"state": {name: {"exp_avg": ...}}, "param_groups": [{"lr": ..., "params": [name, ...]}]}.

    Raises:
        NotImplementedError: shards of whole states were asked for (`full=False`).
        CheckpointError: a parameter is not the model's, or a state is not element-wise.
        RuntimeError: the model is in backward.
        CollectiveError: a rank died, or did not take part within the timeout.
    """
    check_optimizer(optimizer, "get_optimizer_state_dict: optimizer")
    roots = root_states_of(model, "get_optimizer_state_dict", full)
    if keeps_whole_states(optimizer) and not full:
        raise NotImplementedError(
            "get_optimizer_state_dict: whole states have no shards; pass full=True, or use "
            "layerzero.checkpoint.save, which writes them without gathering"
        )
    names = Names(model)
    members = names.in_groups(optimizer)
    groups = [
        {**copy.deepcopy(options_of(group)), "params": params}
        for group, params in zip(optimizer.param_groups, members, strict=True)
    ]
    held: Any = optimizer.state  # Keyed by parameters; torch's annotation says tensors.
    if keeps_whole_states(optimizer):
        if rank0_only:
            for root in roots:
                refuse_experts(root, "rank0_only")
        states: _States = {p: held[p] for p in parameters_with_state(optimizer) if p in held}
        together = checkpoint_group_of(roots[0], None)
        keeps = not rank0_only or together.is_first
        found = _of_all_ranks(names, states, members, together, is_whole=True, keeps=keeps)
        if not cpu_offload:
            found = on_device(roots[0].device, found)
        return {"state": found, "param_groups": groups} if keeps else {}
    states = dict(held) or state_template(optimizer)
    if full:
        together = checkpoint_group_of(roots[0], None)
        found = _of_all_ranks(names, states, members, together, is_whole=False)
    else:
        found = {names.first(p): shards_of_state(p, own) for p, own in states.items()}
    made = {"state": found, "param_groups": groups}
    return _made(roots, made, full, cpu_offload, rank0_only)


def _of_all_ranks(
    names: Names,
    states: _States,
    members: list[list[str]],
    together: CheckpointGroup,
    is_whole: bool,
    keeps: bool = True,
) -> dict[str, StateDict]:
    """The state of this rank's model with the same keys on every rank. Collective over `together`.

    One rank says what there is of a parameter, and sends what is no shard: its owner, or the rank
    with its first element, since one with an empty shard may have no state for it, and may have
    left it out of the optimizer.

    Args:
        members: names in each group; those that other ranks have there are added.
        is_whole: tensors are not shards, but whole and on the owner alone, which broadcasts one
            after the other; those returned are on the CPU.
        keeps: whether this rank wants the result.
    """

    def split(parameter: nn.Parameter) -> tuple[Any, dict[str, torch.Tensor]]:
        def takes(tensor: torch.Tensor) -> bool:
            return is_whole or tensor.shape == parameter.shape

        return take_tensors(dict(states.get(parameter, {})), "", takes)

    def describe() -> StateDict:
        rows = []
        for parameter in states:
            if get_info(parameter) is None or not (is_whole or names.announces(parameter)):
                continue
            name, (rest, tensors) = names.first(parameter), split(parameter)
            where = f"optimizer state of {name}"
            kinds = [[k, dtype_name(t.dtype, where), list(t.shape)] for k, t in tensors.items()]
            rows.append([name, encode(rest, where), kinds])
        return {"state": rows, "groups": members}

    parameters = {found: parameter for parameter, all in names.parameters for found in all}
    result: dict[str, StateDict] = {
        names.first(parameter): map_values(state, copied)
        for parameter, state in states.items()
        if get_info(parameter) is None
    }
    for rank, message in enumerate(together.exchange("optimizer state", describe)):
        if len(message["groups"]) == len(members):
            for group, theirs in zip(members, message["groups"], strict=True):
                group[:] = dict.fromkeys([*group, *(name for name in theirs if name in parameters)])
        for name, rest, kinds in message["state"]:
            parameter = parameters.get(name)  # None: an expert of other ranks.
            held = {} if parameter is None else split(parameter)[1]
            tensors = {}
            for key, dtype, shape in kinds:
                if is_whole:
                    value = torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
                    if rank == together.rank:
                        value.copy_(held[key].detach())
                    tensors[key] = together.broadcast(f"{key} of {name}", value, rank)
                elif parameter is not None:
                    none = torch.zeros_like(parameter, dtype=DTYPES[dtype])
                    tensors[key] = shard_of(parameter, held.get(key, none).detach())
            if parameter is not None and keeps:
                result[name] = fill_slots(decode(rest), tensors.__getitem__)
    return {each[0]: result[each[0]] for _, each in names.parameters if each[0] in result}


def gather_shards(
    state_dict: dict[str, Any], *, cpu_offload: bool = False, ranks_only: Sequence[int] = ()
) -> dict[str, Any]:
    """The same nested dicts and lists, with full tensors in place of shards.

    Collective over the ranks that share the model, if there is any shard.

    Args:
        cpu_offload: move each full tensor to the CPU once it is gathered.
        ranks_only: ranks that get full tensors; the others get None instead. (): all ranks.

    Raises:
        ValueError: a shard was read from a file, or its model is gone.
        CheckpointError: on every rank, if ranks have different shards.
        NotImplementedError: a value is optimizer state of one rank only (`RankLocal`).
        CollectiveError: a rank died, or did not take part within the timeout.
    """
    by_root: dict[RootState, dict[int, tuple[nn.Parameter, torch.Tensor]]] = {}

    def collect(value: Any) -> None:
        if isinstance(value, ParameterShard):
            root, sharded_param = value.owner()
            by_root.setdefault(root, {})[id(value)] = sharded_param, value.local
        elif isinstance(value, RankLocal):
            value.refuse()

    map_values(state_dict, collect)
    keeps = not ranks_only or dist.get_rank() in ranks_only
    full: dict[int, torch.Tensor | None] = {}
    for root, shards in by_root.items():
        if ranks_only:
            refuse_experts(root, "full tensors on some ranks only")
        for key, value in gather(root, shards):
            device = "cpu" if cpu_offload else value.device
            full[key] = value.detach().to(device, copy=True) if keeps else None
            del value

    def replaced(value: Any) -> Any:
        return full[id(value)] if isinstance(value, ParameterShard) else value

    result: dict[str, Any] = map_values(state_dict, replaced)
    return result


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
    state = root_states_of(model, "set_model_state_dict", broadcast_from_rank0)[0]
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
    root = root_states_of(model, "set_optimizer_state_dict", broadcast_from_rank0)[0]
    names = Names(model)
    if broadcast_from_rank0:
        sharded_params = {f"[state][{found[0]}]": p for p, found in names.parameters}
        # Whole states have other shapes than shards are cut from.
        cut = {} if keeps_whole_states(optimizer) else sharded_params
        optim_state_dict = _from_first(root, optim_state_dict, cut)
    saved = [(options_of(group), group["params"]) for group in optim_state_dict["param_groups"]]
    groups, given = names.in_groups(optimizer), optim_state_dict["state"]
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
