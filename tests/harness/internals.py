"""The engine's own objects behind a wrapped model, for tests that look inside."""

from torch import nn

from layerzero.step.placeholders import WaitingGradient
from layerzero.step.root import RootState, ordered_units, root_of
from layerzero.step.unit import Unit, get_unit

__all__ = ["Unit", "WaitingGradient", "inner_units", "root_state"]


def inner_units(model: nn.Module) -> list[Unit]:
    """What `layerzero.units` shows views of, in the same order."""
    return ordered_units(model)


def root_state(model: nn.Module) -> RootState:
    """The state that all units of a model share."""
    unit = get_unit(model)
    assert unit is not None, "it is wrapped"
    return root_of(unit)
