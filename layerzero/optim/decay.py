"""Parameter groups with and without weight decay, by original shapes instead of sharded ones."""

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

    Sharded parameters are 1-D, so a rule by `parameter.ndim` would put all of them into one group;
    this function uses the original shapes. A module that is not sharded gets the same groups. Not
    collective; groups have the same names on every rank.

    Args:
        model: a ZeRO3 module, a module inside one, or any other module.
        weight_decay: value for the first group.
        no_decay: further parameters that do not decay: module classes, which stand for all
            parameters inside such modules, and names, either whole ones or consecutive parts of
            them, such as "bias", "wpe" or "head.weight".
        min_ndim: smallest number of original dimensions for which a parameter decays.

    Returns:
        [{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}],
        each in the order of `named_parameters()`. Frozen parameters are in neither. A tied
        parameter occurs once, and does not decay if any of its names matches `no_decay`.

    Raises:
        TypeError: an entry of `no_decay` is neither a name nor a module class.
        ValueError: an entry of `no_decay` matches nothing in the model.
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
                f"no_decay: {rule if isinstance(rule, str) else rule.__name__!r} matches no "
                f"parameter of {type(model).__name__}; use names of named_parameters()"
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
    """Dimensions of a parameter; of a sharded one, those of the original parameter."""
    info = get_info(parameter)
    return parameter.ndim if info is None else len(info.shape)
