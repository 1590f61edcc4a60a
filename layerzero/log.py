"""Logs how a model was wrapped: one INFO record for each model, on the first rank."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from torch import nn

from layerzero.build.plan import WrapPlan
from layerzero.config import MixedPrecision, size_text
from layerzero.flat.names import clean_name
from layerzero.notices import some
from layerzero.optional.arguments import names_of
from layerzero.step.root import RootState
from layerzero.step.unit import Unit

_logger = logging.getLogger(__name__)


def log_units(module: nn.Module, plan: WrapPlan, root: RootState) -> None:
    """Log units, placements, dtypes and prefetching of a model that was just wrapped.

    Reads all of its modules: called only on the first rank, and if level INFO is on.
    """
    lines = [_summary(module, root), *_placements(root.units), *_padding(root.units)]
    lines += [*_precisions(module, root.units), *_hook_modules(module, plan)]
    ignored = root.structure.ignored
    lines += [f"ignored: {some(sorted(ignored.names))}"] if ignored.names else []
    optional = names_of.get(root.units[0])
    lines += [f"a rank may skip: {some(optional)}"] if optional else []
    _logger.info("\n  ".join([*lines, _gathering(root)]))


def _summary(module: nn.Module, root: RootState) -> str:
    units = root.units
    frozen = sum(
        unit.sharded_params[index].layerzero.shape.numel()  # type: ignore[attr-defined]
        for unit in units
        for index, sharded_param in enumerate(unit.sharded_params)
        if not sharded_param.requires_grad
    )
    total = sum(unit.num_parameters for unit in units)
    shards = sum(handle.main_shard.nbytes for unit in units for handle in unit.handles)
    full = sum(unit.nbytes for unit in units)
    largest = max(units, key=lambda unit: unit.nbytes)
    return (
        f"ZeRO3: {len(units)} unit{'s' * (len(units) > 1)} of {type(module).__name__} on "
        f"{root.device}: {total:,} parameters{f' ({frozen:,} frozen)' if frozen else ''}, "
        f"{size_text(shards)} of shards on this rank, {size_text(full)} with all units full; "
        f"the largest unit, {largest.label}, has {size_text(largest.nbytes)}\n  units: "
        f"{some([unit.label for unit in units])}"
    )


def _placements(units: Sequence[Unit]) -> list[str]:
    by_placement: dict[str, list[str]] = {}
    for unit in units:
        for handle in unit.handles:
            placement = handle.placement
            seconds = placement.shard_group.timeout.total_seconds()
            text = f"{placement}, {placement.shard_group.backend}, timeout {seconds:g} s"
            labels = by_placement.setdefault(text, [])
            if unit.label not in labels:
                labels.append(unit.label)
    return [f"{text}: {some(labels)}" for text, labels in by_placement.items()]


def _padding(units: Sequence[Unit]) -> list[str]:
    """Padding that borders on rows need, and the unit with most of it if that is over 1 %."""
    rows = [unit for unit in units if any(h.row_multiple is not None for h in unit.handles)]
    if not rows:
        return []
    padded = {unit: sum(h.layout.padded_numel for h in unit.handles) for unit in rows}
    share = sum(padded.values()) / max(sum(unit.num_parameters for unit in rows), 1) - 1
    text = f"borders between shards lie on rows: padding adds {share:.2%}"
    worst = max(rows, key=lambda unit: padded[unit] - unit.num_parameters)
    of_worst = padded[worst] / max(worst.num_parameters, 1) - 1
    if of_worst > 0.01:
        text += (
            f", and {of_worst:.2%} to {worst.label}: a smaller zero3_size or layout='elements' "
            "pads less"
        )
    return [text]


def _precisions(module: nn.Module, units: Sequence[Unit]) -> list[str]:
    by_precision: dict[MixedPrecision, list[str]] = {}
    for unit in units:
        by_precision.setdefault(unit.options.mixed_precision, []).append(unit.label)
    lines = []
    for precision, labels in by_precision.items():
        dtypes = {
            name: str(value).removeprefix("torch.")
            for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
            if (value := getattr(precision, name)) is not None
        }
        if not dtypes:
            continue
        kept = Counter(
            type(inside).__name__ for inside in module.modules() if precision.keeps_float32(inside)
        )
        stays = ", ".join(f"{name} ({count})" for name, count in sorted(kept.items()))
        lines.append(
            "mixed precision: "
            + ", ".join(f"{name}={value}" for name, value in dtypes.items())
            + (f"; kept in float32: {stays}" if stays else "")
            + (f"; for {some(labels)}" if len(by_precision) > 1 else "")
        )
    return lines


def _hook_modules(module: nn.Module, plan: WrapPlan) -> list[str]:
    names = {id(inside): clean_name(name) for name, inside in module.named_modules()}
    # A hook module may be around what is wrapped, without a name in it; the root has none either.
    found = [
        f"{names.get(id(hook)) or type(hook).__name__} for {unit.fqn}"
        for unit in plan.units
        if (hook := plan.arguments[id(unit)].hook_module) is not None
    ]
    return [f"hook modules, which gather: {some(found)}"] if found else []


def _gathering(root: RootState) -> str:
    scheduler = root.scheduler
    budget = root.context.limiter.budget
    limits = [
        *([] if (most := budget.max_units) is None else [f"{most} unit{'s' * (most > 1)}"]),
        *([] if budget.max_nbytes is None else [size_text(budget.max_nbytes)]),
    ]
    kept = [unit.label for unit in root.units if unit.options.reshard_after_forward is not True]
    when = scheduler.backward_prefetch
    return (
        f"prefetch: {scheduler.forward_depth} in forward, "
        f"{'none' if when is None else when.name} in backward, "
        f"at most {' and '.join(limits) or 'any number'} full at a time"
        + (f"; not freed after forward: {some(kept)}" if kept else "")
    )
