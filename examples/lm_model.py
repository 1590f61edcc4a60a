"""A decoder-only transformer over bytes: RMSNorm, rotary attention, SwiGLU, tied embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BYTES = 256
ROTARY_BASE = 10_000.0


def head_dim_of(width: int) -> int:
    """The largest of the usual head sizes that divides `width`."""
    return next(size for size in (64, 32, 16, 8) if width % size == 0)


def rotary_tables(seq: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [seq, head_dim / 2], of the rotation of each pair at a position."""
    frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.outer(torch.arange(seq).float(), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of `x` [batch, heads, seq, head_dim] by position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim = head_dim_of(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, width = x.shape
        heads = self.qkv(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        # Normalised queries and keys bound the scores, which avoids spikes in the gradients.
        q = rotate(F.rms_norm(q, (self.head_dim,)), cos, sin)
        k = rotate(F.rms_norm(k, (self.head_dim,)), cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, seq, width))


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        # Two thirds of the classic 4 * width, because there are three matrices instead of two.
        hidden = -(-8 * width // (3 * 64)) * 64
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer; the unit that every engine shards by."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = SwiGLU(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class ByteTransformer(nn.Module):
    """Logits [batch, seq, 256] of the next byte from bytes [batch, seq], for seq <= `max_seq`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, num_layers: int, width: int, max_seq: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BYTES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.head.weight = self.embed.weight
        cos, sin = rotary_tables(max_seq, head_dim_of(width))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights(num_layers)

    def _init_weights(self, num_layers: int) -> None:
        # The last matrix of each branch starts smaller, so that the sum of 2 * num_layers branches
        # keeps the scale of its input.
        branch_std = 0.02 / (2 * num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if "norm" in name:
                continue
            is_branch_end = name.endswith(("attention.out.weight", "mlp.down.weight"))
            nn.init.normal_(parameter, std=branch_std if is_branch_end else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        cos, sin = self.cos[:seq], self.sin[:seq]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits
