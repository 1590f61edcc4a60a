"""What changes in a model after it was wrapped is found by name, or does no harm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize

from layerzero import ZeRO3
from layerzero.checkpoint import get_model_state_dict
from tests.harness.checks import assert_bitwise
from tests.harness.compare import assert_same_values, assert_trains_alike, zero3
from tests.harness.models import CASES, WIDTH, Block, Mlp
from tests.harness.ranks import on_ranks
from tests.harness.reference import batches_of, seeded


class LowRank(nn.Module):
    """An adapter around a layer, as libraries for fine-tuning put it in place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _adapt(model: nn.Module) -> None:
    for block in model.blocks:
        block.up = LowRank(block.up)


def _replace_parameter(model: nn.Module) -> None:
    model.blocks[0].up.weight = nn.Parameter(torch.zeros(7, WIDTH))


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "a module replaced": (
        lambda model: setattr(model, "head", nn.Linear(WIDTH, 4)),
        "added head.bias; replaced head.weight",
    ),
    "a module appended": (lambda model: model.blocks.append(Block()), "added blocks.3.up.w"),
    "a module inserted": (
        lambda model: model.blocks.insert(1, Block()),
        "replaced .*blocks.1.up.weight",
    ),
    "an item replaced": (
        lambda model: model.blocks.__setitem__(1, Block()),
        "replaced blocks.1.up.weight, blocks.1.up.bias",
    ),
    "an item deleted": (
        lambda model: model.blocks.__delitem__(2),
        "removed blocks.2.up.weight",
    ),
    "another order": (
        lambda model: setattr(model, "blocks", nn.ModuleList(reversed(model.blocks))),
        "replaced blocks.0.up.weight.*blocks.2.down.bias",
    ),
    "adapters": (_adapt, "added blocks.0.up.down.weight.*renamed blocks.0.up.weight -> "),
    "a module beside": (lambda model: model.add_module("extra", Block()), "added extra.up.we"),
    "a parameter replaced": (_replace_parameter, "replaced blocks.0.up.weight"),
    "a parameter registered": (
        lambda model: model.head.register_parameter("scale", nn.Parameter(torch.ones(()))),
        "added head.scale",
    ),
    "a parameter where there was none": (
        lambda model: setattr(model.head, "bias", nn.Parameter(torch.ones(3))),
        "added head.bias",
    ),
    "a parameter removed": (
        lambda model: setattr(model.stem, "bias", None),
        "removed stem.bias",
    ),
    "a parameter tied": (
        lambda model: setattr(model.blocks[0].up, "weight", model.blocks[1].up.weight),
        "replaced blocks.0.up.weight",
    ),
    "a sharded module": (
        lambda model: model.add_module("extra", ZeRO3(Block())),
        "added extra.up.weight",
    ),
    "a parametrization": (
        lambda model: parametrize.register_parametrization(
            model.blocks[0].up, "weight", nn.Identity(), unsafe=True
        ),
        "renamed blocks.0.up.weight -> blocks.0.up.parametrizations.weight.original",
    ),
}

_AT: dict[str, Callable[[ZeRO3], object]] = {
    "forward": lambda model: model(torch.randn(2, WIDTH)),
    "a forward without gradients": lambda model: torch.no_grad()(model)(torch.randn(2, WIDTH)),
    "summon_full_params": lambda model: model.summon_full_params().__enter__(),
    "state_dict": lambda model: model.state_dict(),
    "the module's state_dict": lambda model: model.module.state_dict(),
    "get_model_state_dict": lambda model: get_model_state_dict(model, full=True),
}


@on_ranks(2)
def test_every_change_of_parameters_is_found_by_name() -> None:
    for what, (change, message) in CHANGES.items():
        model = zero3(Mlp, Block)
        model(torch.randn(2, WIDTH)).sum().backward()
        change(model)
        for at, use in _AT.items():
            with pytest.raises(RuntimeError, match=message) as raised:
                use(model)
            assert "layerzero.rewrap(model)" in str(raised.value), (what, at)


class Caching(nn.Module):
    """Makes modules as it runs, none of them with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        self.cache = nn.Identity()
        return self.cache(self.block(x))


def _wrap_blocks(model: nn.Module) -> None:
    for name, block in list(model.blocks.named_children()):
        model.blocks._modules[name] = checkpoint_wrapper(block)


HARMLESS: dict[str, Callable[[nn.Module], object]] = {
    "the same module": lambda model: setattr(model, "stem", model.stem),
    "the same parameter": lambda model: setattr(model.stem, "weight", model.stem.weight),
    "a module without parameters": lambda model: model.add_module("act", nn.ReLU()),
    "a buffer": lambda model: model.stem.register_buffer("seen", torch.zeros(1)),
    "checkpoint_wrapper": _wrap_blocks,
    "torch.compile": lambda model: model.blocks[0].compile(backend="eager"),
    "a compiled item": lambda model: model.blocks.__setitem__(
        0, torch.compile(model.blocks[0], backend="eager")
    ),
    "a name more": lambda model: setattr(model, "first", model.blocks[0]),
}


@on_ranks(2)
def test_what_changes_no_parameter_is_left_alone() -> None:
    batches = batches_of(CASES["mlp"], 2, steps=2)
    for what, change in HARMLESS.items():
        model, plain = zero3(Mlp, Block), seeded(Mlp)
        model(torch.randn(2, WIDTH))
        change(model)
        if what in ("a name more", "checkpoint_wrapper", "a compiled item"):
            change(plain)  # names say so, too
        assert_trains_alike(model, plain, batches)
    assert_trains_alike(zero3(Caching, Block), seeded(Caching), batches)
    model = zero3(Mlp, Block)
    model.unshard()  # modules show unsharded parameters
    model(torch.randn(2, WIDTH))
    model.blocks.append(nn.Identity())
    assert_same_values(model, seeded(Mlp))


@on_ranks(2)
def test_ignored_parts_may_change_and_stay_ignored_in_an_outer_wrapper() -> None:
    def around(model: nn.Module) -> ZeRO3:
        return ZeRO3(
            model,
            auto_wrap_policy={nn.Linear},
            ignored_modules=[model.blocks[0]],
            ignored_parameters=[model.stem.bias],
        )

    model = around(seeded(Mlp))
    model.blocks[0] = Block()
    model.stem.bias = nn.Parameter(torch.zeros(WIDTH))
    model.blocks[0].up.more = nn.Parameter(torch.zeros(1))
    model(torch.randn(2, WIDTH)).sum().backward()
    outer = ZeRO3(nn.Sequential(around(seeded(Mlp)), nn.Linear(3, 2)))
    assert outer[0].blocks[0].up.weight.shape == (7, WIDTH)
    assert outer[0].stem.bias.shape == (WIDTH,)
    outer[0].stem.bias = nn.Parameter(torch.zeros(WIDTH))
    outer(torch.randn(2, WIDTH)).sum().backward()
    assert outer[0].stem.bias.grad is not None and outer[0].stem.weight.grad is not None
    outer[0].stem.more = nn.Parameter(torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"added 0.stem.more"):
        outer(torch.randn(2, WIDTH))


@on_ranks(2)
def test_what_is_put_in_place_inside_summon_is_written_or_refused() -> None:
    for options in ({}, {"zero3_size": 1}, {"zero3_size": 1, "outer": "replicate"}):
        model = zero3(Mlp, Block, **options)
        with model.summon_full_params(writeback=False), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        with (
            contextlib.suppress(KeyError),
            model.summon_full_params(with_grads=True),
            torch.no_grad(),
        ):
            model.stem.weight.zero_()
            raise KeyError
        assert_same_values(model, seeded(Mlp))
        new = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
        for rank0_only in (False, True):
            with model.summon_full_params(rank0_only=rank0_only):
                if model.head.weight.shape == new.shape:
                    model.head.weight = nn.Parameter(new + rank0_only)
                    model.stem.weight.data = torch.ones(WIDTH, WIDTH)
            with model.summon_full_params():
                assert_bitwise(model.head.weight.detach(), new + rank0_only, "put in place")
                assert (model.stem.weight == 1).all()
            for spoil in (
                lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros(WIDTH, 3))),
                lambda m: setattr(m.head.weight, "data", torch.zeros(WIDTH, 3)),
                lambda m: delattr(m.head, "weight"),
            ):
                with (
                    pytest.raises((RuntimeError, ValueError), match="summon_full_params: "),
                    model.summon_full_params(rank0_only=rank0_only),
                ):
                    if model.head.weight.shape == new.shape:
                        spoil(model)
            with model.summon_full_params():
                assert_bitwise(model.head.weight.detach(), new + rank0_only, "left as it was")
