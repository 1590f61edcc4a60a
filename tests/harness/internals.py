"""The engine's own objects behind a wrapped model, for tests that look inside."""

from collections.abc import Callable

import torch
from torch import nn

from layerzero.module_tree.conversions import move
from layerzero.step.root import RootState, root_of
from layerzero.step.unit import Unit, get_unit
from layerzero.wrapping.units import ordered_units


def inner_units(model: nn.Module) -> list[Unit]:
    """What `layerzero.units` shows views of, in the same order."""
    return ordered_units(model)


def root_state(model: nn.Module) -> RootState:
    """The state that all units of a model share."""
    unit = get_unit(model)
    assert unit is not None, "it is wrapped"
    return root_of(unit)


def move_shards(model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What `model.to(device)` does, for any function that returns a tensor in other memory."""
    for handle in (handle for unit in root_state(model).units for handle in unit.handles):
        move(handle, convert)
