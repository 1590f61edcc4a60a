"""What a plan adds where nothing is sharded, so that replicas are kept as by data parallelism.

Buffers are not sharded, so ranks that compute statistics of unequal batches have unequal ones.
`DistributedDataParallel` takes those of the first rank, at the first forward and at each one that
follows a forward with gradients that were synchronized; so does this.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from layerzero.comm.collectives import broadcast_from_first
from layerzero.core.groups import ShardGroup
from layerzero.core.tensor_parallel import local_of
from layerzero.runtime.operations import remembers_failure
from layerzero.runtime.root import RootState, root_of
from layerzero.runtime.unit import get_unit
from layerzero.zero3 import ZeRO3


def keep_buffers_equal(model: ZeRO3, ignored_modules: Iterable[nn.Module]) -> None:
    """From now on calls of `model` begin with the buffers of the group's first rank.

    Not collective itself. A model without buffers stays as it is.
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
    """Hooks of the wrapper: they run around the model's forward, not around those of modules."""

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
    """Copy the first rank's values to all: one message for each dtype, along each axis."""
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
