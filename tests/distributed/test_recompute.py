"""Activation checkpointing: recomputation inside backward gives the same bits as no checkpoint."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from layerzero import BackwardPrefetch
from tests.harness.compare import assert_trains_alike, sharded, zero3
from tests.harness.models import CASES, WIDTH, Block, Mlp, Transformer, TransformerBlock
from tests.harness.ranks import run_ranks
from tests.harness.reference import batches_of, seeded


class Checkpointed(nn.Module):
    """An MLP whose recomputed part is `where`; with "nothing" it is the reference."""

    def __init__(self, where: str, use_reentrant: bool, depth: int = 4) -> None:
        super().__init__()
        self.where = where
        self.checkpoint = functools.partial(checkpoint, use_reentrant=use_reentrant)
        self.use_reentrant = use_reentrant
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(_Block(self) for _ in range(depth)))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_PLACES[self.where](self, self.stem(x)))


class _Block(Block):
    """A block that recomputes its own inside, when its model says so."""

    def __init__(self, model: Checkpointed) -> None:
        super().__init__()
        self.noise = nn.Dropout(0.3)
        self.recompute_inside: Callable[..., Any] | None = None
        if model.where in ("inside each unit", "inside and around"):
            self.recompute_inside = model.checkpoint

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute_inside is None:
            return self.part(x)
        return self.recompute_inside(self.part, x)

    def part(self, x: Tensor) -> Tensor:
        return x + self.noise(self.down(torch.tanh(self.up(x))))


def _around_each(model: Checkpointed, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = model.checkpoint(block, x)
    return x


def _around_some(model: Checkpointed, x: Tensor) -> Tensor:
    for index, block in enumerate(model.blocks):
        x = model.checkpoint(block, x) if index % 2 else block(x)
    return x


def _around_several(model: Checkpointed, x: Tensor) -> Tensor:
    return checkpoint_sequential(model.blocks, 2, x, use_reentrant=model.use_reentrant)


def _around_all(model: Checkpointed, x: Tensor) -> Tensor:
    return model.checkpoint(model.blocks, x)


def _nested(model: Checkpointed, x: Tensor) -> Tensor:
    def half(x: Tensor) -> Tensor:
        x = model.checkpoint(model.blocks[0], x)
        return model.checkpoint(model.blocks[1], x)

    x = model.checkpoint(half, x)
    return model.blocks[2:](x)


def _same_unit_twice(model: Checkpointed, x: Tensor) -> Tensor:
    for _ in range(2):
        for block in model.blocks[:2]:
            x = model.checkpoint(block, x)
    return model.blocks[2:](x)


_PLACES: dict[str, Callable[[Checkpointed, Tensor], Tensor]] = {
    "around each unit": _around_each,
    "around every other unit": _around_some,
    "around several units": _around_several,
    "around all units": _around_all,
    "nested": _nested,
    "one unit twice": _same_unit_twice,
    "inside each unit": lambda model, x: model.blocks(x),
    "inside and around": _around_each,
}

FLAVOURS = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "hooks"])


def _train(where: str, use_reentrant: bool, options: dict) -> None:
    case = CASES["mlp"]
    # A reentrant recomputation is a backward pass of its own, and so is its reduction: two calls
    # of one unit then add up after the mean over ranks and not before.
    regrouped = where == "one unit twice" and use_reentrant
    batches = batches_of(case, dist.get_world_size(), steps=4)

    def build() -> nn.Module:
        return Checkpointed(where, use_reentrant)

    def run(model: nn.Module, batch: Tensor) -> Tensor:
        torch.manual_seed(int(1000 * batch.abs().sum()))  # dropout: the same in both models
        loss = model(batch).square().sum()
        loss.backward()
        return loss.detach()

    assert_trains_alike(
        zero3(build, _Block, **options), seeded(build), batches, run=run, regrouped=regrouped
    )


@FLAVOURS
@pytest.mark.parametrize("where", _PLACES)
def test_recomputation_changes_no_bit(where: str, use_reentrant: bool) -> None:
    run_ranks(2, _train, where, use_reentrant, {})


_OPTIONS = {
    "no prefetch": {"forward_prefetch": False, "backward_prefetch": None},
    "prefetch after": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "deep prefetch": {"forward_prefetch": 3, "limit_all_gathers": False},
    "kept after forward": {"reshard_after_forward": False},
    "one unit": {"auto_wrap_policy": None},
}


@pytest.mark.parametrize(
    ("options", "use_reentrant"),
    [
        *(pytest.param(each, False, id=f"{name}-hooks") for name, each in _OPTIONS.items()),
        *(
            pytest.param(
                *(each, True),
                id=f"{name}-reentrant",
                # Of a backward inside a backward the two differ most.
                marks=[pytest.mark.slow] * (name not in ("no prefetch", "deep prefetch")),
            )
            for name, each in _OPTIONS.items()
        ),
    ],
)
def test_recomputation_goes_with_every_prefetch(options: dict, use_reentrant: bool) -> None:
    run_ranks(2, _train_everywhere, use_reentrant, options)


def _train_everywhere(use_reentrant: bool, options: dict) -> None:
    for where in ("around each unit", "around several units", "inside each unit"):
        try:
            _train(where, use_reentrant, options)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error


def _whole_model(use_reentrant: bool) -> None:
    """A checkpoint around the call of the root itself."""
    case = CASES["mlp"]
    batches = batches_of(case, dist.get_world_size(), steps=3)

    def run(model: nn.Module, batch: Tensor) -> Tensor:
        # The reentrant flavour needs an input that requires grad.
        batch = batch.clone().requires_grad_()
        loss = checkpoint(model, batch, use_reentrant=use_reentrant).square().sum()
        loss.backward()
        return loss.detach()

    assert_trains_alike(sharded(case), seeded(Mlp), batches, run=run)


@FLAVOURS
def test_the_whole_model_may_be_recomputed(use_reentrant: bool) -> None:
    run_ranks(2, _whole_model, use_reentrant)


def _several_forwards(use_reentrant: bool) -> None:
    case = CASES["mlp"]
    batches = batches_of(case, dist.get_world_size(), steps=3)

    def run(model: nn.Module, batch: Tensor) -> Tensor:
        losses = [model(batch * scale).square().sum() for scale in (1.0, 2.0, 3.0)]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).detach()

    def build() -> nn.Module:
        model = Checkpointed("around each unit", use_reentrant)
        return model.eval()  # without dropout

    assert_trains_alike(zero3(build, _Block), seeded(build), batches, run=run, regrouped=True)


@FLAVOURS
def test_recomputation_goes_with_several_forwards_before_backward(use_reentrant: bool) -> None:
    run_ranks(2, _several_forwards, use_reentrant)


class _CheckpointedTransformer(Transformer):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, self.rotation, use_reentrant=self.use_reentrant)
        return self.head(self.norm(x))


def _transformer(use_reentrant: bool) -> None:
    case = CASES["transformer"]
    batches = batches_of(case, dist.get_world_size(), steps=3)
    model = zero3(lambda: _CheckpointedTransformer(use_reentrant), TransformerBlock)
    # Against the model without checkpoints: recomputation repeats the same arithmetic.
    assert_trains_alike(model, seeded(Transformer), batches, optimizer="adamw")


@FLAVOURS
def test_a_checkpointed_transformer_trains_bitwise_like_a_plain_one(use_reentrant: bool) -> None:
    run_ranks(2, _transformer, use_reentrant)


def _frozen_and_recomputed(use_reentrant: bool) -> None:
    case = CASES["mlp"]
    batches = batches_of(case, dist.get_world_size(), steps=3)

    def build() -> nn.Module:
        model = Checkpointed("around each unit", use_reentrant).eval()
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.requires_grad_(False)
        return model

    assert_trains_alike(zero3(build, _Block), seeded(build), batches)


@FLAVOURS
def test_recomputation_goes_with_frozen_units(use_reentrant: bool) -> None:
    run_ranks(2, _frozen_and_recomputed, use_reentrant)
