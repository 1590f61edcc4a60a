"""What flat optimizers refuse: parameters, options of groups, and states that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from layerzero.flat.parameter_info import get_info
from layerzero.optim.claims import name_of
from layerzero.step.root import RootState
from layerzero.step.sharded_params import owner_of_each

_Groups = Sequence[Mapping[str, Any]]


def check_parameters(
    what: str, groups: _Groups, parameters: Iterable[nn.Parameter], has_small_states: bool
) -> None:
    """Check parameters that are given to an optimizer.

    Args:
        what: name of the optimizer's class.
        groups: all groups of the optimizer, those of `parameters` included.

    Raises:
        ValueError: a parameter belongs to no ZeRO3 module or to another one than the others, or is
            complex, or float64 with smaller states.
    """
    known = owner_of_each()
    # Of the first sharded parameter; the one that belongs elsewhere is named by its own.
    members = [each for group in groups for each in group["params"]]
    root = next((known[id(each)].root for each in members if id(each) in known), None)
    for parameter in parameters:
        owner = known.get(id(parameter))
        if owner is None and not (root is not None and _is_ignored(root, parameter)):
            raise ValueError(
                f"{what}: parameter {name_of(parameter)} belongs to no ZeRO3 module"
                f"{' that the other parameters belong to' if root is not None else ''}; wrap "
                "the model first, pass model.parameters() of the wrapper, and give parameters "
                "of other models to torch's optimizer"
            )
        if owner is not None and owner.root is not root:
            raise ValueError(
                f"{what}: parameter {name_of(parameter)} belongs to another ZeRO3 module than "
                f"{name_of(next(m for m in members if id(m) in known))}; build one optimizer "
                "for each model"
            )
        if not parameter.dtype.is_floating_point:
            raise ValueError(f"{what}: parameter {name_of(parameter)} is {parameter.dtype}")
        if parameter.dtype == torch.float64 and has_small_states:
            raise ValueError(
                f"{what}: states in fewer bits are for float32 and smaller parameters, "
                f"{name_of(parameter)} is float64"
            )


def check_options(what: str, groups: _Groups, fixed: Mapping[str, Any]) -> None:
    """
    Args:
        fixed: options that only have this value.

    Raises:
        NotImplementedError: a group has another one.
    """
    for number, group in enumerate(groups):
        for name, value in fixed.items():
            if bool(group.get(name, value)) != value:
                raise NotImplementedError(
                    f"{what}: group {number} has {name}={group[name]}, which is not supported; "
                    f"leave it out, or use torch's optimizer"
                )


def check_loaded(what: str, states: Mapping[Any, Any], keys: Iterable[str]) -> None:
    """Check states that were loaded, as far as torch does not.

    Args:
        states: by parameter.
        keys: names of the states that are as large as their parameter.

    Raises:
        ValueError: a state is not that of this rank's part of its parameter.
    """
    known = owner_of_each()
    for parameter, state in states.items():
        if not (isinstance(parameter, nn.Parameter) and isinstance(state, Mapping)):
            continue
        owner, info = known.get(id(parameter)), get_info(parameter)
        is_part = owner is not None and owner.placement.num_main_shards > 1
        for key in keys:
            given = state.get(key)
            if not isinstance(given, torch.Tensor):
                continue
            is_whole = info is not None and given.dim() > 1 and given.shape == info.shape
            is_whole = is_whole and given.shape != parameter.shape
            if given.numel() != parameter.numel() or (is_part and is_whole):
                raise ValueError(
                    f"{what}.load_state_dict: {key} of {name_of(parameter)} has shape "
                    f"{tuple(given.shape)}, this rank's part has {tuple(parameter.shape)}; load "
                    "states of whole parameters by name, with "
                    "layerzero.checkpoint.set_optimizer_state_dict(model, optimizer, states)"
                )


def _is_ignored(root: RootState, parameter: nn.Parameter) -> bool:
    return any(parameter is each for each in _ignored_parameters(root))


def _ignored_parameters(root: RootState) -> Iterator[nn.Parameter]:
    ignored = root.structure.ignored_now()
    yield from ignored.parameters
    for module in ignored.modules:
        yield from module.parameters()
