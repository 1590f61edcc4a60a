"""The engines that are compared, each with its defaults, and the transformer they train."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

UnitType = type[nn.Module]


def bare(model: nn.Module, unit: UnitType) -> nn.Module:
    """No engine: each rank trains alone."""
    return model


def layerzero(model: nn.Module, unit: UnitType) -> nn.Module:
    from layerzero import ZeRO3

    return ZeRO3(model, auto_wrap_policy={unit})


def fully_shard(model: nn.Module, unit: UnitType) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as shard

    # The mesh's device type decides where parameters go; the default would be an accelerator.
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in model.modules():
        if isinstance(module, unit):
            shard(module, mesh=mesh)
    shard(model, mesh=mesh)  # in place
    return model


def fsdp1(model: nn.Module, unit: UnitType) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({unit}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def ddp(model: nn.Module, unit: UnitType) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


ENGINES: dict[str, Callable[[nn.Module, UnitType], nn.Module]] = {
    "bare": bare,
    "layerzero": layerzero,
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
