"""Keeps buffers equal between replicas where a plan shards nothing, as DDP does.

Buffers that hold statistics of batches differ between ranks. `DistributedDataParallel` broadcasts
the first rank's buffers before the first forward, and before each forward that follows one whose
gradients are synchronised; so does this.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from layerzero.comm.collectives import broadcast_from_first
from layerzero.flat.groups import ShardGroup
from layerzero.flat.tensor_parallel import local_of
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState, root_of
from layerzero.step.unit import get_unit
from layerzero.zero3 import ZeRO3


def keep_buffers_equal(model: ZeRO3, ignored_modules: Iterable[nn.Module]) -> None:
    """Install hooks that broadcast the first rank's buffers before calls of `model`.

    Not collective itself; the hooks are. A model without buffers gets none.
    """
    ignored = {id(inside) for top in ignored_modules for inside in top.modules()}
    places = [
        (module, name)
        for module in model.module.modules()
        if id(module) not in ignored
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    if places:
        sync = _BufferSync(places)
        model.register_forward_pre_hook(sync.before_forward)
        model.register_forward_hook(sync.after_forward)


class _BufferSync:
    """Hooks of the wrapper: they run around the model's forward, not around its submodules'."""

    def __init__(self, places: list[tuple[nn.Module, str]]) -> None:
        self._places = places
        self._is_due = True

    def before_forward(self, model: nn.Module, args: object) -> None:
        if self._is_due:
            buffers = [module._buffers.get(name) for module, name in self._places]
            _take_first(_root_of(model), [local_of(each) for each in buffers if each is not None])

    def after_forward(self, model: nn.Module, args: object, outputs: Any) -> None:
        requires_sync = _root_of(model).reducer.requires_sync
        self._is_due = torch.is_grad_enabled() and requires_sync


def _root_of(model: nn.Module) -> RootState:
    unit = get_unit(model)
    assert unit is not None, "it is wrapped"
    return root_of(unit)


@remembers_failure
@torch.no_grad()
def _take_first(root: RootState, buffers: list[torch.Tensor]) -> None:
    """Broadcast the first rank's values: one message for each dtype along each axis.

    Collective over the model's ranks; blocks the host.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in buffers:
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for dtype, alike in by_dtype.items():
        flat = torch.cat([buffer.reshape(-1).to(root.device) for buffer in alike])
        name = f"buffers in {dtype}".replace("torch.", "")
        broadcast_from_first(
            flat, _groups_of(root), partial(root.operations.next, "synchronisation", name)
        )
        parts = flat.split([buffer.numel() for buffer in alike])
        for buffer, value in zip(alike, parts, strict=True):
            buffer.copy_(value.view(buffer.shape))


def _groups_of(root: RootState) -> tuple[ShardGroup, ...]:
    groups = (handle.placement.groups for unit in root.units for handle in unit.handles)
    return next(groups, ())
