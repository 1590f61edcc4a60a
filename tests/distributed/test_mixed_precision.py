"""Low-precision compute and reduction around main weights in the original dtype; and autocast,
under which a model trains as in plain torch, whatever passes share one.

Inside a unit's call autocast keeps no casts (Note [A cast belongs to one call] in hooks.py). Where
a plain model uses a weight several times, it has the same bits with `cache_enabled=False`.
"""

import contextlib
import copy
import dataclasses
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero import MixedPrecision, ZeRO3
from tests.harness.checks import assert_bitwise, named
from tests.harness.compare import assert_trains_alike, trained_alike, zero3
from tests.harness.models import (
    CASES,
    WIDTH,
    Block,
    Mlp,
    Parts,
    Transformer,
    TransformerBlock,
    loss_of,
)
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import on_ranks
from tests.harness.reference import (
    RunFn,
    batches_of,
    forward_backward,
    full_gradients,
    full_parameters,
    mlp_batches,
    seeded,
)

BF16 = torch.bfloat16


def _by_hand(precision: MixedPrecision) -> RunFn:
    """A low-precision copy computes; sums and weights are float32."""

    def run(model: nn.Module, batch: Tensor) -> Tensor:
        low = _low_precision_copy(model, precision)
        is_cast = precision.param_dtype is not None and batch.is_floating_point()
        loss = forward_backward(low, batch.to(precision.param_dtype) if is_cast else batch)
        for parameter, other in zip(model.parameters(), low.parameters(), strict=True):
            if other.grad is not None:
                chosen = precision.reduce_dtype or other.grad.dtype
                dtype = parameter.dtype if chosen == "main" else chosen
                parameter.grad = other.grad.to(dtype).float()
        return loss

    return run


def _low_precision_copy(model: nn.Module, precision: MixedPrecision) -> nn.Module:
    low = copy.deepcopy(model)
    for module in low.modules():
        if isinstance(module, precision.keep_float32):
            _cast_around(module)
        elif precision.param_dtype is not None:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(precision.param_dtype)
    return low


def _cast_around(module: nn.Module) -> None:
    came_in: list[torch.dtype] = []

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        came_in.append(args[0].dtype)
        return tuple(each.float() for each in args)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(lambda module, args, output: output.to(came_in.pop()))


def _train(case_name: str, precision: MixedPrecision, **options: Any) -> None:
    """And evaluate from the weights that training left."""
    case = CASES[case_name]
    batches = batches_of(case, dist.get_world_size(), steps=2)
    options |= {"reference_run": _by_hand(precision), "mixed_precision": precision}
    with named(case_name, options):
        model = trained_alike(case.build, *case.units, batches=batches, **options)
        plain, batch = seeded(case.build), batches[0][0]
        plain.load_state_dict(full_parameters(model), strict=False)
        low = _low_precision_copy(plain, precision)
        if precision.param_dtype is not None and batch.is_floating_point():
            batch = batch.to(precision.param_dtype)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert_bitwise(model(batch).clone(), low(batch).clone(), "output")


_WIDE_SUMS = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
_NAMES = ["mlp", "transformer", "tied_across_units", "frozen_parts", "unused_parts"]


@on_ranks(2)
def test_on_gloo_gradients_travel_as_they_were_computed_and_sums_in_the_reduce_dtype() -> None:
    model = zero3(Mlp, mixed_precision=_WIDE_SUMS, accumulation="unsharded")
    full = [unit.nbytes for unit in layerzero.units(model)]
    for micro_batches, expected in ((1, full), (2, [2 * nbytes for nbytes in full])):
        with layerzero.ledger(model) as ledger:
            for number in range(micro_batches):
                with model.no_sync() if number + 1 < micro_batches else contextlib.nullcontext():
                    model(torch.ones(2, WIDTH)).sum().backward()
        assert [row.reduce_bytes for row in ledger.units] == expected


@on_ranks(2)
def test_mixed_precision_trains_bitwise_like_a_loop_by_hand() -> None:
    for precision, names in (
        (_WIDE_SUMS, _NAMES),
        (MixedPrecision(param_dtype=BF16), ["transformer", "unused_parts"]),
        (MixedPrecision(param_dtype=BF16, reduce_dtype="main"), ["transformer"]),
        (MixedPrecision(reduce_dtype=BF16), ["transformer", "unused_parts"]),
        (MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32), ["mlp"]),
    ):
        for name in names:
            _train(name, precision)
    _train("transformer", _WIDE_SUMS, layout="rows")


@on_ranks(2)
def test_norms_named_by_class_stay_in_float32() -> None:
    precision = dataclasses.replace(_WIDE_SUMS, keep_float32=(nn.RMSNorm,))
    seen: dict[str, torch.dtype] = {}
    model = zero3(Transformer, TransformerBlock, mixed_precision=precision)
    layer = model.layers[0]
    layer.mlp_norm.register_forward_hook(
        lambda module, args, output: seen.update(norm=module.weight.dtype, output=output.dtype)
    )
    layer.up.register_forward_pre_hook(
        lambda module, args: seen.update(linear=module.weight.dtype, input=args[0].dtype)
    )
    model(torch.zeros(1, 5, dtype=torch.long))
    assert seen == {"norm": torch.float32, "output": BF16, "linear": BF16, "input": BF16}, seen
    del model
    _train("transformer", precision)


def _look(own: Any, x: Tensor) -> Tensor:
    weight = own.layer.weight
    seen = {"input": x, "weight": weight, "offset": own.offset, "count": own.count}
    own.seen = {name: tensor.dtype for name, tensor in seen.items()}
    return own.layer(x.to(weight.dtype)) + own.offset


def _probe() -> nn.Module:
    """Tells what it sees in forward."""
    offset, count = nn.Buffer(torch.zeros(WIDTH)), nn.Buffer(torch.zeros((), dtype=torch.long))
    return Parts(_look, layer=nn.Linear(WIDTH, WIDTH), offset=offset, count=count)


def _dtypes(**precision: Any) -> dict[str, torch.dtype]:
    model = zero3(_probe, mixed_precision=MixedPrecision(**precision))
    batch = torch.zeros(2, WIDTH, requires_grad=True)
    output = model(batch)
    output.sum().backward()
    parameter = next(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    state = optimizer.state[parameter]["exp_avg"]
    assert parameter.grad is not None and batch.grad is not None
    main = {parameter.dtype, parameter.grad.dtype, state.dtype, batch.grad.dtype}
    assert main == {torch.float32}, f"weights, state or gradients, also the input's, are {main}"
    return {**model.module.seen, "output": output.dtype}


@on_ranks(2)
def test_each_dtype_reaches_what_it_is_for_and_main_weights_stay() -> None:
    float32 = torch.float32
    plain = dict.fromkeys(("input", "weight", "offset", "count", "output"), float32)
    plain["count"] = torch.long
    low = {**plain, "input": BF16, "weight": BF16}
    assert _dtypes() == plain
    assert _dtypes(reduce_dtype=BF16) == plain
    assert _dtypes(param_dtype=BF16) == low
    kept = _dtypes(param_dtype=BF16, keep_parameters=lambda name, p: name.startswith("layer."))
    assert kept == {**low, "weight": float32}
    assert _dtypes(param_dtype=BF16, cast_forward_inputs=False) == {**low, "input": float32}
    assert _dtypes(param_dtype=BF16, buffer_dtype=BF16) == {**low, "offset": BF16, "output": BF16}
    wide = {**low, "output": torch.float64}
    assert _dtypes(param_dtype=BF16, output_dtype=torch.float64) == wide
    assert _dtypes(buffer_dtype=torch.float64)["offset"] == torch.float64


def test_a_bad_dtype_is_refused_with_its_field() -> None:
    for field, value in {"param_dtype": torch.int32, "reduce_dtype": "bf16"}.items():
        with pytest.raises((TypeError, ValueError), match=field):
            MixedPrecision(**{field: value})
    with pytest.raises((TypeError, ValueError), match="keep_float32"):
        MixedPrecision(keep_float32=("RMSNorm",))


class _Masked(nn.Module):
    """A norm that takes several floating-point inputs, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, mask: Tensor | None, *others: Tensor, **named: Tensor) -> Tensor:
        taken = [each for each in (mask, *others, *named.values()) if each is not None]
        floating = [each for each in taken if each.is_floating_point()]
        assert {each.dtype for each in (self.weight, *floating)} == {torch.float32}
        return sum(floating, self.weight)


@on_ranks(2)
def test_outputs_of_a_float32_module_have_the_dtype_of_the_last_input_that_was_cast() -> None:
    precision = MixedPrecision(param_dtype=BF16, cast_forward_inputs=False, keep_float32=(_Masked,))
    model = ZeRO3(nn.Sequential(_Masked()), mixed_precision=precision)
    norm = model[0]
    wide, low, whole = torch.ones(WIDTH), torch.ones(WIDTH, dtype=BF16), torch.ones(WIDTH).half()
    with model.summon_full_params(), torch.no_grad():
        assert norm(wide, low).dtype == BF16
        assert norm(wide, hidden=low).dtype == BF16
        assert norm(low, wide).dtype == BF16
        assert norm(low, whole).dtype == torch.float16, "of the last one that was cast"
        assert norm(wide, wide).dtype == torch.float32
        assert norm(None, torch.arange(WIDTH)).dtype == torch.float32, "nothing to go back to"


@on_ranks(2)
def test_means_in_float16_do_not_overflow_where_sums_would() -> None:
    """The gradient of each element is its input: sums over ranks leave the range of float16."""
    precision = MixedPrecision(reduce_dtype=torch.float16)
    for group in (None, make_plain_group(timedelta(seconds=25))):
        for options in ({}, {"zero3_size": 1}):
            weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
            large = Parts(lambda own, x: (own.weight * x).sum(), weight=weight)
            model = ZeRO3(large, group, mixed_precision=precision, **options)
            for number in (1, 2):  # 60000 and 120000 in all: above 65504
                with model.no_sync() if number == 1 else contextlib.nullcontext():
                    model(torch.tensor(30000.0)).backward()
            gradients = full_gradients(model)
            assert gradients["weight"].eq(60000).all(), (group, options, gradients)


@on_ranks(2)
def test_buffers_of_ignored_modules_are_not_cast() -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH))
    ignored = model[1]
    precision = MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    model = ZeRO3(model, mixed_precision=precision, ignored_modules=[ignored])
    assert model[0].running_mean.dtype == BF16
    assert ignored.running_mean.dtype == ignored.weight.dtype == torch.float32


def autocast(model: nn.Module, **options: Any) -> torch.autocast:
    """The default for a wrapped model; without the cache for the plain one beside it."""
    defaults = {"dtype": torch.bfloat16, "cache_enabled": isinstance(model, ZeRO3)}
    return torch.autocast("cpu", **defaults | options)


def no_grad_pass_first(model: nn.Module, x: Tensor) -> Tensor:
    with autocast(model):
        with torch.no_grad():
            target = model(x.flip(0))
        loss = loss_of(model(x) - target)
    loss.backward()
    return loss.detach()


class _Stop(Exception):
    pass


def _stop(*_: object) -> None:
    raise _Stop


def after_a_pass_that_fails(model: nn.Module, x: Tensor) -> Tensor:
    with autocast(model):
        with pytest.raises(_Stop), model.blocks[1].register_forward_pre_hook(_stop):
            model(x)
        losses = []
        for part in (x, x * 0.5, x.flip(0)):
            losses.append(loss_of(model(part)))
            losses[-1].backward()
    return torch.stack(losses).sum().detach()


def with_a_part_in_float32(model: nn.Module, x: Tensor) -> Tensor:
    with autocast(model):
        first = model(x)
        assert torch.is_autocast_cache_enabled() is isinstance(model, ZeRO3), "as before the call"
        with autocast(model, enabled=False):
            second = model(x)
        loss = loss_of(first) + loss_of(second)
    loss.backward()
    return loss.detach()


def with_another_dtype(model: nn.Module, x: Tensor) -> Tensor:
    with autocast(model, dtype=torch.float16):
        loss = loss_of(model(x)) * 16
        loss.backward()
    with autocast(model):
        other = loss_of(model(x))
        other.backward()
    return loss.detach() + other.detach()


def with_gradients_in_the_forward(model: nn.Module, x: Tensor) -> Tensor:
    """A penalty on the input's gradient is computed between two forwards."""
    x = x.clone().requires_grad_()
    with autocast(model):
        (slope,) = torch.autograd.grad(loss_of(model(x)), x)
        loss = loss_of(model(x + slope.detach()))
    loss.backward()
    return loss.detach()


@on_ranks(2)
def test_autocasts_inside_each_other_are_bitwise_plain_torch() -> None:
    for run in (
        no_grad_pass_first,
        after_a_pass_that_fails,
        with_a_part_in_float32,
        with_another_dtype,
        with_gradients_in_the_forward,
    ):
        with named(run.__name__):
            assert_trains_alike(zero3(Mlp, Block), seeded(Mlp), mlp_batches(), run=run)
