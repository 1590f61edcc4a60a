"""Optimizer state of sharded parameters in Megatron's distributed checkpoints.

Writes the format of Megatron's optimizer for float32 parameters, and reads those of its other
optimizers as well, which keep the step and the options of groups in other places.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import nn

from layerzero import ZeRO3
from layerzero.checkpoint import CheckpointError
from layerzero.checkpoint.adapters import Names, keeps_whole_states, put_state, state_template
from layerzero.integrations.engine import some
from layerzero.integrations.megatron.checkpoint import EmptyShard
from layerzero.integrations.megatron.several import AnyOptimizer, parameters_in

StateDict = dict[str, Any]

_STEP = "step"
_COMMON_STEP = "common_step"
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Options by which Megatron distinguishes parameter groups."""


def optimizer_sharded_state_dict(
    engines: Sequence[ZeRO3],
    optimizer: AnyOptimizer | None,
    model_sharded_state_dict: StateDict,
    is_loading: bool = False,
    metadata: StateDict | None = None,
) -> StateDict:
    """State dict of an optimizer for `dist_checkpointing`. Not collective.

    In the format of Megatron's optimizer for float32 parameters: state by parameter under
    `optimizer.state.exp_avg.<name>` and so on, one step for all parameters, options of groups.
    Entries share memory with the state. State that the optimizer has not created yet is zeros.

    Args:
        engines: the model chunks whose parameters `optimizer` has.
        optimizer: None on a rank that trains nothing.
        model_sharded_state_dict: results of `sharded_state_dict` of the chunks, in any nesting.
        is_loading: create the state of an optimizer that has not stepped, to be read into.
        metadata: as for Megatron's optimizers; nothing in it applies here.

    Raises:
        NotImplementedError: several optimizers, or a WholeTensorOptimizer.
        CheckpointError: a parameter does not belong to the model; a state is neither shaped like
            its parameter nor the step; steps differ between parameters; or some layers have no
            state while others that are saved in the same tensor have.
    """
    if optimizer is None:
        return {}
    optimizer = _element_wise(optimizer)
    names = _names(engines, optimizer)
    options = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    places = {
        id(value.data): value
        for value in nested_values(model_sharded_state_dict)
        if isinstance(value, (ShardedTensor, ShardedTensorFactory, EmptyShard))
    }
    made, lacking = _states(optimizer, is_loading)
    entries: dict[Any, Any] = {}
    for number, parameter in enumerate(parameters_in(optimizer.param_groups)):
        name = names.first(parameter)
        state = made.get(parameter, lacking.get(parameter, {}))
        own = {
            key: _state_entry(places, parameter, name, key, value)
            for key, value in state.items()
            if key != _STEP
        }
        if own:
            entries[number] = own
    _check_layers(places, {id(parameter) for parameter in (*made, *lacking)}, names)
    step = _same_step(made or lacking, names)
    if step is not None:
        entries[_COMMON_STEP] = step
    return {"state": entries, "param_groups": options}


def load_optimizer_state_dict(
    engines: Sequence[ZeRO3], optimizer: AnyOptimizer | None, state: Mapping[str, Any]
) -> None:
    """Load what `dist_checkpointing.load` returned for `optimizer_sharded_state_dict`.

    Not collective. Checkpoints of Megatron's own optimizers load as well: for float32 or 16-bit
    models, and the distributed one in its "fully_reshardable" format.

    Each group gets the options of the saved group with the same `wd_mult`, `lr_mult`,
    `is_expert_parallel` and `is_decoupled_lr`; groups with equal or without these are matched in
    order.

    Raises:
        CheckpointError: state of a parameter is missing, or no saved group matches a group.
    """
    if optimizer is None:
        return
    optimizer = _element_wise(optimizer)
    names = _names(engines, optimizer)
    groups, step = _groups_and_step(state)
    made, lacking = _states(optimizer, False)
    states: dict[nn.Parameter, StateDict] = {}
    for number, parameter in enumerate(parameters_in(optimizer.param_groups)):
        expected = made.get(parameter, lacking.get(parameter, {}))
        if not expected:
            continue
        loaded = dict(state.get("state", {}).get(number, {}))
        if _STEP in expected and step is not None:
            loaded[_STEP] = _as_step(expected[_STEP], step)
        missing = sorted(set(expected) - set(loaded))
        if missing:
            raise CheckpointError(
                f"{names.first(parameter)}: optimizer state {missing} was not loaded: "
                "make the state dict to load with is_loading=True"
            )
        states[parameter] = loaded
    put_state(optimizer, _options(optimizer, groups), states)


def _element_wise(optimizer: AnyOptimizer) -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer) or keeps_whole_states(optimizer):
        raise NotImplementedError(
            "Megatron's checkpoints hold the state of one element-wise optimizer, got "
            f"{type(optimizer).__name__}; use layerzero.checkpoint.save and load"
        )
    return optimizer


def _groups_and_step(state: Mapping[str, Any]) -> tuple[Sequence[Mapping[str, Any]], Any]:
    """The saved groups and the step, from the places where Megatron's optimizers keep them."""
    outer = state if "param_groups" in state else state["optimizer"]
    groups = outer["param_groups"]
    step = outer.get("state", {}).get(_COMMON_STEP)
    if step is None:  # Apex, Transformer Engine and the distributed optimizer: in the groups
        step = next((group[_STEP] for group in groups if _STEP in group), None)
    return groups, step


def _names(engines: Sequence[ZeRO3], optimizer: torch.optim.Optimizer) -> Names:
    names = Names(engines[0] if len(engines) == 1 else nn.ModuleList(engines))
    names.in_groups(optimizer)  # Raises for a parameter that is not the model's.
    return names


_States = dict[nn.Parameter, dict[str, Any]]


def _states(optimizer: torch.optim.Optimizer, is_loading: bool) -> tuple[_States, _States]:
    """State that the optimizer has, and zeros for state that its first step will create."""
    parameters = parameters_in(optimizer.param_groups)
    made = {p: dict(optimizer.state[p]) for p in parameters if optimizer.state.get(p)}
    if all(p in made for p in parameters if p.requires_grad):
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
            f"optimizer state {key!r} of {name}: expected element-wise state, of the shard's shape "
            f"{tuple(parameter.shape)}, got {got}"
        )
    place = places.get(id(parameter))
    if place is None:
        raise CheckpointError(
            f"optimizer state {key!r} of {name}: its parameter is not in the model's sharded state "
            "dict; pass the result of sharded_state_dict(engine) from before it was saved"
        )
    if not parameter.numel():
        return LocalNonpersistentObject(value)
    changed: StateDict = {"key": f"optimizer.state.{key}.{place.key}", "data": value}
    if isinstance(place, ShardedTensor):  # The parameter is not sharded.
        changed["dtype"] = value.dtype
    return replace(place, **changed)


def _check_layers(places: Mapping[int, Any], with_state: set[int], names: Names) -> None:
    """Megatron saves a parameter of all layers as one tensor, which must not have holes."""
    keys = {places[number].key for number in with_state if number in places}
    others = [p for p, _ in names.parameters if id(p) in places and id(p) not in with_state]
    frozen = [names.first(each) for each in others if places[id(each)].key in keys]
    if frozen:
        raise CheckpointError(
            f"the optimizer has no state for {some(frozen)}, but has it for the same parameter of "
            "other layers: give each layer its own name, with metadata={'non_homogeneous_layers': "
            "True} or hetereogenous_dist_checkpoint=True in the TransformerConfig"
        )


def _same_step(states: _States, names: Names) -> torch.Tensor | None:
    steps = {names.first(p): float(state[_STEP]) for p, state in states.items() if _STEP in state}
    if not steps:
        return None
    first, value = next(iter(steps.items()))
    for name, other in steps.items():
        if other != value:
            raise CheckpointError(
                f"the optimizer made {value:g} steps on {first} and {other:g} on {name}, of which "
                "Megatron's checkpoints hold one: use layerzero.checkpoint.save"
            )
    return torch.tensor(value, device="cpu")


def _as_step(like: Any, step: Any) -> Any:
    if isinstance(like, torch.Tensor):
        return torch.full_like(like, float(step))
    return type(like)(float(step))


def _options(
    optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    by_key = dict(zip(_group_keys(saved), saved, strict=True))
    options: list[Mapping[str, Any]] = []
    for number, key in enumerate(_group_keys(optimizer.param_groups)):
        if key not in by_key:
            raise CheckpointError(
                f"the optimizer's group {number} is not in the checkpoint; expected "
                f"{_GROUP_KEYS} and the number among equal groups to be one of {list(by_key)}, "
                f"got {key}. Build the same groups as in the saved run"
            )
        found, group = by_key[key], optimizer.param_groups[number]
        options.append({k: found[k] for k in group if k in found and k != "params"})
    return options


def _group_keys(groups: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """For each group, its `_GROUP_KEYS` and the number of equal groups before it."""
    keys: list[tuple[Any, ...]] = []
    for group in groups:
        # NeMo writes these keys with the prefix "pre_".
        own = tuple(group.get(name, group.get(f"pre_{name}")) for name in _GROUP_KEYS)
        keys.append((*own, sum(key[:-1] == own for key in keys)))
    return keys
