"""CommHooks: a user's code that takes the place of a reduce-scatter, or runs after a reduction.

One door for what torch calls `register_comm_hook` (FSDP1), `set_custom_reduce_scatter` and
`set_all_reduce_hook` (`fully_shard`). The code receives the gradients of one flat parameter as one
1-D tensor in this engine's order, gaps and padding (zeros) included. So code that treats all
elements alike is portable: casts, compression, collectives, scaling.

It runs on the thread of backward, on the reduce stream. Its collectives have no names: if a rank
fails in one, the others wait for the timeout of its group. It does not run for units that one rank
has alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from layerzero.flat.placement import ShardGroup
from layerzero.step.extension import Extension, Transport
from layerzero.step.handle import FlatParamHandle
from layerzero.step.root import RootState
from layerzero.step.unit import Unit

Reduce = Callable[[FlatParamHandle, ShardGroup, float], torch.Tensor]
"""See `Extension.reduce`."""


class CommHooks(Extension):
    """Calls the hooks of some units."""

    def reduce(
        self, unit: Unit, handle: FlatParamHandle, group: ShardGroup, scale: float
    ) -> torch.Tensor | None:
        function: Reduce | None = unit.comm_hooks.get("instead")
        return None if function is None else function(handle, group, scale)

    def reduced(self, unit: Unit, chunk: torch.Tensor) -> None:
        if "after" in unit.comm_hooks:
            unit.comm_hooks["after"](chunk)


def set_hooks(root: RootState) -> None:
    """Let the model call the `comm_hooks` of its units. Between steps; the same on every rank.

    Raises:
        NotImplementedError: a unit is of one rank alone, `deterministic`, or of a verified model.
    """
    hooked = [unit for unit in root.units if unit.comm_hooks]
    for unit in hooked:
        _check(unit)
    for extension in root.extensions.of(CommHooks):
        root.extensions.remove(extension)
    if hooked:
        root.extensions.add(CommHooks())


def _check(unit: Unit) -> None:
    if unit.options.deterministic or type(unit.context.extensions.transport) is not Transport:
        raise NotImplementedError(
            f"{unit.label}: a communication hook replaces the sums that deterministic=True fixes "
            "and verify= checks; leave out one of them"
        )


def register(root: RootState, state: object, hook: Callable[..., object]) -> None:
    """Implements `ZeRO3.register_comm_hook`."""
    if not callable(hook):
        raise ValueError(f"register_comm_hook: expected a callable, got {hook!r}")
    if root.extensions.of(CommHooks):
        raise RuntimeError("register_comm_hook: this model has a communication hook already")
    handles = [handle for unit in root.units for handle in unit.handles]
    if any(len(handle.placement.reduce_groups) > 1 for handle in handles):
        raise NotImplementedError(
            "register_comm_hook: gradients of this model are reduced in two hops (zero3_size, a "
            "mesh of two axes, experts), and FSDP1's hooks do one; use one shard group, or "
            'zero3_size=1 with outer="replicate"'
        )
    reduce = _by_hook(state, hook)
    for unit in root.units:
        _check(unit)
        unit.comm_hooks = {"instead": reduce}
    set_hooks(root)


def _by_hook(state: object, hook: Callable[..., object]) -> Reduce:
    """Calls a hook of FSDP1, which also divides."""

    def reduce(handle: FlatParamHandle, group: ShardGroup, scale: float) -> torch.Tensor:
        # An alias: hooks that compress assign to its `.data`.
        sent = handle.gradients.buffer.detach()
        if handle.placement.owned_slices > 1:  # NO_SHARD: an all-reduce, in place.
            hook(state, sent)
            return sent.clone()
        chunk = sent.new_empty(sent.numel() // group.size)
        hook(state, sent, chunk)
        return chunk

    return reduce


def by_reduce_scatter(comm: Any) -> Reduce:
    """Calls an object with the methods of torch's `ReduceScatter`."""

    def reduce(handle: FlatParamHandle, group: ShardGroup, scale: float) -> torch.Tensor:
        buffer = handle.gradients.buffer
        kind = {"dtype": buffer.dtype, "device": buffer.device}
        sent: torch.Tensor = comm.allocate((buffer.numel(),), **kind)
        chunk: torch.Tensor = comm.allocate((buffer.numel() // group.size,), **kind)
        sent.copy_(buffer)
        op: Any = dist.ReduceOp.SUM
        if buffer.dtype == torch.float16:
            sent.mul_(scale)  # An unscaled sum may exceed the largest float16, 65504.
            scale = 1.0
        elif scale == 1.0 / group.size:
            op, scale = dist.ReduceOp.AVG, 1.0
        work = comm(output_tensor=chunk, input_tensor=sent, group=group.process_group, op=op)
        if work is not None:
            work.wait()
        return chunk if scale == 1.0 else chunk.mul_(scale)

    return reduce
