"""Which parameters decay: by the shapes that the model's author wrote, not by those of pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from layerzero.core.parameter_info import get_info


def decay_groups(
    model: nn.Module,
    weight_decay: float = 0.1,
    *,
    no_decay: Iterable[str | type[nn.Module]] = (),
    min_ndim: int = 2,
) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer: matrices decay, vectors and scalars do not.

    Pieces are 1-D, so a rule that asks `parameter.ndim` puts all of them into one group; this one
    asks for the original shape. Of a module that is not sharded it makes the same groups. Not
    collective; the same names on every rank.

    Args:
        model: a ZeRO3 module, one inside it, or any other module.
        weight_decay: of the first group.
        no_decay: what else does not decay: classes of modules, with all that is inside them, and
            names: whole ones or consecutive parts of them, such as "bias", "wpe" or "head.weight".
        min_ndim: original dimensions from which a parameter decays.

    Returns:
        [{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}],
        each in the order of `named_parameters()`. Frozen parameters are in neither. A tied
        parameter is there once, and does not decay if one of its names says so.

    Raises:
        TypeError: `no_decay` has something else.
        ValueError: one of its names or classes fits nothing in the model.
    """
    rules = [no_decay] if isinstance(no_decay, (str, type)) else list(no_decay)
    spared: set[int] = set()
    for rule in rules:
        if isinstance(rule, type) and issubclass(rule, nn.Module):
            found = {
                id(parameter)
                for module in model.modules()
                if isinstance(module, rule)
                for parameter in module.parameters()
            }
        elif isinstance(rule, str):
            found = {
                id(parameter)
                for name, parameter in model.named_parameters(remove_duplicate=False)
                if f".{rule}." in f".{name}."
            }
        else:
            raise TypeError(f"no_decay: expected names and classes of modules, got {rule!r}")
        if not found:
            raise ValueError(
                f"no_decay: {rule if isinstance(rule, str) else rule.__name__!r} fits no parameter "
                f"of {type(model).__name__}; names are those of named_parameters()"
            )
        spared |= found
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = id(parameter) not in spared and original_ndim(parameter) >= min_ndim
            (decayed if decays else others).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def original_ndim(parameter: nn.Parameter) -> int:
    """Of a piece the dimensions of what it is a piece of."""
    info = get_info(parameter)
    return parameter.ndim if info is None else len(info.shape)
