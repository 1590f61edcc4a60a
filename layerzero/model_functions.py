"""Public functions that take a wrapped model, or a module that is a unit."""

from __future__ import annotations

from torch import nn

from layerzero.step import hooks
from layerzero.step.root import ordered_units, root_of
from layerzero.step.unit import get_unit
from layerzero.step.unit_view import UnitView


def units(model: nn.Module) -> list[UnitView]:
    """Return the units of a wrapped model, in execution order once a forward was recorded.

    Each has `.fqn`, `.module`, `.num_parameters`, `.nbytes` (unsharded), `.state`, `.holds` (why it
    stays unsharded), `unshard` and `reshard`, and the `set_modules_to_*_prefetch` methods.

    Raises:
        ValueError: `model` is not wrapped.
    """
    return [UnitView(unit) for unit in ordered_units(model)]


def pregather(model: nn.Module, *, wait: bool = True) -> None:
    """Unshard every unit of `model` now, so that the next forward gathers nothing.

    Collective over the ranks that share the model; call it outside forward and backward. It needs
    memory for all unsharded parameters: each unit is resharded when its next forward ends, as
    usual, and gathered again in backward. If the weights change before that forward (an optimizer
    step), it gathers them again. Attributes and `parameters()` still show sharded parameters.

    Args:
        model: a ZeRO3 module, or any module that is a unit; units inside it are included.
        wait: block the host until all gathers are done, also on a device with streams (there with
            all work queued earlier on the current stream), so that a timer started next measures
            no gather. False: on a device with streams only the current stream waits; on CPU the
            host still blocks.

    Raises:
        ValueError: `model` is not wrapped.
        RuntimeError: inside forward or backward.
        CollectiveError: a rank did not take part within the timeout.
    """
    unit = get_unit(model)
    if unit is None:
        raise ValueError(f"pregather: expected a ZeRO3 module, got {type(model).__name__}")
    inside = {id(other) for m in model.modules() if (other := get_unit(m)) is not None}
    root = root_of(unit)
    root.pregather([other for other in root.units if id(other) in inside], wait)


def register_forward_method(model: nn.Module, name: str) -> None:
    """Make `model.name(...)` unshard and reshard parameters as `model(...)` does.

    Args:
        model: a ZeRO3 module, or any module that is a unit.
        name: a method of the wrapped module that uses parameters without calling the module.

    Raises:
        ValueError: `model` is not a unit, or has no such method.
    """
    unit = get_unit(model)
    if unit is None:
        raise ValueError(
            f"register_forward_method: {type(model).__name__} is not a unit; pass a ZeRO3 module "
            "or a module that auto_wrap_policy selected"
        )
    if not callable(getattr(unit.module, name, None)):
        raise ValueError(
            f"register_forward_method: {type(unit.module).__name__} has no method {name!r}"
        )
    hooks.install(unit.module, name, unit)
