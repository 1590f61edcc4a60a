"""Finds the unit of a sharded parameter, for entries of state dicts."""

from __future__ import annotations

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from layerzero.flat.parameter_info import get_info
from layerzero.step.unit import Unit

unit_refs = WeakIdKeyDictionary()
"""Weak reference to the unit of each sharded parameter, put there with its hooks."""


def unit_of(sharded_param: nn.Parameter) -> Unit | None:
    """The unit of a sharded parameter; None if it is gone."""
    reference = unit_refs.get(sharded_param)
    unit: Unit | None = None if reference is None else reference()
    return unit


def refuse_other_name(sharded_param: nn.Parameter, key: str) -> None:
    """Refuse a key without the parameter's name for an expert that only some ranks have.

    On other ranks the same key may mean another expert, and files store only keys. This happens
    with an optimizer's own state dict, which numbers parameters.

    Raises:
        NotImplementedError: `sharded_param` is of such an expert, and `key` lacks its name.
    """
    unit, info = unit_of(sharded_param), get_info(sharded_param)
    if unit is None or info is None or info.tensor_parallel is not None or info.fqn in key:
        return
    if any(handle.placement.data_parallel is not None for handle in unit.handles):
        raise NotImplementedError(
            f"{key}: on this rank it belongs to {info.fqn}, and on ranks with other experts to "
            "another parameter; use layerzero.checkpoint.get_optimizer_state_dict and "
            "set_optimizer_state_dict, which use global expert numbers, or "
            "layerzero.checkpoint.save and load"
        )
