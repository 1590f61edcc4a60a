"""Norms of whole parameters and gradients from shards, and gradients clipped by them. A gradient
that is not finite ends or skips the step, on all ranks alike (`on_nonfinite`)."""

import logging
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import GradScaler, MixedPrecision, ZeRO3
from layerzero.optim import AdamW, WholeTensorOptimizer, global_norm
from tests.distributed import test_experts as experts
from tests.harness.checks import (
    assert_bitwise,
    assert_norm,
    assert_same_on_all_ranks,
    assert_same_parameters,
)
from tests.harness.compare import assert_clips, assert_same_gradients, sharded, zero3
from tests.harness.fault_at import differences, snapshot
from tests.harness.internals import root_state
from tests.harness.models import CASES, Block, Case, Mlp
from tests.harness.ranks import on_ranks
from tests.harness.recording import logged
from tests.harness.reference import (
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_gradients,
    own_batch,
    plain,
    seeded,
)


def _with_gradients(case: Case) -> tuple[ZeRO3, nn.Module]:
    model, reference = sharded(case), plain(case)
    step = batches_of(case, dist.get_world_size(), steps=1)[0]
    forward_backward(model, step[dist.get_rank()])
    backward_of_all_ranks(reference, step)
    assert_same_gradients(model, reference)
    return model, reference


def _assert_norm(own: Tensor, tensors: list[Tensor], norm_type: float, what: str) -> None:
    assert own.dim() == 0
    assert_norm(own, tensors, norm_type, what)
    assert_same_on_all_ranks(own, what)


def _norms_of(name: str, norm_types: tuple[float, ...]) -> None:
    model, reference = _with_gradients(CASES[name])
    before = full_gradients(model)
    sharded_params = list(model.parameters())
    own = {p: p.grad.clone() for p in sharded_params if p.grad is not None}
    full = [p.grad for p in reference.parameters() if p.grad is not None]
    assert len(own) == len(full), "also of shards without elements"
    for norm_type in norm_types:
        what = f"{name}, norm {norm_type}"
        values = global_norm(sharded_params, norm_type)
        _assert_norm(values, list(reference.parameters()), norm_type, what)
        for parameter, gradient in own.items():
            parameter.grad = gradient.clone()
        norm = global_norm([p.grad for p in own], norm_type)
        _assert_norm(norm, full, norm_type, what)
        assert_bitwise(norm, global_norm(model, norm_type), what)
        # torch has no infinity norm of an empty tensor.
        total = float(nn.utils.get_total_norm([each for each in full if each.numel()], norm_type))
        assert_bitwise(norm, model.clip_grad_norm_(2.0 * total, norm_type), what)
        assert_same_parameters(full_gradients(model), before, what=f"{what}: not clipped")
        assert_clips(model, 0.3 * total, norm_type)
    for sharded_param, parameter in zip(sharded_params, reference.parameters(), strict=True):
        if parameter.numel():
            _assert_norm(global_norm(sharded_param), [parameter], 2.0, name)
    moments = [torch.full_like(sharded_param, 2.0) for sharded_param in sharded_params]
    expected = [torch.full_like(p, 2.0) for p in reference.parameters()]
    _assert_norm(global_norm(moments, like=sharded_params), expected, 2.0, "moments")


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_norms_are_those_of_whole_tensors(world_size: int) -> None:
    _norms_of("mlp", (2.0, 1.0, 3.0, 0.5, math.inf))
    for name in ("odd_shapes", "unused_parts", "frozen_parts", "tied_across_units", "mixed_dtypes"):
        _norms_of(name, (2.0, math.inf))


@on_ranks(2)
def test_norms_of_parts_and_of_several_models() -> None:
    plain = seeded(Mlp)
    model = zero3(Mlp, Block)
    blocks = model.blocks[1].parameters(), list(plain.blocks[1].parameters())
    _assert_norm(global_norm(blocks[0]), blocks[1], 2.0, "part")
    for norm_type in (2.0, math.inf):
        assert global_norm(model).item() == model.clip_grad_norm_(1.0, norm_type).item() == 0.0
    model.requires_grad_(False)
    assert model.clip_grad_norm_(1.0).item() == 0.0
    module = seeded(Mlp)
    model = ZeRO3(module, auto_wrap_policy={Block}, ignored_modules=[module.head])
    _assert_norm(global_norm(model.parameters()), list(plain.parameters()), 2.0, "with ignored")
    # Two models, in one norm, beside a module that is not sharded.
    other = zero3(Mlp)
    three = [*model.parameters(), *other.parameters(), *plain.parameters()]
    _assert_norm(global_norm(three), 3 * list(plain.parameters()), 2.0, "two models")
    _assert_norm(global_norm(plain.parameters()), list(plain.parameters()), 2.0, "unsharded")
    few = zero3(lambda: nn.Linear(1, 2, bias=False))  # The second rank has no element.
    few(torch.ones(1, 1)).sum().backward()
    assert_bitwise(few.clip_grad_norm_(100.0).float(), torch.tensor(2.0).sqrt(), "norm")


@on_ranks(2)
def test_what_has_no_norm_is_refused() -> None:
    model = zero3(Mlp, Block)
    sharded_params = list(model.parameters())
    for bad in (0.0, -1.0, math.nan):
        for take in (global_norm, lambda model, bad: model.clip_grad_norm_(1.0, bad)):
            with pytest.raises(ValueError, match="norm_type"):
                take(model, bad)
    with pytest.raises(ValueError, match="got none"):
        global_norm([])
    with pytest.raises(ValueError, match="like="):
        global_norm([torch.ones(3)])
    with pytest.raises(ValueError, match=r"zip\(\)"):
        global_norm([torch.ones(3)], like=sharded_params)
    with pytest.raises(ValueError, match=r"like this rank's shard of 'stem\.weight'"):
        global_norm([torch.ones(99)], like=sharded_params[:1])


@on_ranks(2)
def test_one_element_that_is_not_finite_shows_on_all_ranks() -> None:
    for value in (math.inf, math.nan):
        for norm_type in (2.0, math.inf):
            model, _ = _with_gradients(CASES["mlp"])
            if dist.get_rank() == 1:  # One element on one rank.
                next(each for each in model.parameters() if each.numel()).grad[0] = value
            norm = model.clip_grad_norm_(1.0, norm_type)
            assert math.isnan(norm.item()) if math.isnan(value) else math.isinf(norm.item())
            assert_same_on_all_ranks(torch.isfinite(norm).item(), "whether the norm is finite")


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_torchs_functions_give_the_norms_of_whole_tensors(world_size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for norm_type in (2.0, 1.0, math.inf):
            _torchs_norm(norm_type)


def _torchs_norm(norm_type: float) -> None:
    model, other = (_with_gradients(CASES["mlp"])[0] for _ in range(2))
    gradients = [p.grad for p in model.parameters()]
    expected = other.clip_grad_norm_(0.1, norm_type)
    plain = nn.Linear(3, 3)
    plain(torch.ones(3)).sum().backward()
    own = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    assert torch.equal(own, torch.linalg.vector_norm(torch.ones(12), norm_type))
    assert torch.equal(nn.utils.get_total_norm(gradients, norm_type), expected)
    values = nn.utils.get_total_norm(model.parameters(), norm_type)
    assert torch.equal(values, global_norm(other.parameters(), norm_type))
    assert torch.equal(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type), expected)
    for clipped, like in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(clipped.grad, like.grad)
    with torch.no_grad():
        gradients[0][:1] = torch.inf  # On ranks that have an element there.
    with pytest.raises(RuntimeError, match="over all ranks is inf"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "flat 8 bit": lambda p: AdamW(p, lr=0.1, state="8bit"),
    "whole": lambda p: WholeTensorOptimizer(p, torch.optim.AdamW, lr=0.1),
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"zero3_size": 1, "outer": "replicate"},
    {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    {"accumulation": "sharded"},
]


def build(make: Make, **arguments: Any) -> tuple[ZeRO3, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ZeRO3(Mlp(2), auto_wrap_policy={Block}, **arguments)
    return model, make(model.parameters())


def backward(model: ZeRO3, number: int, scale: float = 1.0) -> None:
    (model(own_batch(number)).float().square().sum() * scale).backward()


def bad_backward(model: ZeRO3, number: int, value: float = math.inf) -> None:
    """One whose gradient is not finite because of the last rank alone."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    backward(model, number, value if is_last else 1.0)


def step(model: ZeRO3, optimizer: torch.optim.Optimizer, number: int) -> None:
    with model.no_sync():
        backward(model, number)
    backward(model, number + 100)
    clip = getattr(optimizer, "clip_grad_norm_", model.clip_grad_norm_)
    clip(1.0)
    optimizer.step()
    optimizer.zero_grad()


def same_weights(one: ZeRO3, other: ZeRO3) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def _changed(before: list[Any], model: ZeRO3, optimizer: torch.optim.Optimizer) -> list[int]:
    """Places in a snapshot that differ now, but for orders of units, which are recorded."""
    wrong = differences(before, snapshot(model, optimizer))
    return [each for each in wrong if not isinstance(before[each], dict)]


def _skips(name: str, arguments: dict[str, Any]) -> None:
    model, optimizer = build(OPTIMIZERS[name], on_nonfinite="skip", **arguments)
    clean, clean_optimizer = build(OPTIMIZERS[name], **arguments)
    for number in range(2):
        step(model, optimizer, number)
        step(clean, clean_optimizer, number)
        before = snapshot(model, optimizer)
        state = repr(optimizer.state_dict())
        with model.no_sync():
            backward(model, 7)
        bad_backward(model, 8, math.nan if number else math.inf)
        norm = getattr(optimizer, "clip_grad_norm_", model.clip_grad_norm_)(1.0)
        assert norm.isfinite()
        backward(model, 9)  # It would step with a part of the gradients.
        optimizer.step()
        optimizer.zero_grad()
        assert repr(optimizer.state_dict()) == state
        assert not _changed(before, model, optimizer)
    step(model, optimizer, 50)
    step(clean, clean_optimizer, 50)
    assert same_weights(model, clean)


def _raises() -> None:
    for arguments in SETTINGS[:2]:
        model, optimizer = build(OPTIMIZERS["Adam"], on_nonfinite="raise", **arguments)
        clean, clean_optimizer = build(OPTIMIZERS["Adam"], **arguments)
        step(model, optimizer, 0)
        step(clean, clean_optimizer, 0)
        for each in (model, clean):
            backward(each, 1)  # `.grad` has something.
            with each.no_sync():
                backward(each, 2)
        model(own_batch(3))  # Its order is known.
        clean(own_batch(3))
        before = snapshot(model, optimizer)
        with pytest.raises(FloatingPointError, match=r"gradient of '[a-z0-9.]+' is not finite"):
            bad_backward(model, 3)
        assert not _changed(before, model, optimizer)
        for each, its in ((model, optimizer), (clean, clean_optimizer)):
            backward(each, 3)
            its.step()
        assert same_weights(model, clean)


def _names() -> None:
    model, _ = build(OPTIMIZERS["SGD"], on_nonfinite="raise")
    model.stem.requires_grad_(False)  # Its gradient would come behind those of the blocks.
    hook = model.blocks[1].down.register_full_backward_hook(
        lambda module, given, taken: (given[0] * math.nan,)
    )
    with pytest.raises(FloatingPointError, match=r"'blocks\.[01]\."):
        backward(model, 0)
    hook.remove()
    assert all(parameter.grad is None for parameter in model.parameters())
    backward(model, 0)


def _scales() -> None:
    model, optimizer = build(OPTIMIZERS["Adam"], on_nonfinite="skip")
    scaler = GradScaler("cpu", init_scale=4.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for number, factor in enumerate((1.0, math.inf, 1.0)):
        is_last = dist.get_rank() == dist.get_world_size() - 1
        loss = model(own_batch(number)).square().sum() * (factor if is_last else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
        assert scaler.get_scale() == (4.0 if number == 0 else 2.0)
        assert all(map(torch.equal, before, model.parameters())) == (number == 1)
        before = [parameter.detach().clone() for parameter in model.parameters()]


def _in_backward() -> None:
    model, optimizer = build(OPTIMIZERS["Adam"], on_nonfinite="skip")
    model.step_in_backward(optimizer)
    backward(model, 0)
    optimizer.zero_grad()
    before = snapshot(model, optimizer)
    bad_backward(model, 1)
    optimizer.zero_grad()
    assert not _changed(before, model, optimizer)
    backward(model, 2)
    assert differences(before, snapshot(model, optimizer))


def _ignored() -> None:
    torch.manual_seed(0)
    net = Mlp(2)
    model = ZeRO3(net, auto_wrap_policy={Block}, ignored_modules=[net.stem], on_nonfinite="skip")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [each.detach().clone() for each in model.parameters()]
    bad_backward(model, 0)
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def _low_precision() -> None:
    """The sum over ranks is finite where it is made, and not where it is kept."""
    torch.manual_seed(0)
    net = nn.Linear(2, 2, bias=False).half()
    model = ZeRO3(net, on_nonfinite="raise", gradient_reduction="sum")
    with pytest.raises(FloatingPointError, match="'weight'"):
        (model(torch.ones(1, 2, dtype=torch.float16)) * 60000).sum().backward()
    double = ZeRO3(nn.Linear(2, 2, bias=False).double(), on_nonfinite="raise")
    (double(torch.ones(1, 2, dtype=torch.float64)) * 1e200).sum().backward()
    assert double.weight.grad is not None


def _warns_once_a_step() -> None:
    with logged("layerzero", logging.WARNING) as records:
        model, optimizer = build(OPTIMIZERS["SGD"], on_nonfinite="skip")
        bad_backward(model, 0)
        optimizer.step()
    found = [each for each in records if "is not finite" in each]
    assert len(found) == (dist.get_rank() == 0)
    assert not root_state(model).reducer.kept.is_skipping


@pytest.mark.slow
@on_ranks(4)
def test_an_expert_that_some_ranks_have_is_named_on_all() -> None:
    """Ranks have other parameters, and a bad one that this rank may not have."""
    for action in ("raise", "skip"):
        model = experts.wrapped(2, on_nonfinite=action)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [each.detach().clone() for each in model.parameters()]
        name = f"layers.1.experts.each.{experts.EXPERTS - 1}"
        if name in dict(model.named_modules()):
            expert = model.get_submodule(name)
            expert.register_forward_pre_hook(lambda _, given: (given[0].detach(),))
            expert.register_forward_hook(
                lambda *given: given[2].register_hook(lambda grad: grad * math.nan) and None
            )
        x = torch.randn(64, experts.WIDTH)
        fails = pytest.raises(FloatingPointError, match=name)
        with fails if action == "raise" else nullcontext():
            forward_backward(model, x)
        optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))


@on_ranks(2)
def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    for name, arguments in zip(OPTIMIZERS, SETTINGS, strict=True):
        _skips(name, arguments)
    _raises()
    for each in (_names, _scales, _in_backward, _ignored, _low_precision, _warns_once_a_step):
        each()
    with pytest.raises(ValueError, match="on_nonfinite"):
        build(OPTIMIZERS["SGD"], on_nonfinite="stop")
    with pytest.raises(ValueError, match="on_nonfinite"):
        build(OPTIMIZERS["SGD"], on_nonfinite="skip" if dist.get_rank() else None)
