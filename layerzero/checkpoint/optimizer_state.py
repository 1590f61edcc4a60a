"""An optimizer's state by parameter, in and out; and what it looks like before the first step."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from layerzero.checkpoint.errors import CheckpointError, some


def put_state(
    optimizer: torch.optim.Optimizer,
    options: Sequence[Mapping[str, Any]],
    states: Mapping[nn.Parameter, Mapping[str, Any]],
    keeps_dtype: set[tuple[nn.Parameter, str]] | None = None,
) -> None:
    """Load state through the optimizer's own `load_state_dict`: it knows devices and defaults.

    Args:
        options: for each of its groups, what replaces the group's own.
        states: of each parameter, tensors of the parameter's shape, scalars and plain values; what
            is not named there loses its state.
        keeps_dtype: state that must stay in its dtype, where torch would cast it to that of the
            parameter.
    """
    numbers: dict[nn.Parameter, int] = {}
    groups = []
    for group, own in zip(optimizer.param_groups, options, strict=True):
        kept = {key: value for key, value in group.items() if key != "params"}
        params = [numbers.setdefault(parameter, len(numbers)) for parameter in group["params"]]
        groups.append({**kept, **own, "params": params})
    by_number = {numbers[parameter]: dict(state) for parameter, state in states.items()}
    optimizer.load_state_dict({"state": by_number, "param_groups": groups})
    for parameter, key in keeps_dtype or ():
        given = states[parameter][key]
        if optimizer.state[parameter][key].dtype != given.dtype:
            optimizer.state[parameter][key] = given.to(parameter.device)


def state_template(
    optimizer: torch.optim.Optimizer,
) -> dict[nn.Parameter, dict[str, Any]]:
    """State as the optimizer makes it at its first step, zeros in it; the optimizer is untouched.

    A copy of it steps on stand-ins of one element, so no parameter is at risk and no memory is
    needed but that of the result.
    """
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    groups = []
    for group in optimizer.param_groups:
        own = []
        for parameter in group["params"]:
            if parameter.requires_grad:
                stand_in = nn.Parameter(parameter.new_zeros(1))
                stand_in.grad = torch.zeros_like(stand_in)
                stand_ins[parameter] = stand_in
                own.append(stand_in)
        groups.append({**group, "params": own})
    twin = copy.copy(optimizer)
    twin.state = collections.defaultdict(dict)
    twin.param_groups = groups
    twin._optimizer_step_pre_hooks = collections.OrderedDict()
    twin._optimizer_step_post_hooks = collections.OrderedDict()
    # Of the class: a scheduler may have put a counting `step` on the instance.
    type(optimizer).step(twin)
    template = {}
    for parameter, stand_in in stand_ins.items():
        state = twin.state.get(stand_in)
        if state:
            template[parameter] = {
                key: _zeros(value, stand_in, parameter) for key, value in state.items()
            }
    return template


def _zeros(value: Any, stand_in: nn.Parameter, parameter: nn.Parameter) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value)() if isinstance(value, (int, float)) else value
    if value.shape == stand_in.shape:
        return torch.zeros(parameter.shape, dtype=value.dtype, device=value.device)
    return torch.zeros_like(value)


def options_of_groups(
    groups: Sequence[Sequence[str]],
    saved: Sequence[tuple[Mapping[str, Any], Sequence[str]]],
    strict: bool,
    where: str,
) -> list[Mapping[str, Any]]:
    """The options that each group's parameters had; none for a group that is new.

    Args:
        groups: names of the parameters of each of the optimizer's groups, as they were saved.
        saved: the options and the names of each saved group.
        where: the names come from, for messages.

    Raises:
        CheckpointError: parameters of one group were in groups with different options; or, with
            `strict`, in none.
    """
    number_of = {name: number for number, (_, names) in enumerate(saved) for name in names}
    result: list[Mapping[str, Any]] = []
    for number, names in enumerate(groups):
        lost = [name for name in names if name not in number_of]
        if lost and strict:
            raise CheckpointError(
                f"{where}: the optimizer's group {number} has parameters that the saved one had "
                f"not: {some(lost)}. To load what fits, pass strict=False"
            )
        found = sorted({number_of[name] for name in names if name in number_of})
        options = [saved[each][0] for each in found]
        if any(other != options[0] for other in options):
            raise CheckpointError(
                f"{where}: the optimizer's group {number} mixes parameters of saved groups "
                f"{found}, whose options differ; build the groups as they were"
            )
        result.append(options[0] if options else {})
    return result
