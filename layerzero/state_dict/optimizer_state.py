"""Loads optimizer state by parameter, and predicts the state that a first step creates."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from layerzero.errors import CheckpointError
from layerzero.flat.parameter_info import get_info
from layerzero.notices import some
from layerzero.optim.whole_tensor.inner import options_of
from layerzero.state_dict.names import group_text
from layerzero.state_dict.optimizers import keeps_whole_states, on_device, optimizer_inside


def put_state(
    optimizer: torch.optim.Optimizer,
    options: Sequence[Mapping[str, Any]],
    states: Mapping[nn.Parameter, Mapping[str, Any]],
    *,
    exact: bool = False,
) -> None:
    """Load state through the optimizer's own `load_state_dict`, which handles devices and defaults.

    Args:
        options: for each of its groups, options that replace the group's own.
        states: for each parameter, tensors and plain values; parameters not in it lose their
            state.
        exact: keep the dtypes of the given tensors, where torch would cast floating-point ones to
            that of the parameter.
    """
    numbers: dict[nn.Parameter, int] = {}
    groups = []
    for group, own in zip(optimizer.param_groups, options, strict=True):
        kept = {key: value for key, value in group.items() if key != "params"}
        params = [numbers.setdefault(parameter, len(numbers)) for parameter in group["params"]]
        groups.append({**kept, **own, "params": params})
    by_number = {numbers[parameter]: dict(state) for parameter, state in states.items()}
    state_dict = {"state": by_number, "param_groups": groups}
    if keeps_whole_states(optimizer):
        # Its own entries say which tensors this rank owns.
        state_dict = {**optimizer.state_dict(), **state_dict}
    optimizer.load_state_dict(state_dict)
    for parameter, state in states.items() if exact else ():
        held = optimizer.state[parameter]
        for key, given in state.items():
            if isinstance(given, (dict, list, tuple)):
                held[key] = on_device(parameter.device, given)
            elif isinstance(given, torch.Tensor) and held[key].dtype != given.dtype:
                held[key] = given.to(parameter.device)


def state_template(
    optimizer: torch.optim.Optimizer,
) -> dict[nn.Parameter, dict[str, Any]]:
    """The state that the optimizer would create at its first step, filled with zeros.

    The optimizer does not change: a copy of it steps on parameters of one element each. So no real
    parameter is written, and only the result needs memory.
    """
    groups = [
        {**group, "params": [parameter for parameter in group["params"] if parameter.requires_grad]}
        for group in optimizer.param_groups
    ]
    return {
        parameter: {key: _zeros(value, parameter) for key, value in state.items()}
        for parameter, state in _first_states(optimizer, groups).items()
    }


def refuse_other_class(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[nn.Parameter, Mapping[str, Any]],
    name_of: Callable[[nn.Parameter], str],
) -> None:
    """Refuse the state of another optimizer class, which torch would load and then not use.

    A class may add state later than at its first step, so different keys alone prove nothing.
    Raises if there are both unknown and missing keys, or if the options of the groups differ, too.

    Args:
        groups: options that will replace those of each of its groups.
        states: state of some of its parameters; only the keys are used.
    """
    if len(groups) != len(optimizer.param_groups):
        return  # torch's `load_state_dict` raises.
    inside = optimizer_inside(optimizer)
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        with_options = {**options_of(group), **options_of(options)}
        if "capturable" in with_options:
            with_options["capturable"] = False  # Fails on some devices; the keys are the same.
        has_other_options = _option_names(group) != _option_names(options)
        right: set[object] = set()  # Parameters alike are tried once.
        for parameter in [p for p in group["params"] if states.get(p)]:
            keys, made = set(states[parameter]), set[str]()
            info = get_info(parameter) if keeps_whole_states(optimizer) else None
            shape = parameter.shape if info is None else info.shape
            small = (2,) * len(shape) if len(shape) > 1 else (1,)
            alike = small, frozenset(keys), frozenset(optimizer.state.get(parameter, ()))
            if alike in right:
                continue
            # Some classes choose the keys by the size: the real one counts if a small one misfits.
            for tried in (small, shape):
                alone = {**with_options, "params": [parameter]}
                try:
                    made = set(_first_states(inside, [alone], tried).get(parameter, ()))
                except Exception:
                    break  # The step needs a closure, sparse gradients, ...
                unknown = sorted(keys - made - set(optimizer.state.get(parameter, ())))
                missing = sorted(made - keys)
                if not ((unknown and missing) or (has_other_options and (unknown or missing))):
                    if tried == small:
                        right.add(alike)
                    break
            else:
                raise CheckpointError(
                    f"the optimizer state of {name_of(parameter)} has {some(sorted(keys))}, but "
                    f"{type(inside).__name__} keeps {some(sorted(made))}: it was saved by "
                    "another optimizer class. Use an optimizer of that class, or load the "
                    "weights alone"
                )


def _option_names(group: Mapping[str, Any]) -> set[str]:
    # Without names of parameters and what schedulers add: these do not depend on the class.
    return set(group) - {"params", "param_names", "initial_lr"}


def _first_states(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    shape: Sequence[int] = (1,),
) -> dict[nn.Parameter, dict[str, Any]]:
    """The state that a first step with these groups creates, for stand-ins of this shape."""
    stand_ins = {p: nn.Parameter(p.new_zeros(shape)) for g in groups for p in g["params"]}
    for stand_in in stand_ins.values():
        stand_in.grad = torch.zeros_like(stand_in)
    twin = copy.copy(optimizer)
    twin.state = collections.defaultdict(dict)
    own_groups = [{**g, "params": [stand_ins[p] for p in g["params"]]} for g in groups]
    # A class may count its steps in a tensor of the group.
    twin.param_groups = copy.deepcopy(own_groups, {id(each): each for each in stand_ins.values()})
    twin._optimizer_step_pre_hooks = collections.OrderedDict()
    twin._optimizer_step_post_hooks = collections.OrderedDict()
    # `step` of the class: a scheduler may have put a counting one on the instance.
    type(optimizer).step(twin)
    made: Any = twin.state
    return {p: made[stand_in] for p, stand_in in stand_ins.items() if made.get(stand_in)}


def _zeros(value: Any, parameter: nn.Parameter) -> Any:
    """`value`, of the state of a stand-in of one element, in the shape of a parameter."""
    if not isinstance(value, torch.Tensor):
        return type(value)() if isinstance(value, (int, float)) else value
    shape = parameter.shape if value.shape == (1,) else value.shape
    return torch.zeros(shape, dtype=value.dtype, device=value.device)


def options_of_groups(
    groups: Sequence[Sequence[str]],
    saved: Sequence[tuple[Mapping[str, Any], Sequence[str]]],
    strict: bool,
    where: str,
    optimizer: str = "",
) -> list[Mapping[str, Any]]:
    """The saved options for each of the optimizer's groups; {} for a group of new parameters.

    Args:
        groups: saved names of the parameters of each of the optimizer's groups.
        saved: (options, names) of each saved group, which `where` has.
        strict: raise for parameters that were in no saved group.
    """
    number_of = {name: number for number, (_, names) in enumerate(saved) for name in names}
    result: list[Mapping[str, Any]] = []
    for number, names in enumerate(groups):
        lost = [name for name in names if name not in number_of]
        if lost and strict:
            raise CheckpointError(
                f"{where}: {group_text(optimizer, number)} has parameters that the saved "
                f"optimizer lacked: {some(lost)}. To load what fits, pass strict=False"
            )
        found = sorted({number_of[name] for name in names if name in number_of})
        if not names and len(groups) == len(saved):
            found = [number]  # All its parameters are empty on this rank, and left out.
        options = [saved[each][0] for each in found]
        if any(other != options[0] for other in options):
            raise CheckpointError(
                f"{where}: {group_text(optimizer, number)} mixes parameters of saved groups "
                f"{found}, whose options differ; build the same groups as in the saved run"
            )
        result.append(options[0] if options else {})
    return result
