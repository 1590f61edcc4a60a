"""Logs how a model was wrapped: one INFO record for each model, on the first rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from torch import nn

from layerzero.config import MixedPrecision, size_text
from layerzero.notices import some
from layerzero.step.root import RootState
from layerzero.step.unit import Unit
from layerzero.verify.same_plan import plain

_logger = logging.getLogger("layerzero.log")


def log_units(module: nn.Module, root: RootState) -> None:
    """Log units, placements, dtypes and prefetching of a model that was just wrapped.

    Reads all of its modules: called only on the first rank, and if level INFO is on.
    """
    lines = [_summary(module, root), *_placements(root.units), *_precisions(module, root.units)]
    _logger.info("\n  ".join([*lines, _gathering(root)]))


def _summary(module: nn.Module, root: RootState) -> str:
    units = root.units
    total = sum(unit.num_parameters for unit in units)
    shards = sum(handle.main_shard.nbytes for unit in units for handle in unit.handles)
    full = sum(unit.nbytes for unit in units)
    largest = max(units, key=lambda unit: unit.nbytes)
    return (
        f"ZeRO3: {len(units)} unit{'s' * (len(units) > 1)} of {type(module).__name__} on "
        f"{root.device}: {total:,} parameters, "
        f"{size_text(shards)} of shards on this rank, {size_text(full)} with all units full; "
        f"the largest unit, {largest.label}, has {size_text(largest.nbytes)}\n  units: "
        f"{some([unit.label for unit in units])}"
    )


def _placements(units: Sequence[Unit]) -> list[str]:
    by_placement: dict[str, dict[str, None]] = {}
    for unit in units:
        for handle in unit.handles:
            placement = handle.placement
            seconds = placement.shard_group.timeout.total_seconds()
            text = f"{placement}, {placement.shard_group.backend}, timeout {seconds:g} s"
            by_placement.setdefault(text, {})[unit.label] = None
    return [f"{text}: {some(labels)}" for text, labels in by_placement.items()]


def _precisions(module: nn.Module, units: Sequence[Unit]) -> Iterator[str]:
    by_precision: dict[MixedPrecision, list[str]] = {}
    for unit in units:
        by_precision.setdefault(unit.options.mixed_precision, []).append(unit.label)
    for precision, labels in by_precision.items():
        kept = {type(m).__name__ for m in module.modules() if precision.keeps_float32(m)}
        stays = f"; kept in float32: {some(sorted(kept))}" if kept else ""
        yield f"{plain(precision)}{stays}: {some(labels)}"


def _gathering(root: RootState) -> str:
    scheduler = root.scheduler
    kept = [unit.label for unit in root.units if unit.options.reshard_after_forward is not True]
    return (
        f"prefetch: {scheduler.forward_depth} in forward, {scheduler.backward_prefetch} in "
        f"backward, {root.context.limiter.budget}"
        + (f"; not freed after forward: {some(kept)}" if kept else "")
    )
