"""plan_memory: what a rank will hold, at rest and at most, without ranks and without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layerzero.config import size_text
from layerzero.memory_plan.arguments import planned_rank, prepare
from layerzero.memory_plan.steps import Batch, Optimizer, PlannedRank
from layerzero.notices import columns

KINDS = (
    *("shards", "compute shards", "gradients", "optimizer state", "full buffers"),
    *("reduction buffers", "activations", "module buffers", "whole parameters"),
    *("optimizer temporaries", "other"),
)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that a rank holds. `print` shows it as a table."""

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
    rank: int
    """The rank for which the figures are; none holds more shards."""

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
                f"bytes of rank {self.rank} of {self.world_size} on {self.device.type}, in shard "
                f"groups of {self.zero3_size}",
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
            here.

    Raises:
        ValueError, TypeError, RuntimeError: as `ZeRO3`; or `batch` or `optimizer` is none of these;
            or, in torch's words, the forward depends on values.
        NotImplementedError: the memory of an argument or a module cannot be planned.
    """
    checked = _batch(batch)
    prepared = prepare(module, world_size, arguments)
    rank = planned_rank(prepared)
    planned = PlannedRank(prepared, rank, optimizer)
    planned.run(checked)
    resting, peak = planned.resting, planned.peak
    return MemoryPlan(
        resting_bytes=sum(resting.values()),
        peak_bytes=sum(peak.values()),
        by_kind={kind: (resting.get(kind, 0), peak.get(kind, 0)) for kind in KINDS},
        peak_unit=planned.moment[0],
        peak_moment=planned.moment[1],
        padding_bytes=planned.padding(),
        world_size=world_size,
        zero3_size=prepared.arguments.zero3_size or world_size,
        device=prepared.device,
        rank=rank,
    )


def _batch(batch: Any) -> Batch:
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    is_pair = isinstance(batch, tuple) and len(batch) == 2
    if is_pair and isinstance(batch[0], tuple) and isinstance(batch[1], Mapping):
        return batch[0], dict(batch[1])
    raise TypeError(
        f"batch: expected (args, kwargs), a tensor or a dict, got {type(batch).__name__}"
    )
