"""Models whose memory is planned and measured: each spends it on something else."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness.models import Block, Parts, Transformer, TransformerBlock

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


def _adapted() -> nn.Module:
    """Frozen blocks with small trainable matrices beside them."""

    def run(own: Any, x: Tensor) -> Tensor:
        x = own.tower.stem(x)
        for block, small in zip(own.tower.blocks, own.small, strict=True):
            x = block(x) + small(x)
        return own.tower.head(x)

    small = nn.ModuleList(Block(96, 8) for _ in range(4))
    return Parts(run, tower=Tower().requires_grad_(False), small=small)


def _repeated() -> nn.Module:
    """One block, called three times."""
    block = Block(96, 192)
    return nn.Sequential(block, block, block, nn.Linear(96, 7))


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


def _gpt(length: int, tied: bool = False) -> Case:
    """Of two sequences, on which a model returns its loss."""

    def make() -> nn.Module:
        return Transformer(199, 64, heads=4, hidden=256, tied=tied)

    return Case(make, {TransformerBlock}, lambda: ((torch.randint(0, 199, (2, length + 1)),), {}))


CASES: dict[str, Case] = {
    "tower": Case(Tower, {Block}, _rows(8)),
    "many tokens": Case(Tower, {Block}, _rows(512)),
    "odd": Case(lambda: Tower(61, 97, 3), {Block}, _rows(5, 61)),
    "root alone": Case(Tower, None, _rows(8)),
    "nested units": Case(Tower, {Block, nn.Linear}, _rows(8)),
    "recomputed": Case(lambda: Tower(recompute=True), {Block}, _rows(512)),
    "gpt": _gpt(32),
    "long gpt": _gpt(255),
    "tied gpt": _gpt(32, tied=True),
    "adapted": Case(_adapted, {Block}, _rows(16)),
    "repeated": Case(_repeated, {Block}, _rows(64)),
    "structured": Case(
        Structured,
        {Block},
        lambda: ((), {"left": torch.randn(32, 96), "right": torch.randn(3, 96)}),
        True,
    ),
}
