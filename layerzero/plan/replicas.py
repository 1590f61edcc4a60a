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
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from layerzero.comm.exchanges import broadcast_from_first
from layerzero.flat.tensor_parallel import local_of
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState, root_of
from layerzero.step.unit import get_unit
from layerzero.zero3 import ZeRO3


def keep_buffers_equal(model: ZeRO3, ignored_modules: Iterable[nn.Module]) -> None:
    """Install hooks that broadcast the first rank's buffers before calls of `model`.

    Not collective itself; the hooks are. A model without buffers gets none. They are hooks of the
    wrapper, which run around the model's forward, not around its submodules'.
    """
    ignored = {id(inside) for top in ignored_modules for inside in top.modules()}
    places = [
        (module, name)
        for module in model.module.modules()
        if id(module) not in ignored
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    is_due = True

    def before_forward(wrapper: nn.Module, args: object) -> None:
        if is_due:
            buffers = (module._buffers.get(name) for module, name in places)
            broadcast_buffers(_root_of(wrapper), buffers)

    def after_forward(wrapper: nn.Module, args: object, outputs: Any) -> None:
        nonlocal is_due
        is_due = torch.is_grad_enabled() and _root_of(wrapper).reducer.requires_sync

    if places:
        model.register_forward_pre_hook(before_forward)
        model.register_forward_hook(after_forward)


def _root_of(model: nn.Module) -> RootState:
    unit = get_unit(model)
    assert unit is not None, "it is wrapped"
    return root_of(unit)


@remembers_failure
@torch.no_grad()
def broadcast_buffers(root: RootState, buffers: Iterable[torch.Tensor | None]) -> None:
    """Broadcast the first rank's values: one message for each dtype along each axis.

    Collective over the model's ranks; blocks the host.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in buffers:
        if buffer is not None:
            by_dtype.setdefault(buffer.dtype, []).append(local_of(buffer))
    for dtype, alike in by_dtype.items():
        flat = _flatten_dense_tensors([buffer.to(root.device) for buffer in alike])
        name = f"buffers in {dtype}".replace("torch.", "")
        broadcast_from_first(
            flat, root.groups, partial(root.operations.next, "synchronisation", name)
        )
        torch._foreach_copy_(alike, list(_unflatten_dense_tensors(flat, alike)))
