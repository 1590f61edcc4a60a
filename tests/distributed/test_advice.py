"""Choices that have no effect get one warning, units that nobody can call are refused."""

from __future__ import annotations

import functools
import linecache
import warnings
from typing import Any
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

import layerzero
from layerzero import MixedPrecision, ZeRO3
from layerzero.guards import argument_warnings
from tests.harness.compare import assert_trains_alike, zero3
from tests.harness.models import CASES, WIDTH, Block, Mlp
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.reference import batches_of, forward_backward, seeded


def _warnings_of(**options: Any) -> list[str]:
    """What this rank is told when it wraps an Mlp."""
    model = options.pop("model", None) or Mlp()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ZeRO3(model, **options)
    lines = {linecache.getline(each.filename, each.lineno).strip() for each in caught}
    assert lines <= {"ZeRO3(model, **options)"}, "it shows the caller's line"
    return [str(each.message) for each in caught]


class Blok(nn.Module):
    pass


def _warned() -> dict[str, list[str]]:
    told = {
        "class": _warnings_of(auto_wrap_policy={Blok}),
        "again": _warnings_of(auto_wrap_policy={Blok}),
        "one of two": _warnings_of(auto_wrap_policy={Block, nn.Conv2d}),
        "torch's": _warnings_of(auto_wrap_policy=ModuleWrapPolicy({nn.Conv1d})),
        "function": _warnings_of(auto_wrap_policy=lambda module, fqn: fqn == "blocks.17"),
        "size": _warnings_of(auto_wrap_policy=size_based_auto_wrap_policy),
        "float32": _warnings_of(
            auto_wrap_policy={Block},
            mixed_precision=MixedPrecision(
                param_dtype=torch.bfloat16, keep_float32=[nn.Linear, Blok]
            ),
        ),
        "batch norm by default": _warnings_of(
            auto_wrap_policy={Block},
            mixed_precision=fsdp.MixedPrecision(param_dtype=torch.bfloat16),
        ),
        "itself": _warnings_of(model=Block(), auto_wrap_policy={Block}),
        "elsewhere": _warnings_of(
            ignored_modules=[Block()], ignored_parameters=[*Block().parameters()]
        ),
    }
    missing = functools.partial(argument_warnings.missing_kernels, torch.device("xpu"))
    with mock.patch.object(argument_warnings, "missing_kernels", lambda _: missing()):
        told["kernels"] = _warnings_of(auto_wrap_policy={Block})
        told["kernels again"] = _warnings_of(auto_wrap_policy={Block})
    model = Mlp()
    told["trained"] = _warnings_of(model=model, ignored_modules=[model.blocks[1]])
    model = Mlp()
    model.blocks.requires_grad_(False)
    told["frozen"] = _warnings_of(model=model, ignored_modules=model.blocks)
    return told


def test_a_choice_without_effect_warns_once_on_the_first_rank(ranks: KeptRanks) -> None:
    first, second = ranks(2, _warned)
    assert not any(second.values()), second
    assert "no module is a Blok; the whole model is one unit" in first["class"][0]
    assert "tests.harness.models.Block (3)" in first["class"][0]
    assert "no module is a Conv2d; the model has" in first["one of two"][0]
    assert "Conv1d" in first["torch's"][0]
    assert "selected no module inside the Mlp" in first["function"][0]
    assert "selected no module inside the Mlp" in first["size"][0]
    assert "keep_float32: no module is a Blok; the model has" in first["float32"][0]
    assert "Block, a parameter (7, 5)" in first["elsewhere"][0]
    assert "4 ignored parameters require grad, such as 'blocks.1.up.weight'" in first["trained"][0]
    assert "no kernels of layerzero for device type 'xpu'" in first["kernels"][0]
    silent = ("again", "kernels again", "batch norm by default", "itself", "frozen")
    assert {name: len(each) for name, each in first.items()} == {
        name: int(name not in silent) for name in first
    }


@on_ranks(2)
def test_both_remedies_for_a_number_in_reshard_after_forward_have_an_effect() -> None:
    text = "use True for shards over all ranks, or over 2 of them zero3_size=2, outer='shard'"
    with pytest.raises(ValueError, match=text):
        ZeRO3(Mlp(), reshard_after_forward=2)
    assert not _warnings_of(reshard_after_forward=True)
    own = {"zero3_size": 1, "outer": "shard", "reshard_after_forward": "compute_shard"}
    assert not _warnings_of(**own)


@on_ranks(2)
def test_torchs_arguments_train_as_ours_do() -> None:
    """A model given torch's arguments trains as one that is given ours."""
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=1)
    blocks = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    sizes = functools.partial(size_based_auto_wrap_policy, min_num_params=50)
    for policy in (blocks, sizes, ModuleWrapPolicy({Block})):
        model = zero3(
            Mlp, auto_wrap_policy=policy, backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_POST
        )
        assert_trains_alike(model, seeded(Mlp), batches)
        assert {unit.fqn for unit in layerzero.units(model)} >= {"", "blocks.0", "blocks.2"}
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    losses = [
        [
            forward_backward(zero3(Mlp, Block, mixed_precision=each), step[dist.get_rank()])
            for step in batches
        ]
        for each in (fsdp.MixedPrecision(**half), MixedPrecision(**half))
    ]
    assert losses[0] == losses[1]
    # A unit inside does not cast what comes in: as in FSDP1 it is told so by `cast_forward_inputs`.
    model = zero3(_Widening, Block, mixed_precision=fsdp.MixedPrecision(**half))
    with pytest.raises(RuntimeError, match="dtype"):
        model(batches[0][0])
    casts = fsdp.MixedPrecision(**half, cast_forward_inputs=True)
    zero3(_Widening, Block, mixed_precision=casts)(batches[0][0])


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
    assert_trains_alike(listed, plain, batches_of(CASES["mlp"], dist.get_world_size(), steps=2))
