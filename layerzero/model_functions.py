"""Functions of a wrapped model, or of a module that is a unit: what is no method of `ZeRO3`."""

from __future__ import annotations

from torch import nn

from layerzero.runtime import hooks
from layerzero.runtime.root import ordered_units, root_of
from layerzero.runtime.unit import get_unit
from layerzero.runtime.unit_view import UnitView


def units(model: nn.Module) -> list[UnitView]:
    """The units of a wrapped model, in execution order once a forward was recorded.

    Each has `.fqn`, `.module`, `.num_parameters`, `.nbytes` (full parameters), `.state`, `.holds`
    (why it stays full), `unshard` and `reshard`, and the `set_modules_to_*_prefetch` methods.

    Raises:
        ValueError: `model` is not wrapped.
    """
    return [UnitView(unit) for unit in ordered_units(model)]


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


def register_forward_method(model: nn.Module, name: str) -> None:
    """Let `model.name(...)` gather parameters as `model(...)` does.

    Args:
        model: a ZeRO3 module or any module that is a unit.
        name: a method of the wrapped module that uses parameters without calling the module.

    Raises:
        ValueError: `model` is not a unit, or has no such method.
    """
    unit = get_unit(model)
    if unit is None:
        raise ValueError(
            f"register_forward_method: {type(model).__name__} is not a unit; give a ZeRO3 module "
            "or one that auto_wrap_policy named"
        )
    if not callable(getattr(unit.module, name, None)):
        raise ValueError(
            f"register_forward_method: {type(unit.module).__name__} has no method {name!r}"
        )
    hooks.install(unit.module, name, unit)
