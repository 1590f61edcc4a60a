"""Models whose memory is planned and measured: each spends it on something else."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness.models import Block

Batch = tuple[tuple[Any, ...], dict[str, Any]]


class Tower(nn.Module):
    """Blocks between a stem and a head that stay with the root."""

    def __init__(
        self, width: int = 96, hidden: int = 192, depth: int = 4, recompute: bool = False
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, 7, bias=False)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


class Attention(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Language model that returns its loss; optionally with tied embeddings."""

    def __init__(self, width: int = 64, depth: int = 3, words: int = 301, tied: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Adapted(nn.Module):
    """Frozen blocks with small trainable matrices beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower().requires_grad_(False)
        self.small = nn.ModuleList(Block(96, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tower.stem(x)
        for block, small in zip(self.tower.blocks, self.small, strict=True):
            x = block(x) + small(x)
        return self.tower.head(x)


class Repeated(nn.Module):
    """One block, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(96, 192), nn.Linear(96, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.block(self.block(x))))


class Structured(nn.Module):
    """Two inputs by keyword, several outputs, an unused parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(96, 192), Block(96, 64)
        self.unused = Block(96, 96)
        self.register_buffer("scale", torch.ones(96, 96))

    def forward(self, *, left: Tensor, right: Tensor) -> dict[str, Any]:
        return {"left": self.left(left), "both": [self.right(right) @ self.scale], "name": "x"}


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    units: set[type[nn.Module]] | None
    batch: Callable[[], Batch]
    float32_only: bool = False


def _rows(rows: int, width: int = 96) -> Callable[[], Batch]:
    return lambda: ((torch.randn(rows, width),), {})


def _tokens(rows: int, length: int, words: int = 301) -> Callable[[], Batch]:
    return lambda: ((torch.randint(0, words, (rows, length)),), {})


CASES: dict[str, Case] = {
    "tower": Case(Tower, {Block}, _rows(8)),
    "many tokens": Case(Tower, {Block}, _rows(512)),
    "odd": Case(lambda: Tower(61, 97, 3), {Block}, _rows(5, 61)),
    "root alone": Case(Tower, None, _rows(8)),
    "nested units": Case(Tower, {Block, nn.Linear}, _rows(8)),
    "recomputed": Case(lambda: Tower(recompute=True), {Block}, _rows(512)),
    "gpt": Case(Gpt, {Attention}, _tokens(2, 33)),
    "long gpt": Case(Gpt, {Attention}, _tokens(4, 128)),
    "tied gpt": Case(lambda: Gpt(tied=True), {Attention}, _tokens(2, 33)),
    "adapted": Case(Adapted, {Block}, _rows(16)),
    "repeated": Case(Repeated, {Block}, _rows(64)),
    "structured": Case(
        Structured,
        {Block},
        lambda: ((), {"left": torch.randn(32, 96), "right": torch.randn(3, 96)}),
        True,
    ),
}
