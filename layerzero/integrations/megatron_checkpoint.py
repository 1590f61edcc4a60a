"""Megatron's distributed checkpoints of a sharded model: each rank writes and reads its own pieces.

Names, global shapes and offsets are those that the unsharded model's `sharded_state_dict` gives, so
`megatron.core.dist_checkpointing` writes one format for both: a checkpoint of Megatron's own
data parallelism loads into a sharded model, the other way round too, and either at other sizes of
data-parallel, shard, tensor-parallel and pipeline groups. megatron_pieces.py says how.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import nn

from layerzero import ZeRO3, units
from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.handle import root_state_of
from layerzero.checkpoint.inventory import Names
from layerzero.checkpoint.optimizer_state import put_state, state_template
from layerzero.integrations.megatron_pieces import entry_of_piece, stand_ins
from layerzero.runtime.states import TrainingState

StateDict = dict[str, Any]


def sharded_state_dict(
    engine: ZeRO3,
    prefix: str = "",
    sharded_offsets: Sequence[tuple[int, int, int]] = (),
    metadata: StateDict | None = None,
) -> StateDict:
    """What `megatron.core.dist_checkpointing` saves and loads of a model chunk. Not collective.

    Entries share memory with the parameters, so `dist_checkpointing.load` writes into them; then
    call `load_model_state_dict`. Parameters are in the dtype of the main shards.

    Args:
        engine: a sharded Megatron module, between steps.
        prefix, sharded_offsets, metadata: as of Megatron's `sharded_state_dict`.

    Raises:
        ValueError: the model is not sharded over Megatron's data-parallel ranks.
        NotImplementedError: a parameter is a DTensor, or a module makes new tensors of parameters
            for its sharded state dict, of which a rank with a piece cannot know its part.
        RuntimeError: the model is in backward, or inside `summon_full_params`.
    """
    root = root_state_of(engine, "sharded_state_dict")
    if any(unit.training_state is TrainingState.SUMMON_FULL_PARAMS for unit in root.units):
        raise RuntimeError(
            "sharded_state_dict: inside summon_full_params the pieces may be older than the full "
            "parameters; leave it first"
        )
    given = {} if metadata is None else metadata
    group = given.get("dp_cp_group")
    if group is None:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    _check_group(engine, group)
    with stand_ins(engine) as pieces:
        module: Any = engine.module
        entries = module.sharded_state_dict(
            prefix=prefix,
            sharded_offsets=tuple(sharded_offsets),
            metadata={**given, "dp_cp_group": group},
        )
        return {name: entry_of_piece(entry, pieces) for name, entry in entries.items()}


def load_model_state_dict(
    engine: ZeRO3, state_dict: Mapping[str, Any], strict: bool = True
) -> None:
    """Load what `dist_checkpointing.load` gave for `sharded_state_dict(engine)`. Not collective.

    Args:
        engine: the model that the sharded state dict was of.
        state_dict: by the module's own names, pieces of this rank; or full tensors of the local
            (tensor-parallel) shapes, as older checkpoints of Megatron have them.
        strict: raise for missing and unexpected names.

    Raises:
        RuntimeError: names or shapes do not fit.
    """
    root_state_of(engine, "load_model_state_dict")
    # The module's own method: one around it (Float16Module) may drop its part of the names.
    engine.module.load_state_dict(dict(state_dict), strict=strict)


def _check_group(engine: ZeRO3, group: dist.ProcessGroup) -> None:
    """Pieces are of all data-parallel ranks together, or the checkpoint would have holes."""
    expected = sorted(dist.get_process_group_ranks(group))
    for unit in units(engine):
        for handle in unit.handles:
            placement = handle.placement.data_parallel or handle.placement
            if sorted(placement.members) != expected:
                raise ValueError(
                    f"sharded_state_dict: {unit.label} (rank {dist.get_rank()}) is sharded over "
                    f"ranks {list(placement.members)}, expected Megatron's data-parallel ranks "
                    f"{expected}: give ZeRO3 the process_group parallel_state."
                    "get_data_parallel_group(with_context_parallel=True)"
                )


# The optimizer -----------------------------------------------------------------------------

_STEP = "step"
_COMMON_STEP = "common_step"
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""By which Megatron tells parameter groups apart."""


def optimizer_sharded_state_dict(
    engines: Sequence[ZeRO3],
    optimizer: torch.optim.Optimizer,
    model_sharded_state_dict: StateDict,
    is_loading: bool = False,
    metadata: StateDict | None = None,
) -> StateDict:
    """What `dist_checkpointing` saves and loads of an element-wise optimizer. Not collective.

    In the format of Megatron's optimizer for float32 parameters: state by parameter under
    `optimizer.state.exp_avg.<name>` and so on, one step for all parameters, options of groups.
    Entries share memory with the state. State that the optimizer has not made yet is zeros.

    Args:
        engines: the model chunks whose parameters `optimizer` has.
        model_sharded_state_dict: from `sharded_state_dict` of each, nested at will.
        is_loading: make the state of an optimizer that has not stepped, to be read into.
        metadata: as of Megatron's optimizers; nothing in it applies.

    Raises:
        CheckpointError: a parameter is none of the model's, or a state is neither shaped like its
            parameter nor the step, or steps differ.
    """
    names = _names(engines)
    places = {
        id(value.data): value
        for value in nested_values(model_sharded_state_dict)
        if isinstance(value, (ShardedTensor, ShardedTensorFactory))
    }
    made, lacking = _states(optimizer, is_loading)
    entries: dict[Any, Any] = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        name = _name_of(names, parameter, number)
        state = made.get(parameter, lacking.get(parameter, {}))
        own = {
            key: _state_entry(places, parameter, name, key, value)
            for key, value in state.items()
            if key != _STEP
        }
        if own:
            entries[number] = own
    step = _same_step(made or lacking, names)
    if step is not None:
        entries[_COMMON_STEP] = step
    options = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {"state": entries, "param_groups": options}


def load_optimizer_state_dict(
    engines: Sequence[ZeRO3], optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load what `dist_checkpointing.load` gave for `optimizer_sharded_state_dict`. Not collective.

    Groups get the options that the saved group of the same `wd_mult`, `lr_mult`,
    `is_expert_parallel` and `is_decoupled_lr` had, in whatever order; groups without these, those
    of the same number.

    Raises:
        CheckpointError: state of a parameter is missing, or a group fits no saved one.
    """
    names = _names(engines)
    groups = (
        state["param_groups"] if "param_groups" in state else state["optimizer"]["param_groups"]
    )
    step = state["state"].get(_COMMON_STEP)
    if step is None:  # Optimizers of apex and Transformer Engine keep it in the group.
        step = next((group[_STEP] for group in groups if _STEP in group), None)
    made, lacking = _states(optimizer, False)
    states: dict[nn.Parameter, StateDict] = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        expected = made.get(parameter, lacking.get(parameter, {}))
        if not expected:
            continue
        loaded = dict(state["state"].get(number, {}))
        if _STEP in expected and step is not None:
            loaded[_STEP] = _as_step(expected[_STEP], step)
        missing = sorted(set(expected) - set(loaded))
        if missing:
            raise CheckpointError(
                f"{_name_of(names, parameter, number)}: optimizer state {missing} is not in what "
                "was loaded: give dist_checkpointing.load what "
                "optimizer_sharded_state_dict(..., is_loading=True) returns"
            )
        states[parameter] = loaded
    put_state(optimizer, _options(optimizer, groups), states)


def _names(engines: Sequence[ZeRO3]) -> dict[int, str]:
    return {
        id(parameter): found[0]
        for engine in engines
        for parameter, found in Names(engine).parameters
    }


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """In the order of their numbers in a state dict."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _name_of(names: Mapping[int, str], parameter: nn.Parameter, number: int) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise CheckpointError(
            f"the optimizer's parameter {number}, of shape {tuple(parameter.shape)}, is none of "
            "the model's: build the optimizer from the sharded model's parameters()"
        )
    return name


_States = dict[nn.Parameter, dict[str, Any]]


def _states(optimizer: torch.optim.Optimizer, is_loading: bool) -> tuple[_States, _States]:
    """State as the optimizer has it, and zeros for what it will make at its first step."""
    made = {p: dict(optimizer.state[p]) for p in _parameters(optimizer) if optimizer.state.get(p)}
    if all(p in made for p in _parameters(optimizer) if p.requires_grad):
        return made, {}
    template = state_template(optimizer)
    lacking = {p: state for p, state in template.items() if p not in made}
    if is_loading:
        for parameter, state in lacking.items():
            optimizer.state[parameter] = state
    return made, lacking


def _state_entry(
    places: Mapping[int, ShardedTensor | ShardedTensorFactory],
    parameter: nn.Parameter,
    name: str,
    key: str,
    value: Any,
) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise CheckpointError(
            f"optimizer state {key!r} of {name}: expected a tensor of the piece's shape "
            f"{tuple(parameter.shape)}, got {got}; Megatron's checkpoints hold element-wise state "
            "and one step"
        )
    if not parameter.numel():
        return LocalNonpersistentObject(value)
    place = places.get(id(parameter))
    if place is None:
        raise CheckpointError(
            f"optimizer state {key!r} of {name}: its parameter is not in the model's sharded state "
            "dict; pass what sharded_state_dict(engine) gave, before it was saved"
        )
    changed: StateDict = {"key": f"optimizer.state.{key}.{place.key}", "data": value}
    if isinstance(place, ShardedTensor):  # of a parameter that is not sharded
        changed["dtype"] = value.dtype
    return replace(place, **changed)


def _same_step(states: _States, names: Mapping[int, str]) -> torch.Tensor | None:
    steps = {names[id(p)]: float(state[_STEP]) for p, state in states.items() if _STEP in state}
    if not steps:
        return None
    first, value = next(iter(steps.items()))
    for name, other in steps.items():
        if other != value:
            raise CheckpointError(
                f"the optimizer made {value:g} steps on {first} and {other:g} on {name}; "
                "Megatron's checkpoints hold one number for all: use layerzero.checkpoint.save"
            )
    return torch.tensor(value)


def _as_step(like: Any, step: Any) -> Any:
    if isinstance(like, torch.Tensor):
        return torch.full_like(like, float(step))
    return type(like)(float(step))


def _options(
    optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """For each of the optimizer's groups the options of the saved one that is the same."""
    by_key = {_group_key(number, group): group for number, group in enumerate(saved)}
    options: list[Mapping[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        found = by_key.get(_group_key(number, group))
        if found is None:
            raise CheckpointError(
                f"the optimizer's group {number}, {_GROUP_KEYS} = {_group_key(number, group)}, is "
                f"none of the checkpoint's {list(by_key)}; build the groups as they were"
            )
        known = [key for key in group if key in found and key != "params"]
        options.append({key: found[key] for key in known})
    return options


def _group_key(number: int, group: Mapping[str, Any]) -> tuple[Any, ...]:
    # Others spell them with a prefix (NeMo).
    key = tuple(group.get(name, group.get(f"pre_{name}")) for name in _GROUP_KEYS)
    return key if any(part is not None for part in key) else (number,)
