"""Public functions that take a wrapped model, or a module that is a unit; and what they return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from layerzero.step import hooks
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState, root_of
from layerzero.step.unit import UNIT, Hold, ShardState, Unit, get_unit


class UnshardHandle:
    """An explicit `unshard` under way, as `unshard(async_op=True)` returns it."""

    def __init__(self, root: RootState, unit: Unit) -> None:
        self.operations = root.operations
        self._unit = unit

    @remembers_failure
    def wait(self) -> None:
        """Wait for the gather and show the unsharded parameters, unless they have been freed."""
        if self._unit.state is not ShardState.SHARDED:
            self._unit.wait_for_unshard()
            self._unit.show_unsharded()


@remembers_failure
def unshard_unit(root: RootState, unit: Unit, async_op: bool) -> UnshardHandle | None:
    """Implements `ZeRO3.unshard`."""
    from layerzero.step.on_request import keep

    if not root.is_in_pass:
        root.structure.check("unshard")
        root.before_call("unshard")
    root.backward.clear_abandoned()
    root.context.note_weights()
    if unit.is_optional and not root.is_in_pass:
        from layerzero.optional.optional_units import gather_with_others

        for each in unit.handles:  # Which ranks have it, and have read it, may differ.
            each.mark_stale()
        gather_with_others(unit, is_used=True)
    elif unit.is_stale:
        unit.reshard()
    keep(unit)
    root.context.wait_for_uploads()
    handle = UnshardHandle(root, unit)
    if not async_op:
        handle.wait()
    return handle if async_op else None


class UnitMethods:
    """Methods of what stands for one unit: a `ZeRO3`, a `UnitView`, a module of `fully_shard`."""

    _layerzero_unit: Unit

    def unshard(self: Any, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's own parameters, not those of units inside it. Collective over its
        shard group.

        They stay until the end of the unit's next forward or of the next backward, or until
        `reshard`. Blocks the host only on devices without streams.

        Returns:
            With `async_op` a handle whose `wait()` shows the parameters; otherwise None.
        """
        return unshard_unit(root_of(self._layerzero_unit), self._layerzero_unit, async_op)

    def reshard(self: Any) -> None:
        """Free this unit's unsharded parameters. Not collective."""
        self._layerzero_unit.reshard()

    def set_modules_to_forward_prefetch(self: Any, modules: Sequence[nn.Module]) -> None:
        """Gather these units when this one's forward begins, instead of those recorded next."""
        self._layerzero_unit.forward_prefetch = _units_to_prefetch(self._layerzero_unit, modules)

    def set_modules_to_backward_prefetch(self: Any, modules: Sequence[nn.Module]) -> None:
        """Gather these units when this one's backward begins, instead of those recorded next."""
        self._layerzero_unit.backward_prefetch = _units_to_prefetch(self._layerzero_unit, modules)


def _units_to_prefetch(by: Unit, modules: Sequence[nn.Module]) -> list[Unit]:
    units: list[Unit] = []
    for module in modules:
        unit: Unit | None = getattr(module, UNIT, None)
        if unit is None:
            raise ValueError(
                f"{by.label}: modules to prefetch must be units, got {type(module).__name__}"
            )
        units.append(unit)
    by.context.limiter.make_room_for(len(units))
    return units


class UnitView(UnitMethods):
    """One unit of a wrapped model, as `layerzero.units(model)` lists them.

    Views of one unit are equal.
    """

    def __init__(self, unit: Unit) -> None:
        self._layerzero_unit = unit

    @property
    def fqn(self) -> str:
        """Name in the outermost wrapped module; "" for that module itself."""
        return self._layerzero_unit.fqn

    @property
    def module(self) -> nn.Module:
        return self._layerzero_unit.module

    @property
    def num_parameters(self) -> int:
        """Elements of all original parameters (of DTensors the local ones), without padding."""
        return self._layerzero_unit.num_parameters

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameters, in the compute dtype, padding included."""
        return self._layerzero_unit.nbytes

    @property
    def state(self) -> ShardState:
        """Whether the unit is sharded, gathering or unsharded now."""
        return self._layerzero_unit.state

    @property
    def holds(self) -> Hold:
        """Why the unit stays unsharded; `Hold(0)`: it is freed after its use."""
        return self._layerzero_unit.holds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnitView) and other._layerzero_unit is self._layerzero_unit

    def __hash__(self) -> int:
        return hash(self._layerzero_unit)

    def __repr__(self) -> str:
        return repr(self._layerzero_unit)


def ordered_units(module: nn.Module) -> list[Unit]:
    """Units inside a wrapped module, in execution order once a forward has been recorded.

    Raises:
        ValueError: `module` is not wrapped.
    """
    unit = get_unit(module)
    if unit is None:
        raise ValueError(f"units: expected a ZeRO3 module, got {type(module).__name__}")
    root = root_of(unit)
    inside = {*root.units_inside(module)}
    recorded = map(root.units.__getitem__, root.scheduler.last_order)
    return [each for each in dict.fromkeys((*recorded, *root.units)) if each in inside]


def units(model: nn.Module) -> list[UnitView]:
    """Return the units of a wrapped model, in execution order once a forward was recorded.

    Raises:
        ValueError: `model` is not wrapped.
    """
    return [UnitView(unit) for unit in ordered_units(model)]


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
