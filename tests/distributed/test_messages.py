"""What the engine says: one warning for a choice that has no effect, and a log of what was sharded,
and how, on one rank at INFO, and of each turn of a unit at DEBUG."""

import functools
import logging
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from layerzero import MixedPrecision, ShardingPlan, ZeRO3, shard_with_plan
from layerzero.guards import argument_warnings
from tests.harness.checks import assert_same_on_all_ranks
from tests.harness.compare import assert_trains_alike, warnings_of, zero3
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.ranks import of_all_ranks, on_ranks
from tests.harness.recording import logged
from tests.harness.reference import mlp_batches, seeded


class Blok(nn.Module):
    pass


@on_ranks(2)
def test_a_choice_without_effect_warns_once_on_the_first_rank() -> None:
    told = {
        "class": warnings_of(Mlp(), auto_wrap_policy={Blok}),
        "again": warnings_of(Mlp(), auto_wrap_policy={Blok}),
        "one of two": warnings_of(Mlp(), auto_wrap_policy={Block, nn.Conv2d}),
        "torch's": warnings_of(Mlp(), auto_wrap_policy=ModuleWrapPolicy({nn.Conv1d})),
        "function": warnings_of(Mlp(), auto_wrap_policy=lambda module, fqn: fqn == "blocks.17"),
        "size": warnings_of(Mlp(), auto_wrap_policy=size_based_auto_wrap_policy),
        "float32": warnings_of(
            Mlp(),
            auto_wrap_policy={Block},
            mixed_precision=MixedPrecision(
                param_dtype=torch.bfloat16, keep_float32=[nn.Linear, Blok]
            ),
        ),
        "batch norm by default": warnings_of(
            Mlp(),
            auto_wrap_policy={Block},
            mixed_precision=fsdp.MixedPrecision(param_dtype=torch.bfloat16),
        ),
        "itself": warnings_of(Block(), auto_wrap_policy={Block}),
    }
    missing = functools.partial(argument_warnings.missing_kernels, torch.device("xpu"))
    with mock.patch.object(argument_warnings, "missing_kernels", lambda _: missing()):
        told["kernels"] = warnings_of(Mlp(), auto_wrap_policy={Block})
        told["kernels again"] = warnings_of(Mlp(), auto_wrap_policy={Block})
    model = Mlp()
    told["trained"] = warnings_of(model, ignored_modules=[model.blocks[1]])
    model = Mlp()
    model.blocks.requires_grad_(False)
    told["frozen"] = warnings_of(model, ignored_modules=model.blocks)
    first, second = of_all_ranks(told)
    assert not any(second.values()), second
    assert "auto_wrap_policy: no module of the model is a Blok" in first["class"][0]
    assert "auto_wrap_policy: no module of the model is a Conv2d" in first["one of two"][0]
    assert "Conv1d" in first["torch's"][0]
    assert "selected no module inside the Mlp" in first["function"][0]
    assert "selected no module inside the Mlp" in first["size"][0]
    assert "keep_float32: no module of the model is a Blok" in first["float32"][0]
    assert "4 ignored parameters require grad, such as 'blocks.1.up.weight'" in first["trained"][0]
    assert "no kernels of layerzero for device type 'xpu'" in first["kernels"][0]
    silent = ("again", "kernels again", "batch norm by default", "itself", "frozen")
    assert {name: len(each) for name, each in first.items()} == {
        name: int(name not in silent) for name in first
    }


@on_ranks(2)
def test_torchs_arguments_mean_what_they_mean_there() -> None:
    """A unit inside does not cast what comes in: as in FSDP1 `cast_forward_inputs` says so."""
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    blocks = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    for casts in (False, True):
        model = zero3(
            _Widening,
            auto_wrap_policy=blocks,
            backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_POST,
            mixed_precision=fsdp.MixedPrecision(**half, cast_forward_inputs=casts),
        )
        with nullcontext() if casts else pytest.raises(RuntimeError, match="dtype"):
            model(torch.ones(2, WIDTH)).sum().backward()


class _Widening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16, "the root casts its inputs"
        return self.block(x.float())


@on_ranks(2)
def test_a_list_that_nobody_can_call_is_no_unit() -> None:
    model = Mlp()
    for refused, policy in (
        (model, {nn.ModuleList}),
        (model, lambda module, fqn: fqn == "blocks"),
        (model.blocks, None),
        (nn.ModuleDict({"a": Block()}), None),
        (nn.ParameterList([torch.zeros(3)]), None),
        (nn.Sequential(nn.ParameterDict({"a": torch.zeros(3)})), {nn.ParameterDict}),
    ):
        with pytest.raises(
            ValueError, match=r"a (Module|Parameter)(List|Dict) has no forward.*make"
        ):
            ZeRO3(refused, auto_wrap_policy=policy)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = ZeRO3(block)
    # A list all of whose members are units owns nothing, and they may be called by themselves.
    blocks = ZeRO3(model.blocks)
    blocks.module[0](torch.ones(1, WIDTH)).sum().backward()

    class Called(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            return functools.reduce(lambda y, block: block(y), self, x)

    listed = zero3(lambda: nn.Sequential(Called(Block() for _ in range(2))), Called)
    plain = seeded(lambda: nn.Sequential(Called(Block() for _ in range(2))))
    assert_trains_alike(listed, plain, mlp_batches())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(14))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3, bias=False)
        self.head.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@on_ranks(2)
def test_the_log_tells_what_was_made() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_float32=(nn.LayerNorm,))
    plan = ShardingPlan(
        apply_modules={"layers.{*}": {}, "norm": {"reshard_after_forward": False}},
        param_dtype="bfloat16",
        num_to_forward_prefetch=2,
    )
    with logged("layerzero") as texts:
        model = ZeRO3(Model(), auto_wrap_policy={Block}, mixed_precision=precision)
        model(torch.ones(2, WIDTH)).sum().backward()
        model = shard_with_plan(Model(), plan)
    with logged("layerzero") as alone:
        assert "1 unit of Linear" in repr(ZeRO3(nn.Linear(2, 2)))
    assert all("1 unit of Linear on cpu" in line for line in alone)
    with logged("layerzero", logging.DEBUG) as turns:
        # The first forward records the order, along which the second prefetches.
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
    for action in ("prefetch", "unshard", "wait_for_unshard", "reshard", "reduce"):
        assert f"LayerZeRO3.{action}(layers.3)" in turns
    assert_same_on_all_ranks(turns, "turns")
    if dist.get_rank() > 0:
        assert texts == [], "one rank speaks"
        return
    text, of_plan = texts
    for part in (
        "15 units of Model on cpu",
        "units: the root unit, layers.0, layers.1",
        "layers.6 and 7 more",
        "group of 2, gloo",
        "MixedPrecision(param_dtype=torch.bfloat16, keep_float32=(LayerNorm))",
    ):
        assert part in text, (part, text)
    assert "16 units of Model" in of_plan
