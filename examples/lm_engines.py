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
    return Wrapped(sharded, sharded.clip_grad_norm_)


def wrap_fully_shard(model: ByteTransformer, device: torch.device) -> Wrapped:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model.to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Wrapped(model, clip_of(model))


def wrap_ddp(model: ByteTransformer, device: torch.device) -> Wrapped:
    from torch.nn.parallel import DistributedDataParallel

    replicated = DistributedDataParallel(model.to(device))
    return Wrapped(replicated, clip_of(replicated))


def clip_of(model: nn.Module) -> Callable[[float], Tensor]:
    return lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm)
