"""Toy models shared by the tests: each has one property that an engine can get wrong.

A model takes one argument, the batch, and `loss_of` makes a scalar of whatever it returns. Sizes
are odd on purpose, so that no parameter divides by the number of ranks. `CASES` lists them all with
what a sweep needs to know.
"""

import dataclasses
import functools
import math
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engines import TransformerBlock

WIDTH = 5


def loss_of(output: Any) -> Tensor:
    """The sum over all tensors in `output` that require grad of their mean square, in float32 at
    least."""
    losses = [
        (each.to(torch.promote_types(each.dtype, torch.float32)) ** 2).mean()
        for each in tensors_of(output)
        if each.requires_grad
    ]
    return torch.stack(losses).sum()


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inside: Any = value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif dataclasses.is_dataclass(value):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [tensor for item in inside for tensor in tensors_of(item)]


class Block(nn.Module):
    """Residual MLP: four parameters."""

    def __init__(self, width: int = WIDTH, hidden: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Mlp(nn.Module):
    """Blocks between two layers that stay with the root."""

    def __init__(self, depth: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Parts(nn.Module):
    """Modules, parameters and others by name. Its forward is `run(self, ...)`; without one, the
    modules run in order."""

    def __init__(self, run: Callable[..., Any] | None = None, **parts: Any) -> None:
        super().__init__()
        self._run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is not None:
            return self._run(self, *args, **kwargs)
        return functools.reduce(lambda x, part: part(x), self._modules.values(), *args)


class Transformer(nn.Module):
    """Decoder over `vocab` symbols; takes [batch, length + 1] integers, returns the loss."""

    def __init__(
        self,
        vocab: int = 31,
        width: int = 24,
        heads: int = 2,
        layers: int = 3,
        hidden: int = 40,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(TransformerBlock(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=1 / math.sqrt(width))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


class TiedBlock(Parts):
    """Two layers of one block share their weight."""

    def __init__(self) -> None:
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        second.weight = first.weight
        super().__init__(first=first, act=nn.Tanh(), second=second)


class Stack(nn.Module):
    """Blocks, and nothing else."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class TiedInUnit(Stack):
    def __init__(self) -> None:
        super().__init__(TiedBlock(), TiedBlock())


class TiedAcrossUnits(Stack):
    """The first and the last block share a weight: it belongs to the unit above both."""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), Block())
        self.blocks[2].up.weight = self.blocks[0].up.weight


def shared_module() -> nn.Module:
    """One module under two names, used under both."""
    one = Block()
    return Parts(one=one, middle=Block(), other=one)


def repeated_module() -> nn.Module:
    """One block called several times in a forward, with another one between."""

    def run(own: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = own.between(own.block(x))
        return own.block(x)

    return Parts(run, block=Block(), between=Block())


class Routed(nn.Module):
    """Blocks that a forward calls in the order of a route, such as "0 1 0"; the result of "-1" is
    lost."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor, route: str) -> Tensor:
        for name in route.split():
            y = self.blocks[int(name.strip("-"))](x)
            x = x if name.startswith("-") else y
        return x


class Adapter(nn.Module):
    """A frozen layer with a small trainable correction beside it, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.low = nn.Linear(WIDTH, 2, bias=False)
        self.high = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.high(self.low(x)))


def frozen_parts() -> nn.Module:
    """A frozen unit at the start, one amid trainable ones, and units that are half frozen."""
    return Parts(
        encoder=Block().requires_grad_(False),
        adapters=nn.Sequential(Adapter(), Adapter()),
        middle=Block().requires_grad_(False),
        head=Block(),
    )


class MixedDtypeBlock(nn.Module):
    """float32, float64 and bfloat16 parameters in one unit, the last ones frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.in32 = nn.Linear(WIDTH, WIDTH)
        self.in64 = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.in16 = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.in32(x))
        x = torch.tanh(self.in64(x.double())).float()
        return self.in16(x.bfloat16()).float()


class MixedDtypes(Stack):
    def __init__(self) -> None:
        super().__init__(MixedDtypeBlock(), MixedDtypeBlock())


class OddShapesBlock(nn.Module):
    """A scalar, an empty, a transposed, a strided and a single-element parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.transposed = nn.Parameter(torch.randn(7, WIDTH).t() / 3)
        self.strided = nn.Parameter(torch.randn(7, 2 * WIDTH)[:, ::2] / 3)
        self.single = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.transposed * self.scale)
        return hidden @ self.strided + self.single + self.empty.sum()


class OddShapes(Stack):
    def __init__(self) -> None:
        super().__init__(OddShapesBlock(), OddShapesBlock())
        self.shift = nn.Parameter(torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


def unused_parts() -> nn.Module:
    """A block that never runs, a layer that never runs in a block that does, a lost output."""

    def run(own: Any, x: Tensor) -> Tensor:
        x = own.half_used(own.first(x))
        own.lost(x)
        return own.last(x)

    parts = {each: Block() for each in ("first", "unused", "half_used", "lost", "last")}
    parts["half_used"].never = nn.Linear(WIDTH, WIDTH)
    return Parts(run, **parts)


class Branches(nn.Module):
    """The batch says which of its blocks run, in which order: (x, [index, ...])."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, batch: tuple[Tensor, list[int]]) -> Tensor:
        x, path = batch
        x = self.stem(x)
        for index in path:
            x = self.blocks[index](x)
        return x


def no_parameters() -> nn.Module:
    """Units without a parameter of their own, and a buffer."""
    return Parts(
        lambda own, x: own.activation(own.block(x)) + own.offset,
        block=Block(),
        activation=nn.Sequential(nn.Tanh(), nn.Dropout(0.0)),
        offset=nn.Buffer(torch.full((WIDTH,), 0.5)),
    )


Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(slots=True)  # Without a `__dict__`.
class Record:
    hidden: Tensor
    logits: list[Tensor]
    note: str = "not a tensor"
    count: int = 3
    nothing: None = None


OUTPUT_KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda a, b: a + b,
    "tuple": lambda a, b: (a, b, None),
    "list": lambda a, b: [a, [b]],
    "dict": lambda a, b: {"a": a, "nested": {"b": b}, "text": "not a tensor"},
    "namedtuple": lambda a, b: Pair(a, b),
    "dataclass": lambda a, b: Record(a, [b]),
    "detached": lambda a, b: (a.detach(), b),
    "same_twice": lambda a, b: (a, a, b),
    "view": lambda a, b: (a.view(-1), b[:1]),
}


class StructuredBlock(nn.Module):
    """Returns two results in one of the structures of `OUTPUT_KINDS`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return OUTPUT_KINDS[self.kind](torch.tanh(self.left(x)), torch.tanh(self.right(x)))


class StructuredOutputs(nn.Module):
    """The same structure leaves an inner unit and the root."""

    def __init__(self, kind: str = "dict") -> None:
        super().__init__()
        self.kind = kind
        self.inner = StructuredBlock(kind)
        self.outer = StructuredBlock(kind)

    def forward(self, x: Tensor) -> Any:
        inner = [unsharded.reshape(-1, WIDTH) for unsharded in tensors_of(self.inner(x))]
        return self.outer(torch.cat(inner))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model for sweeps: how to make it, which modules to wrap, one rank's batch."""

    name: str
    build: Callable[[], nn.Module]
    units: tuple[type[nn.Module], ...]
    batch: Callable[[torch.Generator], Any]


def _structured(kind: str) -> Case:
    return Case(f"{kind}_output", lambda: StructuredOutputs(kind), (StructuredBlock,), rows)


def rows(generator: torch.Generator) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator)


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(31, (2, 9), generator=generator)


def path_and_rows(generator: torch.Generator) -> tuple[Tensor, list[int]]:
    return rows(generator), [2, 0, 1]


_CASES = (
    Case("mlp", Mlp, (Block,), rows),
    Case("mlp_one_unit", Mlp, (), rows),
    Case("transformer", Transformer, (TransformerBlock,), tokens),
    Case("transformer_untied", lambda: Transformer(tied=False), (TransformerBlock,), tokens),
    Case("tied_in_unit", TiedInUnit, (TiedBlock,), rows),
    Case("tied_across_units", TiedAcrossUnits, (Block,), rows),
    Case("shared_module", shared_module, (Block,), rows),
    Case("repeated_module", repeated_module, (Block,), rows),
    Case("frozen_parts", frozen_parts, (Block, Adapter), rows),
    Case("mixed_dtypes", MixedDtypes, (MixedDtypeBlock,), rows),
    Case("odd_shapes", OddShapes, (OddShapesBlock,), rows),
    Case("unused_parts", unused_parts, (Block,), rows),
    Case("branches", Branches, (Block,), path_and_rows),
    Case("no_parameters", no_parameters, (Block, nn.Sequential), rows),
    *(_structured(kind) for kind in OUTPUT_KINDS),
)
CASES = {case.name: case for case in _CASES}
