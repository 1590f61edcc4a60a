"""The units that a model will have under a plan, and which of them are gathered together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from layerzero.build.wrap import Choice, UnitPlan, plan_units
from layerzero.plan.fields import PlanFields
from layerzero.plan.resolve import Resolved, ResolvedUnit


@dataclass(frozen=True)
class PlannedUnits:
    """The units of a model, grouped in steps: units that are gathered together, such as a layer's.

    A step is a unit, its *head*, with the units inside it and those whose hook module is inside it.
    A unit around a whole series, such as an encoder around its layers, is a step of its own.
    """

    units: list[UnitPlan]
    """Outermost first, the root included."""
    heads: frozenset[str]
    """FQNs of the heads of steps that are not around a series."""
    largest_step: int
    """Largest number of units in a step."""

    def depth(self, num_steps: int) -> int:
        """Number of units that covers the rest of a step and the next `num_steps` steps."""
        return (num_steps + 1) * self.largest_step - 1 if num_steps else 0


def planned_units(plan: PlanFields, model: nn.Module, resolved: Resolved) -> PlannedUnits:
    """The units of `model`, sharded or not, under `plan`. Changes nothing."""
    chosen: dict[int, Any] = {id(unit.module): True for unit in resolved.units}

    def choose(module: nn.Module, fqn: str) -> Choice:
        return chosen.get(id(module), False)

    units, _ = plan_units(model, choose, resolved.ignored_modules, resolved.ignored_parameters)
    named = {id(unit.module): unit for unit in resolved.units}
    below = {unit.fqn: named.get(id(unit.module)) for unit in units[1:] if num_parameters(unit)}
    around = {fqn for fqn in below if _is_around_series(fqn, below)}
    heads: Counter[str] = Counter()
    for fqn, unit in below.items():
        gathers = fqn if unit is None or unit.hook is None else unit.hook.fqn
        outer = [each for each in below if each not in around and _is_in(gathers, each)]
        heads[fqn if fqn in around else min(outer, key=len, default=fqn)] += 1
    return PlannedUnits(units, frozenset(heads.keys() - around), max(heads.values(), default=1))


def _is_in(fqn: str, outer: str) -> bool:
    return fqn == outer or fqn.startswith(f"{outer}.")


def _is_around_series(fqn: str, units: dict[str, ResolvedUnit | None]) -> bool:
    """Whether a unit contains a series that it is not a member of."""
    own = units[fqn]
    inside = [unit for other, unit in units.items() if other.startswith(f"{fqn}.")]
    if own is None:
        return any(unit is None or unit.is_member for unit in inside)
    return any(
        unit.first_pattern == own.first_pattern or (unit.is_member and not own.is_member)
        for unit in inside
        if unit is not None
    )


def num_parameters(unit: UnitPlan) -> int:
    """Number of elements of the parameters that the unit owns, or will own."""
    if unit.existing is not None:
        return unit.existing.num_parameters
    return sum(original.parameter.numel() for original in unit.originals)
