"""Parameter groups with and without weight decay, by original shapes instead of sharded ones."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from layerzero.flat.names import clean_name
from layerzero.flat.parameter_info import get_info, sharded_param_of
from layerzero.optim.sharded_params import name_of
from layerzero.step.unit import TrainingState, get_unit

Rule: TypeAlias = str | type[nn.Module]
"""Selects parameters: by name, or by the class of a module around them."""


def decay_groups(
    model: nn.Module,
    weight_decay: float = 0.1,
    *,
    no_decay: Rule | Iterable[Rule] = (),
    parameters: Iterable[nn.Parameter] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: matrices decay, vectors and scalars do not.

    It goes by the original shapes, which a rule by `parameter.ndim` sees only with `layout="rows"`:
    else sharded parameters are 1-D. A module that is not sharded gets the same groups. Not
    collective; groups have the same names on every rank. The groups have the sharded parameters,
    also while the model shows unsharded ones (after `model.unshard()`).

    A rule is a module class, which stands for all parameters inside such modules, or a name: a
    whole one, consecutive parts of one such as "bias", "wpe" or "head.weight", or a shell pattern
    for the whole name such as "layers.*.bias", in which `*` matches dots, too.

    Args:
        model: a ZeRO3 module, a module inside one, or any other module.
        weight_decay: value for the parameters that decay.
        no_decay: rules for further parameters that do not decay.
        parameters: only these of the model's parameters, such as those that no other optimizer has.

    Returns:
        [{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}],
        each in the order of `named_parameters()`, and possibly empty. Frozen parameters are in
        none. A tied parameter occurs once; a rule that matches any of its names counts.

    Raises:
        TypeError: a rule is neither a name nor a module class.
        ValueError: a rule matches nothing in the model; one of `parameters` is not the model's.
        RuntimeError: the model is inside `summon_full_params`, whose parameters are temporary.
    """
    rules = [no_decay] if isinstance(no_decay, (str, type)) else no_decay
    named = _named(model)
    spared = {each for rule in rules for each in _matching(model, named, rule)}
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in _chosen(model, named, parameters):
        if parameter.requires_grad:
            decays = id(parameter) not in spared and original_ndim(parameter) >= 2
            (decayed if decays else others).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def original_ndim(parameter: torch.Tensor) -> int:
    """Dimensions of a parameter; of a sharded one, those of the original parameter."""
    info = get_info(parameter)
    return parameter.ndim if info is None else info.ndim


_Named = list[tuple[str, nn.Parameter]]
"""The parameters of a model, under each of their names."""


def _named(model: nn.Module) -> _Named:
    units = [unit for m in model.modules() if (unit := get_unit(m)) is not None]
    if any(unit.training_state is TrainingState.SUMMON_FULL_PARAMS for unit in units):
        raise RuntimeError("decay_groups inside summon_full_params: call it outside")
    return [
        (clean_name(name), _at_rest(parameter))
        for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False)
    ]


def _matching(model: nn.Module, named: _Named, rule: Rule) -> set[int]:
    if isinstance(rule, type) and issubclass(rule, nn.Module):
        modules = (each for each in model.modules() if isinstance(each, rule))
        found = {id(_at_rest(p)) for module in modules for p in module.parameters()}
    elif isinstance(rule, str):
        found = {id(parameter) for name, parameter in named if _fits(name, rule)}
    else:
        raise TypeError(f"no_decay: expected names and classes of modules, got {rule!r}")
    if not found:
        raise ValueError(
            f"no_decay: {getattr(rule, '__name__', rule)!r} matches no parameter of the model"
        )
    return found


def _chosen(
    model: nn.Module, named: _Named, parameters: Iterable[nn.Parameter] | None
) -> list[nn.Parameter]:
    """Those of the model's parameters that were given, each once, in the model's order."""
    own = {id(parameter): parameter for _, parameter in named}
    wanted = set(own) if parameters is None else set[int]()
    for number, parameter in enumerate(() if parameters is None else parameters):
        if id(_at_rest(parameter)) not in own:
            raise ValueError(
                f"parameters[{number}], {name_of(parameter)}, is none of {type(model).__name__}"
            )
        wanted.add(id(_at_rest(parameter)))
    return [parameter for key, parameter in own.items() if key in wanted]


def _at_rest(parameter: nn.Parameter) -> nn.Parameter:
    """The sharded parameter of an unsharded one; any other is returned as it is."""
    sharded = sharded_param_of(parameter)
    return parameter if sharded is None else sharded


def _fits(name: str, rule: str) -> bool:
    if any(sign in rule for sign in "*?["):
        return fnmatchcase(name, rule)
    return f".{rule}." in f".{name}."
