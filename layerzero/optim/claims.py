"""Which optimizer has a parameter: two that step the same one would overwrite each other."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from layerzero.core.parameter_info import get_info

_holders: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[torch.optim.Optimizer]]] = {}


def claim(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Note that `optimizer`, as long as it lives, steps these sharded parameters.

    Raises:
        ValueError: another optimizer that is alive has claimed one.
    """
    wanted = [each for each in parameters if get_info(each) is not None]
    taken = _first_taken(optimizer, wanted)
    if taken is not None:
        gc.collect()  # An optimizer in a reference cycle may be alive without a user.
        taken = _first_taken(optimizer, wanted)
    if taken is not None:
        parameter, holder = taken
        raise ValueError(
            f"{type(optimizer).__name__}: parameter {name_of(parameter)} was given to two "
            f"optimizers, and a {type(holder).__name__} has it already; give each parameter to "
            "one, or delete the other optimizer first (`del optimizer`)"
        )
    reference = weakref.ref(optimizer)
    for parameter in wanted:
        _holders[id(parameter)] = (weakref.ref(parameter), reference)
        weakref.finalize(parameter, _holders.pop, id(parameter), None)


def _first_taken(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]
) -> tuple[nn.Parameter, torch.optim.Optimizer] | None:
    for parameter in parameters:
        known, holder_ref = _holders.get(id(parameter), (None, None))
        if known is None or holder_ref is None or known() is not parameter:
            continue
        holder = holder_ref()
        if holder is not None and holder is not optimizer:
            return parameter, holder
    return None


def name_of(parameter: torch.Tensor) -> str:
    """A parameter's FQN in quotes; of one that is not sharded, its shape."""
    info = get_info(parameter) if isinstance(parameter, nn.Parameter) else None
    return f"of shape {tuple(parameter.shape)}" if info is None else repr(info.fqn)
