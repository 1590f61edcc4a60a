"""Checks that a model can be saved, loaded, or returned as a state dict; finds units and roots."""

from __future__ import annotations

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from layerzero.flat.parameter_info import get_info
from layerzero.step.root import RootState, root_of
from layerzero.step.unit import TrainingState, Unit, get_unit

unit_refs = WeakIdKeyDictionary()
"""Weak reference to the unit of each sharded parameter, put there with its hooks."""


def unit_of(sharded_param: nn.Parameter) -> Unit | None:
    """The unit of a sharded parameter; None if it is gone."""
    reference = unit_refs.get(sharded_param)
    unit: Unit | None = None if reference is None else reference()
    return unit


def refuse_other_name(sharded_param: nn.Parameter, key: str) -> None:
    """Refuse a key without the parameter's name for an expert that only some ranks have.

    On other ranks the same key may mean another expert, and files store only keys. This happens
    with an optimizer's own state dict, which numbers parameters.
    """
    unit, info = unit_of(sharded_param), get_info(sharded_param)
    if unit is None or info is None or info.tensor_parallel is not None or info.fqn in key:
        return
    if any(handle.placement.data_parallel is not None for handle in unit.handles):
        raise NotImplementedError(
            f"{key}: on this rank it belongs to {info.fqn}, and on ranks with other experts to "
            "another parameter; use layerzero.checkpoint.get_optimizer_state_dict and "
            "set_optimizer_state_dict, which use global expert numbers, or "
            "layerzero.checkpoint.save and load"
        )


def refuse_experts(state: RootState, what: str) -> None:
    """Refuse operations where one rank has or gets everything: it lacks the experts of others."""
    for unit in state.units:
        experts = [h for h in unit.handles if h.placement.data_parallel is not None]
        if any(split is None for handle in experts for split in handle.splits):
            raise NotImplementedError(
                f"{what}: not supported when ranks have different experts ({unit.label} is on some "
                "ranks only); use the state dicts of all ranks, or layerzero.checkpoint.save and "
                "load"
            )


def roots_inside(model: nn.Module) -> list[RootState]:
    """The roots of a module and of modules inside it, each once. Raises as `root_of`."""
    units = filter(None, map(get_unit, model.modules()))
    return [*dict.fromkeys(map(root_of, units))]


def root_states_of(model: nn.Module, verb: str, is_collective: bool = False) -> list[RootState]:
    """The root states of a model between steps: of all parts that were wrapped separately, that of
    the one with most ranks first. `is_collective`: whether a collective call of all ranks follows.
    """
    states = roots_inside(model)
    if not states:
        raise ValueError(
            f"{verb}: expected a ZeRO3 module, got {type(model).__name__}, which contains none "
            "either; wrap the model first"
        )
    states.sort(key=lambda state: -len(_ranks_of(state)))
    for state in states:
        if not _ranks_of(state) <= _ranks_of(states[0]):
            raise ValueError(
                f"{verb}: {states[0].units[0].label} is on ranks {sorted(_ranks_of(states[0]))}, "
                f"and another wrapped part of the {type(model).__name__} is on ranks "
                f"{sorted(_ranks_of(state))}; one part must be on all of these ranks: pass each "
                "part separately"
            )
        state.backward.clear_abandoned()
        if state.context.in_backward:
            raise RuntimeError(f"{verb}: expected a model between steps, but it is in backward")
        summoned = TrainingState.SUMMON_FULL_PARAMS
        if not any(unit.training_state is summoned for unit in state.units):
            state.structure.check(verb)
    for state in states if is_collective else ():
        state.before_call(verb)
    return states


def _ranks_of(state: RootState) -> set[int]:
    return {rank for p in state.placements for rank in (p.data_parallel or p).members}
