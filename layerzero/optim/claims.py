"""Which optimizer has a parameter: two that step the same one would overwrite each other.

An optimizer of this package has its parameters alone: it is refused where another that is alive,
whatever its class, has one of them already, and so is the first step of one that is made later.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from weakref import WeakSet

import torch
from torch import nn

from layerzero.flat.parameter_info import get_info
from layerzero.optim import attach

_alone: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Live optimizers whose parameters no other may step."""


def refuse_taken(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """
    Raises:
        ValueError: another optimizer that is alive has one of these sharded parameters; names both.
    """
    wanted = {id(each) for each in parameters if get_info(each) is not None}
    if _first_taken(optimizer, wanted, attach.attached) is not None:
        gc.collect()  # An optimizer in a reference cycle may be alive without a user.
        _refuse(optimizer, wanted, attach.attached)


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
    taken = _first_taken(optimizer, wanted, others)
    if taken is not None:
        parameter, holder = taken
        raise ValueError(
            f"{type(optimizer).__name__}: parameter {name_of(parameter)} was given to two "
            f"optimizers: {type(holder).__name__} has it already. Give each parameter to one, or "
            "delete the other optimizer first (`del optimizer`)"
        )


def _first_taken(
    optimizer: torch.optim.Optimizer, wanted: set[int], others: Iterable[torch.optim.Optimizer]
) -> tuple[nn.Parameter, torch.optim.Optimizer] | None:
    for other in list(others):
        if other is not optimizer:
            for group in other.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in wanted:
                        return parameter, other
    return None


def name_of(parameter: torch.Tensor) -> str:
    """A parameter's FQN in quotes; of one that is not sharded, its shape."""
    info = get_info(parameter) if isinstance(parameter, nn.Parameter) else None
    return f"of shape {tuple(parameter.shape)}" if info is None else repr(info.fqn)
