"""Derives the expected execution order of a model from a plan: steps and prefetch lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from layerzero.build.wrap import Choice, UnitPlan, plan_units
from layerzero.config import BackwardPrefetch
from layerzero.plan.fields import PlanFields
from layerzero.plan.order import Lists, Place, Step, backward_lists, forward_lists, order_steps
from layerzero.plan.resolve import Resolved


@dataclass(frozen=True)
class Expected:
    """The units that a model will have, and the order they are expected to run in."""

    units: list[UnitPlan]
    """Outermost first, the root included."""
    steps: list[Step]
    forward: Lists
    backward: Lists

    @property
    def forward_depth(self) -> int:
        """Length of the longest forward list, in units."""
        return max(map(len, self.forward.values()), default=0)


def expect(plan: PlanFields, model: nn.Module, resolved: Resolved) -> Expected:
    """Units and expected order of `model`, sharded or not, under `plan`. Changes nothing."""
    chosen: dict[int, Any] = {id(unit.module): True for unit in resolved.units}

    def choose(module: nn.Module, fqn: str) -> Choice:
        return chosen.get(id(module), False)

    units, _ = plan_units(model, choose, resolved.ignored_modules, resolved.ignored_parameters)
    by_module = {id(unit.module): unit for unit in resolved.units}
    places = []
    for unit in units[1:]:
        if not num_parameters(unit):
            continue
        named = by_module.get(id(unit.module))
        hook = named.hook if named is not None else None
        places.append(
            Place(
                fqn=unit.fqn,
                pattern=len(plan.patterns) if named is None else named.first_pattern,
                is_member=named is not None and named.is_member,
                gathered_with=unit.fqn if hook is None else hook.fqn,
            )
        )
    steps = order_steps(places)
    when_done = plan.options.get("backward_prefetch") is BackwardPrefetch.BACKWARD_POST
    return Expected(
        units,
        steps,
        forward_lists(steps, plan.num_forward),
        backward_lists(steps, plan.num_backward, when_done),
    )


def num_parameters(unit: UnitPlan) -> int:
    """Number of elements of the parameters that the unit owns, or will own."""
    if unit.existing is not None:
        return unit.existing.num_parameters
    return sum(original.parameter.numel() for original in unit.originals)
