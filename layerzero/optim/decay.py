"""Parameter groups with and without weight decay, by original shapes instead of sharded ones."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from layerzero.flat.names import clean_name
from layerzero.flat.parameter_info import get_info, sharded_param_of
from layerzero.optim.checks import name_of
from layerzero.step.unit import TrainingState, get_unit

Rule: TypeAlias = str | type[nn.Module]
"""Selects parameters: by name, or by the class of a module around them."""


def decay_groups(
    model: nn.Module,
    weight_decay: float = 0.1,
    *,
    no_decay: Rule | Iterable[Rule] = (),
    min_ndim: int = 2,
    lr: Mapping[Rule, float | torch.Tensor] | None = None,
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
        min_ndim: smallest number of original dimensions for which a parameter decays.
        lr: learning rate for the parameters of a rule; the others get the optimizer's own.
        parameters: only these of the model's parameters, such as those that no other optimizer has.

    Returns:
        [{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}],
        then, for each rule of `lr`, two such groups with "lr". Each is in the order of
        `named_parameters()`, and may be empty. Frozen parameters are in none. A tied parameter
        occurs once; a rule that matches any of its names counts.

    Raises:
        TypeError: a rule is neither a name nor a module class; another argument has a wrong type.
        ValueError: a rule matches nothing in the model; two rules of `lr` match one parameter; a
            number is negative or not finite; one of `parameters` is not the model's.
        RuntimeError: the model is inside `summon_full_params`, whose parameters are temporary.
    """
    rules = [no_decay] if isinstance(no_decay, (str, type)) else no_decay
    _check(model, weight_decay, rules, min_ndim, lr)
    named = _named(model)
    spared = {each for rule in rules for each in _matching(model, named, rule, "no_decay")}
    rates: dict[int, Rule] = {}
    for rule in lr or {}:
        for each in _matching(model, named, rule, "lr"):
            if each in rates:
                name = next(name for name, parameter in named if id(parameter) == each)
                raise ValueError(
                    f"lr: {name!r} matches both {_text(rates[each])} and {_text(rule)}; write "
                    "rules that share no parameter"
                )
            rates[each] = rule
    wanted = _chosen(model, named, parameters)
    groups: list[dict[str, Any]] = []
    for rate in (None, *(lr or {})):
        options = {} if rate is None else {"lr": (lr or {})[rate]}
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for parameter in wanted:
            if parameter.requires_grad and rates.get(id(parameter)) == rate:
                decays = id(parameter) not in spared and original_ndim(parameter) >= min_ndim
                (decayed if decays else others).append(parameter)
        groups.append({"params": decayed, "weight_decay": weight_decay, **options})
        groups.append({"params": others, "weight_decay": 0.0, **options})
    return groups


def original_ndim(parameter: torch.Tensor) -> int:
    """Dimensions of a parameter; of a sharded one, those of the original parameter."""
    info = get_info(parameter)
    return parameter.ndim if info is None else info.ndim


_Named = list[tuple[str, nn.Parameter]]
"""The parameters of a model, under each of their names."""


def _named(model: nn.Module) -> _Named:
    units = [unit for m in model.modules() if (unit := get_unit(m)) is not None]
    if any(unit.training_state is TrainingState.SUMMON_FULL_PARAMS for unit in units):
        raise RuntimeError(
            "decay_groups inside summon_full_params: these full parameters are temporary, and "
            "no optimizer may keep them; call it outside"
        )
    return [
        (clean_name(name), _at_rest(parameter))
        for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False)
    ]


def _matching(model: nn.Module, named: _Named, rule: Rule, option: str) -> set[int]:
    """Ids of the parameters that a rule selects."""
    if isinstance(rule, type) and issubclass(rule, nn.Module):
        modules = (each for each in model.modules() if isinstance(each, rule))
        found = {id(_at_rest(p)) for module in modules for p in module.parameters()}
    elif isinstance(rule, str):
        found = {id(parameter) for name, parameter in named if _fits(name, rule)}
    else:
        raise TypeError(f"{option}: expected names and classes of modules, got {rule!r}")
    if not found:
        raise ValueError(
            f"{option}: {_text(rule)} matches no parameter of {type(model).__name__}; "
            "use names of named_parameters()"
        )
    return found


def _chosen(
    model: nn.Module, named: _Named, parameters: Iterable[nn.Parameter] | None
) -> list[nn.Parameter]:
    """Those of the model's parameters that were given, each once, in the model's order."""
    own = {id(parameter): parameter for _, parameter in named}
    wanted = set(own) if parameters is None else set[int]()
    for number, parameter in enumerate(() if parameters is None else parameters):
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"parameters[{number}]: expected a parameter, got {parameter!r}")
        if id(_at_rest(parameter)) not in own:
            raise ValueError(
                f"parameters[{number}], {name_of(parameter)}, is no parameter of "
                f"{type(model).__name__}; pass some of model.parameters()"
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


def _text(rule: Rule) -> str:
    return repr(rule if isinstance(rule, str) else rule.__name__)


def _check(
    model: object, weight_decay: object, no_decay: object, min_ndim: object, lr: object
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a module, got {type(model).__name__}")
    _check_number("weight_decay", weight_decay)
    if not isinstance(no_decay, Iterable):
        raise TypeError(f"no_decay: expected names and classes of modules, got {no_decay!r}")
    if isinstance(min_ndim, bool) or not isinstance(min_ndim, int):
        raise TypeError(f"min_ndim: expected an int, got {min_ndim!r}")
    if min_ndim < 0:
        raise ValueError(f"min_ndim: expected 0 or more, got {min_ndim}")
    if lr is not None and not isinstance(lr, Mapping):
        raise TypeError(f"lr: expected a mapping of rules to learning rates, got {lr!r}")
    for rule, rate in (lr or {}).items():
        if not (isinstance(rate, torch.Tensor) and rate.numel() == 1):
            _check_number(f"the lr of {rule!r}", rate)


def _check_number(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what}: expected a number, got {value!r}")
    if not (math.isfinite(value) and float(value) >= 0):
        raise ValueError(f"{what}: expected a finite number of 0 or more, got {value!r}")
