"""What a unit returns reaches the caller as it is, and gradients find their way back through it."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerzero import MixedPrecision
from tests.harness.checks import assert_bitwise, named
from tests.harness.compare import assert_trains_alike, trained_alike, zero3
from tests.harness.models import (
    CASES,
    OUTPUT_KINDS,
    WIDTH,
    Block,
    Mlp,
    Parts,
    StructuredBlock,
    StructuredOutputs,
    tensors_of,
)
from tests.harness.ranks import on_ranks
from tests.harness.reference import backward_of, batches_of, mlp_batches, seeded


def _structure(value: Any) -> Any:
    """What is left of a structure when each tensor is replaced by its properties."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.requires_grad)
    if isinstance(value, dict):
        return (type(value), [(key, _structure(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [_structure(item) for item in value])
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return (type(value), [(name, _structure(getattr(value, name))) for name in names])
    return value


@on_ranks(2)
def test_outputs_keep_their_structure_types_and_other_values() -> None:
    """Values are compared where these models train, in test_grads.py."""
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    precision = MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    for kind in OUTPUT_KINDS:
        build = partial(StructuredOutputs, kind)
        model, plain = zero3(build, StructuredBlock), seeded(build)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                own, expected = model(batch), plain(batch)
            assert _structure(own) == _structure(expected), f"{kind}, grad {grad}"
        model = zero3(build, StructuredBlock, mixed_precision=precision)
        output = model(batch)
        assert type(output) is type(expected)
        assert {unsharded.dtype for unsharded in tensors_of(output)} == {torch.float64}, kind
        torch.stack([unsharded.sum() for unsharded in tensors_of(output)]).sum().backward()


_ALLOWED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "changed in place": lambda hidden, x: hidden.mul_(2).add_(x),
    "relu in place": lambda hidden, x: torch.relu_(hidden),
    "a view changed in place": lambda hidden, x: (hidden[:, 1:].mul_(0.5), None),
    "sliced": lambda hidden, x: torch.cat([hidden[:2], hidden[2:] * 2]),
    "detached": lambda hidden, x: hidden.detach() + x,
    "half detached": lambda hidden, x: torch.cat([hidden[:2].detach(), hidden[2:]]),
    "used twice": lambda hidden, x: hidden + torch.tanh(hidden),
    "retained": lambda hidden, x: hidden.retain_grad(),
    "hooked": lambda hidden, x: hidden.register_hook(lambda gradient: gradient * 3),
}


def _watched(kind: str) -> nn.Module:
    """Outputs that autograd may treat in a special way; `kind` picks one."""

    def run(own: Any, x: Tensor) -> Tensor:
        hidden = own.first(x)
        changed = _ALLOWED[kind](hidden, x)
        return own.second(changed if isinstance(changed, Tensor) else hidden)

    return Parts(run, first=Block(), second=Block())


@on_ranks(2)
def test_the_caller_may_do_with_an_output_what_autograd_allows() -> None:
    for kind in _ALLOWED:
        with named(kind):
            trained_alike(partial(_watched, kind), Block)


_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "part": lambda y: torch.cat([y, y], 1)[:, :WIDTH],
    "transpose": lambda y: (y.t() * 1.0).t(),
    "base": lambda y: y * 1.0,
}


class _Views(nn.Module):
    """A unit returns a view, and its caller writes into a part of that."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        for block in (self.first, self.second):
            block.register_forward_hook(lambda m, args, output: _VIEWS[kind](output))

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.first(x), self.second(x)
        y[:, :3] += z[:, :3]
        return y


@on_ranks(2)
def test_the_caller_may_write_into_a_view_that_a_unit_returned() -> None:
    for kind in _VIEWS:
        trained_alike(partial(_Views, kind), Block)


class _TwoInputs(nn.Module):
    """Its inner layer is created after the unit that handed `other` on, and runs back later."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)) + other)


class _Hands(nn.Module):
    """Returns something beside its result that it did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer.bias if other is None else other


class _HandsLeaves(nn.Module):
    """A leaf that requires grad leaves a unit: the root's parameter, one that is not sharded, one
    made of a frozen result (as `enable_input_require_grads` does), the unit's own, or the batch."""

    def __init__(self, leaf: str) -> None:
        super().__init__()
        self.leaf = leaf
        self.latent = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.apart = nn.Linear(WIDTH, 1).requires_grad_(False)
        self.first, self.second = _Hands(), _TwoInputs()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.leaf == "frozen":
            self.first.requires_grad_(False)
            x, _ = self.first(x, x)
            return self.second(x.requires_grad_(True), x.detach())
        others = {
            "latent": self.latent,
            "ignored": self.apart.weight[0].detach().requires_grad_(True),
            "own": None,
            "batch": x.detach().requires_grad_(True),
        }
        h, other = self.first(x, others[self.leaf])
        self.seen.append(other)
        return self.second(h, other)


@on_ranks(2)
def test_a_unit_may_return_a_leaf() -> None:
    batches = mlp_batches()
    for leaf in ("latent", "ignored", "frozen", "own", "batch"):
        for options in ({}, {"reshard_after_forward": False}):
            build = partial(_HandsLeaves, leaf)
            model, plain = zero3(build, _Hands, _TwoInputs, **options), seeded(build)
            assert_trains_alike(model, plain, batches)
            assert not any(each._backward_hooks for each in model.seen), leaf
            with torch.no_grad():
                assert_bitwise(model(batches[0][0]), plain(batches[0][0]), f"{leaf}: evaluation")


@on_ranks(2)
def test_module_hooks_of_the_user_run_once_a_call_and_see_full_parameters() -> None:
    model = zero3(Mlp, Block)
    calls: list[tuple[str, tuple[int, ...]]] = []

    def note(what: str, module: nn.Module) -> None:
        calls.append((what, tuple(module.up.weight.shape)))

    block = model.blocks[1]
    block.register_forward_pre_hook(lambda module, args: note("pre forward", module))
    block.register_forward_hook(lambda module, args, output: note("forward", module))
    block.register_full_backward_hook(lambda *_: calls.append(("backward", ())))
    model.register_forward_hook(lambda *_: calls.append(("root forward", ())))
    assert_trains_alike(model, seeded(Mlp))
    full = (7, WIDTH)
    expected = [("pre forward", full), ("forward", full), ("root forward", ()), ("backward", ())]
    assert calls == 2 * expected


class Streaming(nn.Module):
    """Yields, with a state that goes from step to step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.block = Block()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor) -> Any:
        if self.kind == "map":
            return map(lambda part: self.block(part) * self.scale, [x, 2 * x])
        stream = self._stream(x)
        return itertools.islice(stream, 2) if self.kind == "islice" else stream

    def _stream(self, x: Tensor) -> Any:
        for _ in range(3):
            x = self.block(x) * self.scale
            yield x
        return x


def _consume(own: nn.Module, x: Tensor) -> Tensor:
    return sum((own.between(part) for part in own.stream(x)), torch.zeros(()))


@on_ranks(2)
def test_generators_are_outputs() -> None:
    for kind in ("map", "islice", "generator"):
        for units in ((Streaming, Block), (Streaming,), (Block,), ()):
            build = partial(
                lambda kind: Parts(_consume, stream=Streaming(kind), between=Block()), kind
            )
            trained_alike(build, *units)

    run = backward_of(lambda model, batch: sum(part.square().mean() for part in model(batch)))
    trained_alike(partial(Streaming, "generator"), Block, run=run)


class Lent(nn.Linear):
    """A unit whose weight two ranks share."""


def borrowing(as_classes: bool = False) -> nn.Module:
    """Uses the weight of a child without calling it: too few of its rows are there."""

    def run(own: Any, x: Tensor) -> Tensor:
        logits = nn.functional.linear(own.block(x), own.lent.weight)
        last = torch.full((len(x),), own.lent.out_features - 1)
        return nn.functional.cross_entropy(logits, last) if as_classes else logits

    return Parts(run, block=Block(), lent=Lent(WIDTH, 64))


@on_ranks(2)
def test_an_error_about_shapes_says_which_parameters_are_full_and_what_to_do() -> None:
    classes = zero3(partial(borrowing, True), Block, Lent, layout="rows")
    for model, error in ((zero3(borrowing, Block, Lent), RuntimeError), (classes, IndexError)):
        with pytest.raises(
            error,
            match=r"(?s)root unit: only this unit's own parameters are full here.*call the module "
            "that",
        ) as raised:
            model(torch.randn(2, WIDTH))
        assert str(raised.value).count("those of other units are shards") == 1
    together = zero3(borrowing)
    x = torch.randn(2, WIDTH)
    assert_bitwise(together(x), seeded(borrowing)(x), "in one unit")
    with pytest.raises(RuntimeError) as raised:
        together(torch.randn(2, WIDTH + 1))
    assert "shard" not in str(raised.value)
