"""Wraps the same model by one of three engines; training differs only in these lines."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from lm_model import Block, ByteTransformer
from torch import Tensor, nn


class Wrapped(NamedTuple):
    model: nn.Module
    clip_grad_norm: Callable[[float], Tensor]
    """Clips gradients to a norm over all parameters of all ranks; returns the norm before."""
    layout: str
    """How the model lies on the ranks, for the user."""


def wrap(engine: str, model: ByteTransformer, device: torch.device) -> Wrapped:
    """Shard (or replicate) `model` over the default group. Collective.

    The model must have equal values on all ranks.
    """
    return {"layerzero": wrap_layerzero, "fully_shard": wrap_fully_shard, "ddp": wrap_ddp}[engine](
        model, device
    )


def wrap_layerzero(model: ByteTransformer, device: torch.device) -> Wrapped:
    from layerzero import ZeRO3

    sharded = ZeRO3(model, auto_wrap_policy={Block}, device=device)
    return Wrapped(sharded, sharded.clip_grad_norm_, sharded_by_layer(model))


def wrap_fully_shard(model: ByteTransformer, device: torch.device) -> Wrapped:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model.to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    clip = clip_of(model)
    # The norm is a DTensor, whose local value is not the norm.
    return Wrapped(model, lambda norm: clip(norm).full_tensor(), sharded_by_layer(model))


def wrap_ddp(model: ByteTransformer, device: torch.device) -> Wrapped:
    from torch.nn.parallel import DistributedDataParallel

    replicated = DistributedDataParallel(model.to(device))
    return Wrapped(replicated, clip_of(replicated), "a whole copy on each rank")


def sharded_by_layer(model: ByteTransformer) -> str:
    return f"{len(model.blocks) + 1} units (each layer, and the rest), sharded over the ranks"


def clip_of(model: nn.Module) -> Callable[[float], Tensor]:
    return lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm)
