"""pregather(model): all units gathered by hand, before the timed part of a step."""

from __future__ import annotations

from torch import nn

from layerzero.runtime.root import root_of
from layerzero.runtime.unit import get_unit


def pregather(model: nn.Module, *, wait: bool = True) -> None:
    """Gather every unit of `model` now; the next forward uses them and gathers nothing.

    Collective over the ranks that share the model, between forward and backward calls. It takes the
    memory of all full parameters until that forward has used them: each unit is freed when its
    forward ends, as ever, and gathered again in backward. Weights that change before the forward
    (an optimizer's step) are gathered again there. Attributes and `parameters()` stay the pieces.

    Args:
        model: a ZeRO3 module, or any module that is a unit; with all units inside.
        wait: the host waits until everything is there, on a device with streams too (with all that
            was queued on the current stream before), so that a timer which starts next sees no
            gather. False: there only the stream waits. On CPU the host waits always.

    Raises:
        ValueError: `model` is not wrapped.
        RuntimeError: inside forward or backward.
        CollectiveError: a rank did not come.
    """
    unit = get_unit(model)
    if unit is None:
        raise ValueError(f"pregather: expected a ZeRO3 module, got {type(model).__name__}")
    inside = {id(other) for m in model.modules() if (other := get_unit(m)) is not None}
    root = root_of(unit)
    root.pregather([other for other in root.units if id(other) in inside], wait)
