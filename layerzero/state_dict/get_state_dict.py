"""Makes state dicts, sharded or full, in the format of `torch.distributed.checkpoint.state_dict`.

Sharded ones can be passed to `torch.distributed.checkpoint.save` and `load`. Checkpoints written by
a model under `fully_shard` load here, and vice versa.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layerzero.flat.names import clean_name
from layerzero.flat.parameter_info import get_info
from layerzero.state_dict.checkpoint_group import checkpoint_group_of
from layerzero.state_dict.dtype_names import DTYPES, dtype_name
from layerzero.state_dict.json_codec import decode, encode
from layerzero.state_dict.names import Names, name_in_group
from layerzero.state_dict.optimizer_shards import shards_of_state
from layerzero.state_dict.optimizer_state import state_template
from layerzero.state_dict.optimizers import (
    check_optimizers,
    keeps_whole_states,
    on_device,
    refuse_shared,
)
from layerzero.state_dict.preconditions import refuse_experts, root_states_of
from layerzero.state_dict.stream import FlatSource, source_of_weights, stream_sources
from layerzero.state_dict.whole_states import gather_whole_states
from layerzero.step.handle import FlatParamHandle
from layerzero.step.root import RootState

_BUCKET_NBYTES = 1 << 30
StateDict = dict[str, Any]
_States = Mapping[nn.Parameter, Mapping[str, Any]]


@dataclass(frozen=True)
class _Choice:
    full: bool
    cpu_offload: bool
    rank0_only: bool
    ignore_frozen: bool = False

    @classmethod
    def of(cls, options: Any, full: bool, cpu_offload: bool, rank0_only: bool) -> _Choice:
        """From our arguments, or from torch's `StateDictOptions`, with torch's meaning."""
        if options is None:
            if rank0_only and not full:
                raise ValueError("rank0_only needs full=True: shards are on every rank")
            return cls(full, cpu_offload, rank0_only)
        if full or cpu_offload or rank0_only:
            raise ValueError(
                "options: expected either options or full, cpu_offload and rank0_only, got both"
            )
        if options.flatten_optimizer_state_dict:
            raise NotImplementedError("options: flatten_optimizer_state_dict is not supported")
        full, offload = options.full_state_dict, options.cpu_offload
        return cls(full, offload, full and offload, options.ignore_frozen_params)

    def copied(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach().to("cpu" if self.cpu_offload else value.device, copy=True)

    def moved(self, value: Any) -> Any:
        """Nested dicts and lists, with tensors on the CPU if `cpu_offload`."""
        if not self.cpu_offload:
            return value
        if isinstance(value, torch.Tensor):
            return value.cpu()
        if isinstance(value, dict):
            return {key: self.moved(item) for key, item in value.items()}
        return [self.moved(item) for item in value] if isinstance(value, list) else value


def get_model_state_dict(
    model: nn.Module,
    *,
    options: Any = None,
    full: bool = False,
    cpu_offload: bool = False,
    rank0_only: bool = False,
) -> StateDict:
    """The model's state by name: shards, or full tensors.

    Args:
        model: a ZeRO3 module, between steps.
        options: torch's `StateDictOptions`, instead of the other arguments, with torch's meaning:
            `full_state_dict` with `cpu_offload` returns values on the first rank only.
        full: return copies of full tensors, gathered a bucket at a time; collective. Otherwise a
            `ParameterShard` for each parameter, which shares its memory; not collective.
        cpu_offload: return tensors on the CPU.
        rank0_only: with `full`, only the first rank keeps them, and the others return {}.

    Raises:
        RuntimeError: the model is in backward.
        CollectiveError: a rank died, or did not take part within the timeout.
    """
    choice = _Choice.of(options, full, cpu_offload, rank0_only)
    roots = root_states_of(model, "get_model_state_dict", choice.full)
    entries = {clean_name(name): value for name, value in model.state_dict().items()}
    names = Names(model)
    names_of = names.in_state_dict(model)
    if choice.ignore_frozen:
        for parameter, _ in names.parameters:
            if not parameter.requires_grad:
                for name in names_of.get(id(parameter), ()):
                    entries.pop(name, None)
    if not choice.full:
        return choice.moved(entries)
    if choice.rank0_only:
        for root in roots:
            refuse_experts(root, "rank0_only")
    keeps = not choice.rank0_only or checkpoint_group_of(roots[0], None).is_first
    # Copies, because these entries share memory with the model.
    result = {
        name: choice.copied(value) if type(value) is torch.Tensor else value
        for name, value in entries.items()
    }
    sources = [source_of_weights(handle) for handle in names.handles]
    for source, index, value in stream_sources(sources, _BUCKET_NBYTES):
        found = names_of.get(id(source.handle.sharded_params[index]), ())
        wanted = [name for name in found if name in entries]
        if keeps and wanted:
            result.update(dict.fromkeys(wanted, choice.copied(value)))
    return result if keeps else {}


def get_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
    *,
    options: Any = None,
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
        optimizer: an element-wise optimizer; or, with `full`, a WholeTensorOptimizer. Or several
            by name.
        options, full, cpu_offload, rank0_only: as for `get_model_state_dict`.

    Returns:
        {"state": {name: {"exp_avg": ...}}, "param_groups": [{"lr": ..., "params": [name, ...]}]};
        for several optimizers, such a dict by name.

    Raises:
        NotImplementedError: shards of whole states were asked for (`full=False`).
        CheckpointError: a parameter is not the model's, or a state is not element-wise.
        RuntimeError: the model is in backward.
        CollectiveError: a rank died, or did not take part within the timeout.
    """
    choice = _Choice.of(options, full, cpu_offload, rank0_only)
    optimizers = check_optimizers(optimizer, "get_optimizer_state_dict")
    roots = root_states_of(model, "get_optimizer_state_dict", choice.full)
    for each in optimizers.values():
        if keeps_whole_states(each) and not choice.full:
            raise NotImplementedError(
                "get_optimizer_state_dict: whole states have no shards; pass full=True, or use "
                "layerzero.checkpoint.save, which writes them without gathering"
            )
    refuse_shared(optimizers, Names(model))
    found = {name: _state_dict_of(model, roots, each, choice) for name, each in optimizers.items()}
    return found if isinstance(optimizer, Mapping) else found[""]


def _state_dict_of(
    model: nn.Module, roots: Sequence[RootState], optimizer: torch.optim.Optimizer, choice: _Choice
) -> StateDict:
    names = Names(model)
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": [name_in_group(names, parameter, number) for parameter in group["params"]]}
        for number, group in enumerate(optimizer.param_groups)
    ]
    if keeps_whole_states(optimizer):
        if choice.rank0_only:
            for root in roots:
                refuse_experts(root, "rank0_only")
        together = checkpoint_group_of(roots[0], None)
        keeps = not choice.rank0_only or together.is_first
        whole = gather_whole_states(optimizer, names, together, keeps)
        if not choice.cpu_offload:
            whole = on_device(roots[0].device, whole)
        return {"state": whole, "param_groups": groups} if keeps else {}
    held: Any = optimizer.state  # Keyed by parameters; torch's annotation says tensors.
    states: _States = dict(held) or state_template(optimizer)
    if not choice.full:
        by_name = {
            _name(names, parameter): shards_of_state(parameter, own)
            for parameter, own in states.items()
        }
        return choice.moved({"state": by_name, "param_groups": groups})
    if choice.rank0_only:
        for root in roots:
            refuse_experts(root, "rank0_only")
    together = checkpoint_group_of(roots[0], None)
    keeps = not choice.rank0_only or together.is_first
    members = [group["params"] for group in groups]
    messages = together.exchange("optimizer state", lambda: _message(states, names, members))
    everything: StateDict = {}
    own_names = {name for _, found in names.parameters for name in found}
    for each in messages:
        message = json.loads(each)
        for name, own in message["state"].items():
            if name in own_names:  # Otherwise an expert of other ranks.
                everything.setdefault(name, {}).update(own)
        if len(message["groups"]) == len(members):
            # Other ranks may have parameters that are empty here, and so not in the optimizer.
            for group, theirs in zip(members, message["groups"], strict=True):
                group[:] = dict.fromkeys([*group, *(name for name in theirs if name in own_names)])
    by_name = _gather_states(names, states, everything, choice, keeps)
    return {"state": by_name, "param_groups": groups} if keeps else {}


def _name(names: Names, parameter: nn.Parameter) -> str:
    found = names.of(parameter)
    assert found is not None, "name_in_group raised for others"
    return found[0]


def _is_shard(parameter: nn.Parameter, value: Any) -> bool:
    is_sharded = get_info(parameter) is not None
    return is_sharded and isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _message(states: _States, names: Names, members: list[list[str]]) -> bytes:
    """This rank's message: names in each group; for parameters it announces, values, and dtypes of
    tensors to gather."""
    own_states: StateDict = {}
    for parameter, state in states.items():
        name = _name(names, parameter)
        own = own_states.setdefault(name, {})
        for key, value in state.items():
            if not names.announces(parameter):
                continue
            if _is_shard(parameter, value):
                own[key] = ["gathered", dtype_name(value.dtype, f"{name}: {key}")]
            else:
                own[key] = ["value", encode(value, f"optimizer state {key!r} of {name}")]
    return json.dumps({"state": own_states, "groups": members}).encode()


def _gather_states(
    names: Names,
    states: _States,
    everything: StateDict,
    choice: _Choice,
    keeps: bool,
) -> StateDict:
    result: StateDict = {name: dict.fromkeys(own) for name, own in everything.items()}
    keys = sorted({key for own in everything.values() for key in own})
    sources: list[FlatSource] = []
    key_of: dict[int, str] = {}
    for key in keys:
        for handle in names.handles:
            source = _source_of_state(handle, names, states, everything, key)
            if source is not None:
                key_of[id(source)] = key
                sources.append(source)
    for source, index, value in stream_sources(sources, _BUCKET_NBYTES):
        if keeps:
            name = _name(names, source.handle.sharded_params[index])
            result[name][key_of[id(source)]] = choice.copied(value)
    for parameter, state in states.items():
        if get_info(parameter) is None:
            whole = {k: choice.copied(v) for k, v in state.items() if isinstance(v, torch.Tensor)}
            result[_name(names, parameter)] = {**state, **whole}
    for name, own in everything.items():
        for key, (how, value) in own.items():
            if how == "value":
                result[name][key] = decode(value)
    return result


def _source_of_state(
    handle: FlatParamHandle, names: Names, states: _States, everything: StateDict, key: str
) -> FlatSource | None:
    """State `key` of a handle's parameters as a flat tensor; None if no parameter has it."""
    entries = [everything.get(_name(names, p), {}).get(key) for p in handle.sharded_params]
    present = [index for index, how in enumerate(entries) if how and how[0] == "gathered"]
    if not present:
        return None
    dtype = DTYPES[entries[present[0]][1]]

    def shard() -> torch.Tensor:
        flat = torch.zeros_like(handle.main_shard, dtype=dtype)
        ranges = handle.layout.shard_ranges(handle.placement.main_shard_index)
        for index in present:
            owned, state = ranges[index], states.get(handle.sharded_params[index], {})
            if owned.numel and key in state:
                flat[owned.offset : owned.offset + owned.numel] = state[key].reshape(-1)
        return flat

    return FlatSource(handle, f"{key} of {handle.fqns[0]}", dtype, shard, present)
