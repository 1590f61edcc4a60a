"""Which unit a piece is of, where only the piece is at hand: in an entry of a state dict."""

from __future__ import annotations

import weakref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from layerzero.core.parameter_info import get_info
from layerzero.runtime.unit import Unit

_units = WeakIdKeyDictionary()
"""By a piece, a weak reference to the unit that it is of."""


def remember(unit: Unit) -> None:
    for piece in unit.pieces:
        _units[piece] = weakref.ref(unit)


def unit_of(piece: nn.Parameter) -> Unit | None:
    """The unit that a piece is of; None once it is gone."""
    reference = _units.get(piece)
    unit: Unit | None = None if reference is None else reference()
    return unit


def refuse_other_name(piece: nn.Parameter, key: str) -> None:
    """Refuse an expert that only some ranks have under a key without its name: the key may stand
    for another expert elsewhere, and files know keys alone.

    So it is with an optimizer's own state dict, which numbers parameters.

    Raises:
        NotImplementedError: it is one.
    """
    unit, info = unit_of(piece), get_info(piece)
    if unit is None or info is None or info.tensor_parallel is not None or info.fqn in key:
        return
    if any(handle.placement.data_parallel is not None for handle in unit.handles):
        raise NotImplementedError(
            f"{key}: on this rank it is of {info.fqn}, and on ranks with other experts of another; "
            "use layerzero.checkpoint.get_optimizer_state_dict and set_optimizer_state_dict, which "
            "name experts by their number among all, or layerzero.checkpoint.save and load"
        )
