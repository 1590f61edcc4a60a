"""plan_memory: what a rank will hold, at rest and at most, without ranks and without weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from layerzero.config import size_text
from layerzero.flat.flat_param import FlatParam
from layerzero.memory_plan.arguments import PlanRequest, check_request, prepare, with_all_experts
from layerzero.memory_plan.steps import Batch, Optimizer, PlannedRank, Usage
from layerzero.notices import columns
from layerzero.zero3 import KEYWORDS

KINDS = (
    *("shards", "compute shards", "gradients", "optimizer state", "full buffers"),
    *("reduction buffers", "activations", "module buffers", "whole parameters"),
    *("optimizer temporaries", "other"),
)
_ALWAYS = 7
"""So many of `KINDS` are in every plan, and in its table."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that the fullest rank holds. `print` shows it as a table."""

    resting_bytes: int
    """All that stays between steps: shards, optimizer state, module buffers."""
    peak_bytes: int
    """The most that all tensor storages hold at once in a step."""
    by_kind: Mapping[str, tuple[int, int]]
    """(at rest, at the moment of the peak) by kind of memory; they add up to the two above."""
    peak_unit: str
    """Name of the unit at work at the peak; "" in the optimizer's step."""
    peak_moment: str
    """Part of the step: "forward", "backward", "reduction" or "optimizer step"."""
    padding_bytes: int
    """Bytes of the shards beyond an even split of the parameters; part of "shards"."""
    world_size: int
    zero3_size: int
    device: torch.device
    rank: int = field(default=0)
    """The fullest rank, for which the figures are."""

    def __str__(self) -> str:
        rows = [("", "at rest", "at the peak")]
        rows += [
            (kind, size_text(rest), size_text(peak)) for kind, (rest, peak) in self.by_kind.items()
        ]
        rows.append(("all", size_text(self.resting_bytes), size_text(self.peak_bytes)))
        rule = tuple("-" * max(map(len, column)) for column in zip(*rows, strict=True))
        lines = columns([rows[0], rule, *rows[1:-1], rule, rows[-1]], (0,))
        where = f" of {self.peak_unit}" if self.peak_unit else ""
        return "\n".join(
            [
                f"bytes of rank {self.rank}, the fullest of {self.world_size} on "
                f"{self.device.type}, in shard groups of {self.zero3_size}",
                *lines,
                f"peak: {self.peak_moment}{where}; padding of the shards: "
                f"{size_text(self.padding_bytes)}",
            ]
        )


def plan_memory(
    module: nn.Module,
    *,
    world_size: int,
    batch: Any,
    optimizer: Optimizer = "adamw",
    **arguments: Any,
) -> MemoryPlan:
    """Plan the memory of `ZeRO3(module, ...)` in training, without ranks and without weights.

    Not collective: needs no process group, and leaves one that exists alone. The engine runs on a
    copy of the module whose tensors have no memory, and all storages are counted. `module` is not
    changed and may be on the meta device.

    The step that is planned: forward of `batch`, backward from the output (from the sum of its
    floating-point parts where it is no scalar), the optimizer's step, `zero_grad()`; after a first
    such step. The output lives until the end of the step. Not counted: what a kernel allocates and
    frees again inside one operation, and what the caching allocator of a device rounds up.

    Args:
        module: as for `ZeRO3`; not wrapped.
        world_size: number of ranks, instead of a process group; with DTensor parameters, of
            data-parallel ones.
        batch: (args, kwargs) of a forward, a tuple and a dict; or a tensor, for one argument; or a
            dict, for keyword arguments. Only shapes and dtypes are read.
        optimizer: "adamw" (torch's), "sgd" (without momentum), or bytes of state for each element.
        arguments: the other arguments of `ZeRO3`, by name. `device=None` is the accelerator if
            there is one, else the CPU, with what reductions on gloo hold; it may be one that is not
            here. Where `auto_wrap_policy` returns a `process_group` (experts), that may be the
            global ranks that have the same experts.

    Raises:
        ValueError, TypeError, RuntimeError: as `ZeRO3`; or `batch` or `optimizer` is none of these;
            or the forward depends on values.
        NotImplementedError: the memory of an argument or a module cannot be planned yet.
    """
    given, unknown = _named(module, arguments)
    request = check_request(given, unknown, world_size)
    checked, planned = _batch(batch), _check_optimizer(optimizer)
    prepared = prepare(request)
    ranks = with_all_experts(prepared.plan.groups, world_size)
    first = PlannedRank(request, prepared, min(ranks), planned)
    usages = {
        rank: (
            first if rank == min(ranks) else PlannedRank(request, prepare(request), rank, planned)
        ).run(checked)
        for rank in _fullest_ranks(first.model.handles, ranks)
    }
    return _fullest(usages, request)


def _fullest_ranks(handles: Iterable[FlatParam], candidates: Collection[int]) -> list[int]:
    """The rank with the most elements, and the one with the largest piece of a parameter: all have
    equal shards, but not equal parts of parameters.

    Optimizer state has the size of the pieces; temporaries of `optimizer.step()` that of one piece.

    Args:
        candidates: the ranks to choose from; rising.
    """
    totals: dict[int, int] = {}
    largest: dict[int, int] = {}
    for handle in handles:
        itemsize, holders = handle.main_shard.itemsize, handle.placement.holders()
        for shard, numel in _pieces(handle):
            rank = next((each for each in holders[shard] if each in candidates), None)
            if rank is not None:
                totals[rank] = totals.get(rank, 0) + numel * itemsize
                largest[rank] = max(largest.get(rank, 0), numel * itemsize)
    if not totals:
        return [min(candidates)]
    found = {max(of, key=lambda rank: (of[rank], -rank)) for of in (totals, largest)}
    return sorted(found)


def _pieces(handle: FlatParam) -> Iterator[tuple[int, int]]:
    """(main shard, elements in it) of each trainable parameter."""
    layout = handle.layout
    for index in handle.gradients.layout.trainable:
        start, numel = layout.starts[index], layout.numels[index]
        if numel:
            last = (start + numel - 1) // layout.shard_numel
            for shard in range(start // layout.shard_numel, last + 1):
                begin, end = layout.owned_range(index, shard)
                yield shard, end - begin


def _fullest(usages: Mapping[int, Usage], request: PlanRequest) -> MemoryPlan:
    rank = max(usages, key=lambda rank: sum(usages[rank].peak.values()))
    usage = usages[rank]
    resting = max(sum(each.resting.values()) for each in usages.values())
    present = [
        kind
        for index, kind in enumerate(KINDS)
        if index < _ALWAYS or usage.resting.get(kind) or usage.peak.get(kind)
    ]
    return MemoryPlan(
        resting_bytes=resting,
        peak_bytes=sum(usage.peak.values()),
        by_kind={kind: (usage.resting.get(kind, 0), usage.peak.get(kind, 0)) for kind in present},
        peak_unit=usage.moment[0],
        peak_moment=usage.moment[1],
        padding_bytes=usage.padding,
        world_size=request.world_size,
        zero3_size=request.given["zero3_size"] or request.world_size,
        device=request.device,
        rank=rank,
    )


def _named(
    module: nn.Module, arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All arguments of `ZeRO3` by name, with its defaults; and those that it does not have."""
    unknown = {name: value for name, value in arguments.items() if name not in KEYWORDS}
    known = {name: value for name, value in arguments.items() if name in KEYWORDS}
    return {**KEYWORDS, **known, "module": module, "process_group": None}, unknown


def _batch(batch: Any) -> Batch:
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    is_pair = isinstance(batch, tuple) and len(batch) == 2
    if is_pair and isinstance(batch[0], tuple) and isinstance(batch[1], Mapping):
        return batch[0], dict(batch[1])
    raise TypeError(
        "batch: expected (args, kwargs) of a forward, a tuple and a dict; or a tensor; or a dict "
        f"of keyword arguments, got {type(batch).__name__}"
    )


def _check_optimizer(optimizer: object) -> Optimizer:
    if isinstance(optimizer, str) and optimizer in ("adamw", "sgd"):
        return optimizer
    is_number = isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool)
    if not (is_number or isinstance(optimizer, str)):
        raise TypeError(f"optimizer: expected 'adamw', 'sgd' or a number, got {optimizer!r}")
    if isinstance(optimizer, str) or not 0 <= optimizer < float("inf"):  # type: ignore[operator]
        raise ValueError(
            "optimizer: expected 'adamw', 'sgd' or bytes of state for each element, at least 0, "
            f"got {optimizer!r}"
        )
    return optimizer  # type: ignore[return-value]
