"""The engines that are compared, each with its defaults, and the models they train.

With `low`, forward and backward compute in bfloat16, from float32 weights, and gradients are
reduced in float32; engines without mixed precision of their own run under autocast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

UnitType = type[nn.Module]
LEARNING_RATE = 3e-4


def bare(model: nn.Module, unit: UnitType, low: bool = False) -> nn.Module:
    """No engine: each rank trains alone."""
    return _under_autocast(model) if low else model


def layerzero(model: nn.Module, unit: UnitType, low: bool = False, **options: Any) -> nn.Module:
    from layerzero import MixedPrecision, ZeRO3

    precision = MixedPrecision(**LOW) if low else None
    return ZeRO3(model, auto_wrap_policy={unit}, mixed_precision=precision, **options)


def fully_shard(model: nn.Module, unit: UnitType, low: bool = False, mesh: Any = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as shard

    # The mesh's device type decides where parameters go; the default would be an accelerator.
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(**LOW if low else {})
    for module in model.modules():
        if isinstance(module, unit):
            shard(module, mesh=mesh, mp_policy=precision)
    shard(model, mesh=mesh, mp_policy=precision)  # in place
    return model


def fsdp1(model: nn.Module, unit: UnitType, low: bool = False, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({unit}),
        mixed_precision=MixedPrecision(**LOW) if low else None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        **options,
    )


def ddp(model: nn.Module, unit: UnitType, low: bool = False) -> nn.Module:
    return nn.parallel.DistributedDataParallel(_under_autocast(model) if low else model)


LOW: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def _under_autocast(model: nn.Module) -> nn.Module:
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return model


ENGINES: dict[str, Callable[..., nn.Module]] = {
    "bare": bare,
    "layerzero": layerzero,
    "rows": functools.partial(layerzero, layout="rows"),
    "fully_shard": fully_shard,
    "fsdp1": fsdp1,
    "ddp": ddp,
}


class TransformerBlock(nn.Module):
    """RMSNorm, causal attention, SwiGLU: about 12 width^2 parameters by default."""

    def __init__(self, width: int, heads: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 8 * width // 3
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Transformer(nn.Module):
    """Byte-level decoder, embeddings tied; takes [batch, length + 1] bytes, returns the loss."""

    def __init__(
        self, width: int, layers: int, heads: int, max_length: int, hidden: int | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=1 / math.sqrt(width))
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = torch.arange(inputs.shape[1], device=tokens.device)
        x = self.embed(inputs) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_transformer(size: tuple[int, int], length: int) -> Transformer:
    """The same on every rank, and under every engine. `size`: width and layers."""
    torch.manual_seed(0)
    width, layers = size
    return Transformer(width, layers, 8, length)


def random_batches(batch: int, length: int) -> Callable[[], Tensor]:
    """A function that returns this rank's next batch; it is the same under every engine."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return lambda: torch.randint(256, (batch, length + 1), generator=generator)


def training(
    model: nn.Module, next_batch: Callable[[], Tensor], lr: float = LEARNING_RATE
) -> Callable[[], Tensor]:
    """A function that takes one training step, AdamW included, and returns its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step() -> Tensor:
        loss: Tensor = model(next_batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
