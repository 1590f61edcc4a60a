"""Defects that an earlier implementation of layered ZeRO had, each with a test that catches it.

1  offloaded sums start from those of the last step     test_offload: three steps, bitwise
2  the last unit of a forward loses its offloaded sum   test_offload: every unit, bitwise
3  a sum is zeroed while it is copied                   test_streams: races with the host
4  `reduce_dtype` and other settings have no effect     here
5  means divided by another number than was summed      here; tensor-parallel groups: none yet
6  a frozen unit with a trainable input fails           here
7  a parameter without a gradient hangs the reduction   test_layered: "unused_parts"
8  a state dict after an evaluation has full views      here
9  a converter puts elements in the wrong order         no converter: test_construction, ranges
10 casts queue behind all compute; prefetch gathers     test_streams: lanes; here: depth
   the farthest unit alone
11 two models share a queue                             here
12 three passes over the gradients of one micro-batch   test_collectives: one copy
13 weights loaded after an evaluation are stale         test_layered: never stale
14 the end of a backward trips over a unit without      here
   parameters
15 units share one object of settings                   here
16 no meta device, no CPU, other libraries needed       here; test_imports
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from layerzero import MixedPrecision, ZeRO3
from tests.harness.checks import assert_bitwise
from tests.harness.compare import (
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    sharded,
    zero3,
)
from tests.harness.internals import inner_units, root_state
from tests.harness.models import CASES, Block, Mlp, NoParameters
from tests.harness.ranks import run_ranks
from tests.harness.recording import gathered, recorded_operations
from tests.harness.reference import (
    Terms,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_parameters,
    seeded,
)
from tests.harness.traffic import SentBytes

LAYERS: list[dict[str, Any]] = [
    {"zero3_size": 2},
    {"zero3_size": 1},
    {"zero3_size": 2, "outer": "replicate"},
]


def _own(name: str) -> Any:
    return batches_of(CASES[name], dist.get_world_size(), steps=1)[0][dist.get_rank()]


def _settings_have_an_effect() -> None:
    """4: bytes of gradients halve with their dtype, on each hop; so do those of parameters."""

    def sent(precision: MixedPrecision | None) -> int:
        layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
        model = ZeRO3(layers, auto_wrap_policy={nn.Linear}, zero3_size=2, mixed_precision=precision)
        with SentBytes() as counted:
            forward_backward(model, torch.randn(2, 64))
        return counted.nbytes - 2 * 2  # A byte for each parameter on each hop.

    low, float32 = torch.bfloat16, torch.float32
    full = sent(None)
    both = sent(MixedPrecision(param_dtype=low, reduce_dtype=low))
    assert full == 2 * both
    wide_sums = sent(MixedPrecision(param_dtype=low, reduce_dtype=float32))
    gradients = full - sent(MixedPrecision(param_dtype=float32, reduce_dtype=low))
    assert wide_sums == both + gradients

    initialised: list[str] = []
    with torch.device("meta"):
        meta = Mlp()
    ZeRO3(
        meta,
        zero3_size=2,
        param_init_fn=lambda module: (
            initialised.append(type(module).__name__),
            module.to_empty(device="cpu", recurse=False),
            module.reset_parameters(),
        ),
    )
    assert initialised == ["Linear"] * 8
    model = zero3(Mlp, Block, zero3_size=2, limit_all_gathers="3MB")
    assert root_state(model).context.limiter.budget.max_nbytes == 3 * 10**6


def test_every_setting_has_its_effect() -> None:
    run_ranks(4, _settings_have_an_effect)


def _means() -> None:
    """5: a gradient of 1 on every rank is 1 in the mean, and the number of ranks in the sum."""
    for layers in LAYERS:
        for reduction, expected in (("mean", 1.0), ("sum", 4.0)):
            model = ZeRO3(nn.Linear(3, 1, bias=False), gradient_reduction=reduction, **layers)
            model(torch.ones(1, 3)).sum().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [expected] * parameter.numel()


def test_a_mean_is_over_the_ranks_that_were_summed() -> None:
    run_ranks(4, _means)


def _frozen_amid() -> None:
    """6: a frozen unit whose input requires grad, as under an adapter."""
    for layers in LAYERS:
        assert_trains_alike(
            sharded(CASES["frozen_parts"], **layers),
            seeded(CASES["frozen_parts"].build),
            batches_of(CASES["frozen_parts"], 4, steps=2),
            regrouped=True,
        )


def test_frozen_units_let_gradients_through() -> None:
    run_ranks(4, _frozen_amid)


def _state_dict_after_evaluation() -> None:
    """8: shards, whatever ran before."""
    for layers in LAYERS:
        model = sharded(CASES["mlp"], reshard_after_forward=False, **layers)
        before = {name: value.local.clone() for name, value in model.state_dict().items()}
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                model(_own("mlp"))
            for name, value in model.state_dict().items():
                assert_bitwise(value.local, before[name], name)


def test_a_state_dict_after_an_evaluation_has_the_shards() -> None:
    run_ranks(4, _state_dict_after_evaluation)


def _gathers_three_ahead() -> None:
    """10: the next three, in their order; compute shards with them."""
    model = sharded(CASES["mlp"], zero3_size=2, forward_prefetch=3, limit_all_gathers=False)
    for _ in range(2):
        with recorded_operations(model) as operations, torch.no_grad():
            model(_own("mlp"))
    expected = ["the root unit", "blocks.0", "blocks.1", "blocks.2"]
    assert gathered(operations) == expected
    assert [o.unit for o in operations if o.verb == "outer all-gather"] == expected


def test_prefetching_three_ahead_gathers_all_three_in_order() -> None:
    run_ranks(4, _gathers_three_ahead)


def _two_models() -> None:
    """11: forwards and backwards of two models, interleaved."""
    case = CASES["mlp"]
    models = [sharded(case, **layers) for layers in LAYERS[:2]]
    plain, terms = [seeded(case.build) for _ in models], [Terms() for _ in models]
    step = batches_of(case, 4, steps=1)[0]
    losses = [model(step[dist.get_rank()]).square().mean() for model in models]
    joint = losses[0] + losses[1]
    joint.backward()
    for model, each, own in zip(models, plain, terms, strict=True):
        backward_of_all_ranks(each, step, _squares, terms=own)
        assert_same_gradients(model, each, own)
    with pytest.raises(ZeroDivisionError):
        (models[0](step[dist.get_rank()]) / (1 // 0)).sum().backward()
    forward_backward(models[1], step[dist.get_rank()])
    backward_of_all_ranks(plain[1], step, terms=terms[1])
    assert_same_gradients(models[1], plain[1], terms[1])


def _squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss.detach()


def test_two_models_do_not_meet() -> None:
    run_ranks(4, _two_models)


def _ends_with_no_parameters() -> None:
    """14: micro-batches of a model whose last unit has no parameters."""
    for layers in LAYERS:
        for accumulation in ("sharded", "unsharded"):
            module = seeded(NoParameters)
            policy = {Block, nn.Sequential, nn.Tanh}
            model = ZeRO3(module, auto_wrap_policy=policy, accumulation=accumulation, **layers)
            plain, terms = seeded(NoParameters), Terms()
            step = batches_of(CASES["mlp"], 4, steps=1)[0]
            with model.no_sync():
                forward_backward(model, step[dist.get_rank()])
            forward_backward(model, step[dist.get_rank()])
            for _ in range(2):
                backward_of_all_ranks(plain, step, terms=terms)
            assert_same_gradients(model, plain, terms)


def test_micro_batches_end_well_in_a_unit_without_parameters() -> None:
    run_ranks(4, _ends_with_no_parameters)


def _own_settings() -> None:
    """15: what one unit is given does not reach another."""
    inner = MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    module = seeded(Mlp)
    module.blocks[1] = ZeRO3(module.blocks[1], mixed_precision=inner, zero3_size=2)
    model = ZeRO3(
        module,
        auto_wrap_policy={Block},
        zero3_size=1,
        reshard_after_forward=lambda _, fqn: fqn != "blocks.0",
    )
    seen = {
        unit.fqn: (
            unit.options.reshard_after_forward,
            unit.handles[0].full.dtype,
            unit.handles[0].placement.shard_group.size,
        )
        for unit in inner_units(model)
    }
    assert seen == {
        "": (True, torch.float32, 1),
        "blocks.0": (False, torch.float32, 1),
        "blocks.1": (True, torch.bfloat16, 2),
        "blocks.2": (True, torch.float32, 1),
    }
    forward_backward(model, _own("mlp"))


def test_units_have_settings_of_their_own() -> None:
    run_ranks(4, _own_settings)


def _from_meta() -> None:
    """16: from the meta device, values of the first rank."""
    for layers in LAYERS:
        with torch.device("meta"):
            meta = Mlp()
        torch.manual_seed(dist.get_rank())
        model = ZeRO3(meta, auto_wrap_policy={Block}, sync_module_states=True, **layers)
        values = full_parameters(model)
        assert all(bool(value.isfinite().all()) for value in values.values())
        plain = Mlp()
        plain.load_state_dict(values)
        assert_same_values(model, plain)
        assert_trains_alike(model, plain, batches_of(CASES["mlp"], 4, steps=2), regrouped=True)


def test_a_meta_model_trains_in_layers() -> None:
    run_ranks(4, _from_meta)
