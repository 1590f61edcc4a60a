"""What the optimizers of this package refuse: parameters, and options of groups.

They own their parameters: where another optimizer that is alive, whatever its class, has one of
them, they are refused, and so is the first step of one that is made later.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from layerzero.flat.parameter_info import get_info
from layerzero.optim import attach
from layerzero.optim.sharded_params import owner_of_each
from layerzero.step.root import RootState

_alone: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Live optimizers whose parameters no other may step."""


def claim(optimizer: torch.optim.Optimizer) -> None:
    """Note that `optimizer`, as long as it lives, has its parameters alone."""
    _alone.add(optimizer)


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Its parameters are free again: it could not be made."""
    attach.attached.discard(optimizer)
    _alone.discard(optimizer)


@attach.on_first_step
def _refuse_step(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        ValueError: another optimizer has a parameter of this one alone.
    """
    if any(other is not optimizer for other in _alone):
        _refuse(optimizer, {id(p) for g in optimizer.param_groups for p in g["params"]}, _alone)


def _refuse(
    optimizer: torch.optim.Optimizer, wanted: set[int], others: Iterable[torch.optim.Optimizer]
) -> None:
    for last in (False, True):
        taken = (
            (parameter, other)
            for other in list(others)
            if other is not optimizer
            for group in other.param_groups
            for parameter in group["params"]
            if id(parameter) in wanted
        )
        parameter, holder = next(taken, (None, None))
        if parameter is None:
            return
        if last:
            raise ValueError(
                f"{type(optimizer).__name__}: parameter {name_of(parameter)} was given to two "
                f"optimizers: {type(holder).__name__} has it already. Give each parameter to one, "
                "or delete the other optimizer first (`del optimizer`)"
            )
        del parameter, holder, taken
        gc.collect()  # An optimizer in a reference cycle may be alive without a user.


def check_parameters(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    earlier: Sequence[nn.Parameter] = (),
    takes_ignored: bool = True,
) -> RootState | None:
    """Check parameters that are given to an optimizer.

    Args:
        earlier: those that it has already.
        takes_ignored: accept the model's ignored parameters, too.

    Returns:
        The model of the parameters; None if none belongs to one.

    Raises:
        TypeError: one is no tensor.
        ValueError: one belongs to no ZeRO3 module, to another one than the others, or to another
            optimizer; names it.
    """
    what, known = type(optimizer).__name__, owner_of_each()
    # Of the first sharded parameter; the one that belongs elsewhere is named by its own.
    first = next((known[id(p)] for p in (*earlier, *parameters) if id(p) in known), None)
    root = None if first is None else first.root
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"{what}: expected parameters, got {type(parameter).__name__}")
        owner = known.get(id(parameter))
        if owner is None and not (takes_ignored and root and _is_ignored(root, parameter)):
            raise ValueError(
                f"{what}: parameter {name_of(parameter)} belongs to no ZeRO3 module"
                f"{' that the other parameters belong to' if root is not None else ''}; wrap "
                "the model first, pass model.parameters() of the wrapper, outside "
                "summon_full_params, and give ignored parameters and those of other models to "
                "torch's optimizer"
            )
        if owner is not None and first is not None and owner.root is not root:
            raise ValueError(
                f"{what}: parameter {name_of(parameter)} belongs to another ZeRO3 module than "
                f"{name_of(first.sharded_param)}; build one optimizer for each model"
            )
    wanted = {id(each) for each in parameters if get_info(each) is not None}
    _refuse(optimizer, wanted, attach.attached)
    return root


def _is_ignored(root: RootState, parameter: nn.Parameter) -> bool:
    ignored = root.structure.ignored_now()
    inside = (each for module in ignored.modules for each in module.parameters())
    return any(parameter is each for each in (*ignored.parameters, *inside))


def check_options(what: str, groups: Sequence[Mapping[str, Any]], fixed: Mapping[str, Any]) -> None:
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


def name_of(parameter: torch.Tensor) -> str:
    """A parameter's FQN in quotes; of one that is not sharded, its shape."""
    info = get_info(parameter) if isinstance(parameter, nn.Parameter) else None
    return f"of shape {tuple(parameter.shape)}" if info is None else repr(info.fqn)
