"""Formats a plan's effect on a model as text: `ShardingPlan.explain`, and the log."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from layerzero.plan.fields import PlanFields
from layerzero.plan.resolve import Resolved, Row, names, resolve
from layerzero.plan.units import PlannedUnits, num_parameters, planned_units
from layerzero.zero3 import ZeRO3

_ROOT = "(root)"


def explain(plan: PlanFields, model: nn.Module) -> str:
    """The text of `ShardingPlan.explain`."""
    resolved = resolve(plan, model)
    module = model.module if isinstance(model, ZeRO3) else model
    planned = planned_units(plan, module, resolved)
    own = ""
    if callable(getattr(module, "fully_shard", None)):
        own = f" ({type(module).__name__}.fully_shard may override this)"
    lines = [
        f"{len(planned.units)} units of {type(module).__name__}{own}",
        _ahead(planned.depth(plan.num_forward), planned.depth(plan.num_backward)),
        "",
        *_table(resolved, planned),
    ]
    if resolved.problems:
        lines += ["", *(f"problem: {text}" for text in resolved.problems)]
    return "\n".join(lines)


def applied(
    plan: PlanFields, module: nn.Module, by_model: bool, depths: tuple[int, int] | None
) -> str:
    """How a plan was applied, for the log.

    Args:
        by_model: whether the model sharded itself (`fully_shard`).
        depths: units to prefetch in forward and in backward; None: the model set its prefetch
            lists itself.
    """
    options = {name: value for name, value in plan.options.items() if value is not None}
    lines = [
        f"shard_with_plan: {type(module).__name__}"
        + (f" by its own fully_shard; {options}" if by_model else f", {options or 'all defaults'}")
    ]
    lines += [f"{pattern.text}: {own}" for pattern, own in plan.patterns if own]
    lines += [f"optional: {', '.join(plan.optional)}"] if plan.optional else []
    lines += ["pregather: all units before each forward"] if plan.pregather else []
    if depths is None:
        lines.append("prefetch lists set by the model's set_modules_to_prefetch")
    else:
        lines.append(_ahead(*depths))
    return "\n  ".join(lines)


def _ahead(forward: int, backward: int) -> str:
    return f"prefetched along recorded orders: {forward} units in forward, {backward} in backward"


def _table(resolved: Resolved, planned: PlannedUnits) -> Iterator[str]:
    numels = {unit.fqn: num_parameters(unit) for unit in planned.units}
    header = ["pattern", "field", "matched", "used", "parameters", "names"]
    table = [header, [_ROOT, "", "1", "1", f"{numels['']:,}", ""]]
    for row in resolved.rows:
        is_units = row.key == "apply_modules"
        numel = sum(numels.get(fqn, 0) for fqn in row.used) if is_units else None
        table.append(
            [
                row.pattern,
                row.key,
                str(len(row.fqns)),
                str(len(row.used)),
                "" if numel is None else f"{numel:,}",
                "; ".join(_names(row, resolved)),
            ]
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    for line in table:
        cells = [
            cell.rjust(width) if column in (2, 3, 4) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _names(row: Row, resolved: Resolved) -> Iterator[str]:
    if row.used:
        used = row.used
        if row.key == "hook_modules":
            hooks = {unit.fqn: unit.hook for unit in resolved.units}
            used = [f"{f} by {hook.fqn}" if (hook := hooks.get(f)) else f for f in row.used]
        yield names(used)
    for reason, fqns in row.notes.items():
        yield f"not {names(fqns)}: {reason}"
