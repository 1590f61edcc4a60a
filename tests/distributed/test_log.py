"""The log tells what was sharded, and how: one rank at INFO, and each turn of a unit at DEBUG."""

from __future__ import annotations

import copy
import logging

import torch
import torch.distributed as dist
from torch import nn

from layerzero import MixedPrecision, ShardingPlan, ZeRO3, shard_with_plan
from tests.harness.checks import assert_same_on_all_ranks
from tests.harness.models import WIDTH, Block
from tests.harness.ranks import on_ranks
from tests.harness.recording import logged


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
def test_the_log_names_modules_that_are_not_units_like_others() -> None:
    with logged("layerzero") as texts:
        ZeRO3(Model(), auto_wrap_policy={Block})
        model = Model()
        layers = model.layers
        ZeRO3(
            model,
            auto_wrap_policy=lambda module, fqn: (
                {"hook_module": layers[1]} if module is model.norm else isinstance(module, Block)
            ),
            optional_modules=[layers[2], layers[5]],
            ignored_modules=[layers[7]],
            ignored_parameters=[model.head.weight],
        )
        around = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
        for hook in (around, around[0]):  # outside what is wrapped, and the root itself
            ZeRO3(
                copy.deepcopy(around[0]) if hook is around else around[0],
                auto_wrap_policy=lambda module, fqn, hook=hook: {"hook_module": hook},
            )
    if dist.get_rank() > 0:
        assert texts == [], "one rank speaks"
        return
    plain, special, *elsewhere = texts
    for text in elsewhere:
        assert "\n  hook modules, which gather: Sequential for 0\n" in text, text
    for part in (
        "\n  a rank may skip: layers.2, layers.5\n",
        "\n  ignored: head.weight, layers.7\n",
        "\n  hook modules, which gather: layers.1 for norm\n",
    ):
        assert part in special, special
        assert part.split(":")[0] not in plain


@on_ranks(2)
def test_the_log_tells_what_was_made() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_float32=(nn.LayerNorm,))
    plan = ShardingPlan(
        apply_modules={"layers.{*}": {}, "norm": {"reshard_after_forward": False}},
        param_dtype="bfloat16",
        num_to_forward_prefetch=2,
    )
    with logged("layerzero") as texts:
        model = ZeRO3(
            Model(),
            auto_wrap_policy={Block},
            mixed_precision=precision,
            reshard_after_forward=lambda module, fqn: fqn != "layers.13",
        )
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
        f"({3 * WIDTH} frozen)",
        "units: the root unit, layers.0, layers.1",
        "layers.6 and 7 more",
        "group of 2, gloo, timeout 60 s: the root unit",
        "mixed precision: param_dtype=bfloat16; kept in float32: LayerNorm (1)",
        "prefetch: 1 in forward, BACKWARD_PRE in backward, at most",
        "not freed after forward: layers.13",
    ):
        assert part in text, (part, text)
    for part in (
        "16 units of Model",
        "mixed precision: param_dtype=bfloat16",
        "not freed after forward: norm",
    ):
        assert part in of_plan, (part, of_plan)
