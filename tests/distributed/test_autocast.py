"""Under torch.autocast a model trains as in plain torch, whatever passes share one autocast.

Autocast keeps the casts of float32 parameters until its outermost context ends. They join the
graphs of all passes that use them: in plain torch, and here.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.memory import live_bytes
from layerzero import BackwardPrefetch, GradScaler, MixedPrecision, ZeRO3
from tests.harness.checks import assert_bitwise, assert_same_parameters, named
from tests.harness.compare import assert_trains_alike, zero3
from tests.harness.internals import inner_units
from tests.harness.models import (
    WIDTH,
    Block,
    FrozenParts,
    Mlp,
    RepeatedModule,
    SharedModule,
    TiedAcrossUnits,
    TiedBlock,
    TiedInUnit,
    UnusedParts,
    loss_of,
)
from tests.harness.ranks import on_ranks
from tests.harness.recording import logged
from tests.harness.reference import OPTIMIZERS, forward_backward, full_parameters, seeded

Run = Callable[[nn.Module, Tensor], Tensor]


def autocast(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", **{"dtype": torch.bfloat16} | options)


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    return model.no_sync() if isinstance(model, ZeRO3) else contextlib.nullcontext()


def backward_after(loss_function: Run) -> Run:
    """Forwards in one autocast, and one backward after it."""

    @functools.wraps(loss_function)
    def run(model: nn.Module, x: Tensor) -> Tensor:
        with autocast():
            loss = loss_function(model, x)
        loss.backward()
        return loss.detach()

    return run


def backward_inside(run: Run) -> Run:
    """Forwards and backwards in one autocast."""

    @functools.wraps(run)
    def inside_autocast(model: nn.Module, x: Tensor) -> Tensor:
        with autocast():
            return run(model, x).detach()

    return inside_autocast


@backward_after
def outside(model: nn.Module, x: Tensor) -> Tensor:
    return loss_of(model(x))


@backward_inside
def inside(model: nn.Module, x: Tensor) -> Tensor:
    return forward_backward(model, x)


@backward_after
def no_grad_pass_first(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x.flip(0))
    return loss_of(model(x) - target)


@backward_after
def inference_pass_between(model: nn.Module, x: Tensor) -> Tensor:
    first = loss_of(model(x))
    with torch.no_grad():
        scale = loss_of(model(x.flip(0)).requires_grad_())
    return first + scale * loss_of(model(x * 2))


@backward_inside
def evaluation_first(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        model(x)
    return forward_backward(model.train(), x)


@backward_after
def two_forwards_one_backward(model: nn.Module, x: Tensor) -> Tensor:
    return loss_of(model(x)) + loss_of(model(x.flip(0))) + loss_of(model(x * 0.5))


def two_forwards_two_backwards(model: nn.Module, x: Tensor) -> Tensor:
    with autocast():
        losses = [loss_of(model(x)), loss_of(model(x * 0.5))]
    for loss in losses:
        loss.backward()
    return torch.stack(losses).sum().detach()


@backward_inside
def two_forwards_backwards_in_reverse(model: nn.Module, x: Tensor) -> Tensor:
    losses = [loss_of(model(x)), loss_of(model(x * 0.5))]
    for loss in reversed(losses):
        loss.backward()
    return torch.stack(losses).sum()


@backward_inside
def pairs(model: nn.Module, x: Tensor) -> Tensor:
    losses = [forward_backward(model, part) for part in (x, x * 0.5, x.flip(0))]
    return torch.stack(losses).sum()


@backward_inside
def pairs_interleaved(model: nn.Module, x: Tensor) -> Tensor:
    """One forward ahead of the backwards, as a pipeline does."""
    losses = [loss_of(model(x))]
    for part in (x * 0.5, x.flip(0)):
        losses.append(loss_of(model(part)))
        losses[-2].backward()
    losses[-1].backward()
    return torch.stack(losses).sum()


@backward_inside
def micro_batches_without_sync(model: nn.Module, x: Tensor) -> Tensor:
    with no_sync(model):
        losses = [forward_backward(model, part) for part in (x, x * 0.5)]
    return torch.stack([*losses, forward_backward(model, x.flip(0))]).sum()


@backward_after
def with_a_part_in_float32(model: nn.Module, x: Tensor) -> Tensor:
    first = model(x)
    with autocast(enabled=False):
        second = model(x)
    return loss_of(first) + loss_of(second)


def without_its_cache(model: nn.Module, x: Tensor) -> Tensor:
    with autocast(cache_enabled=False):
        loss = loss_of(model(x)) + loss_of(model(x.flip(0)))
    loss.backward()
    return loss.detach()


def with_another_dtype(model: nn.Module, x: Tensor) -> Tensor:
    with autocast(dtype=torch.float16):
        loss = loss_of(model(x)) * 16
        loss.backward()
    return loss.detach() + inside(model, x)


def with_gradients_in_the_forward(model: nn.Module, x: Tensor) -> Tensor:
    """A penalty on the input's gradient is computed between two forwards."""
    x = x.clone().requires_grad_()
    with autocast():
        (slope,) = torch.autograd.grad(loss_of(model(x)), x)
        loss = loss_of(model(x + slope.detach()))
    loss.backward()
    return loss.detach()


RUNS: tuple[Run, ...] = (
    outside,
    inside,
    no_grad_pass_first,
    inference_pass_between,
    evaluation_first,
    two_forwards_one_backward,
    two_forwards_two_backwards,
    two_forwards_backwards_in_reverse,
    pairs,
    pairs_interleaved,
    micro_batches_without_sync,
    with_a_part_in_float32,
    without_its_cache,
    with_another_dtype,
    with_gradients_in_the_forward,
)


def _batches(steps: int = 2) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    size = dist.get_world_size()
    return [[torch.randn(4, WIDTH, generator=generator) for _ in range(size)] for _ in range(steps)]


@on_ranks(2)
def test_every_order_of_passes_in_one_autocast_is_bitwise_plain_torch() -> None:
    for run in RUNS:
        with named(run.__name__):
            assert_trains_alike(zero3(Mlp, Block), seeded(Mlp), _batches(), run=run)


class Inside(nn.Module):
    """Enters autocast by itself, around parts of its forward; some of it runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.block = Block()
        self.last = Block()

    def forward(self, x: Tensor) -> Tensor:
        with autocast():
            with torch.no_grad():
                shift = self.block(x)
            x = self.stem(self.block(self.stem(x) + shift)).float()
        with autocast(), autocast(enabled=False):
            return self.last(x) + self.stem(x)


def enabled_inside_disabled(model: nn.Module, x: Tensor) -> Tensor:
    """No cast is in use around the model, and still none is dropped before the end."""
    with autocast(), autocast(enabled=False):
        return no_grad_pass_first(model, x) + pairs(model, x)


class Recomputed(nn.Module):
    """Regions of one block, of two, and inside a block."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.second, self.third = Block(), Block(), TiedBlock()

    def forward(self, x: Tensor) -> Tensor:
        x = self._recompute(self.first, x)
        x = self._recompute(lambda y: self.third(self.second(y)), x)
        return self.first(self._recompute(self.third, x))

    def _recompute(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        result: Tensor = checkpoint(function, x, use_reentrant=self.use_reentrant)
        return result


def reentrant(run: Run) -> Run:
    """Reentrant checkpoints want an input that requires grad."""

    def with_grad(model: nn.Module, x: Tensor) -> Tensor:
        return run(model, x.clone().requires_grad_())

    return with_grad


@on_ranks(2, timeout=120)
def test_casts_of_weights_that_several_calls_use_are_those_of_plain_torch() -> None:
    few: list[Run] = [no_grad_pass_first, two_forwards_one_backward, pairs_interleaved]
    models: list[tuple[Callable[[], nn.Module], tuple[type[nn.Module], ...]]] = [
        (RepeatedModule, (Block,)),
        (SharedModule, (Block,)),
        (TiedInUnit, (TiedBlock,)),
        (TiedAcrossUnits, (Block,)),
        (FrozenParts, (Block, nn.Linear)),
        (UnusedParts, (Block, nn.Linear)),
        (Mlp, ()),
    ]
    for number, (build, wrapped) in enumerate(models):
        for run in (few[number % 3], few[(number + 1) % 3]):
            with named(f"{build}, {run.__name__}"):
                assert_trains_alike(zero3(build, *wrapped), seeded(build), _batches(), run=run)
    for run in (outside, two_forwards_one_backward, pairs, enabled_inside_disabled):
        with named(f"Inside, {run.__name__}"):
            # Float32 sums over micro-batches, here after those over ranks.
            regrouped = run in (pairs, enabled_inside_disabled)
            model, reference = zero3(Inside, Block), seeded(Inside)
            assert_trains_alike(model, reference, _batches(), run=run, regrouped=regrouped)


@on_ranks(2)
def test_recomputation_in_an_autocast_is_bitwise_plain_torch() -> None:
    def whole(model: nn.Module, x: Tensor, use_reentrant: bool) -> Tensor:
        with autocast():
            loss = loss_of(checkpoint(model, x, use_reentrant=use_reentrant))
        loss.backward()
        return loss.detach()

    for number, run in enumerate([outside, inside, no_grad_pass_first, pairs, outside]):
        build = functools.partial(Recomputed, use_reentrant=bool(number % 2 or number == 4))
        with named(f"{build.keywords}, {run.__name__}"):
            model = zero3(build, Block, TiedBlock)
            assert_trains_alike(model, seeded(build), _batches(), run=reentrant(run))
    build = functools.partial(Recomputed, use_reentrant=False)
    waits = reentrant(micro_batches_without_sync)
    assert_trains_alike(zero3(build, Block, TiedBlock), seeded(build), _batches(), run=waits)
    for use_reentrant, each in ((False, Mlp), (True, Inside)):
        with named(f"{use_reentrant=}, all of {each.__name__}"):
            run = reentrant(functools.partial(whole, use_reentrant=use_reentrant))
            assert_trains_alike(zero3(each, Block), seeded(each), _batches(), run=run)


_OPTIONS: tuple[dict[str, Any], ...] = (
    {"forward_prefetch": 2, "limit_all_gathers": False},
    {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    {"reshard_after_forward": False, "backward_prefetch": None},
    {"zero3_size": 1},
    {"zero3_size": 1, "outer": "shard", "reshard_after_forward": "compute_shard"},
    {"accumulation": "sharded"},
)


@on_ranks(2)
def test_casts_follow_units_that_are_kept_prefetched_or_layered() -> None:
    runs = (no_grad_pass_first, two_forwards_one_backward, micro_batches_without_sync)
    for number, options in enumerate(_OPTIONS):
        run = runs[number % 3]
        with named(f"{options}, {run.__name__}"):
            model = zero3(Mlp, Block, **options)
            assert_trains_alike(model, seeded(Mlp), _batches(), run=run)


def _train(model: nn.Module, run: Run, scaler: torch.amp.GradScaler | None = None) -> list[Tensor]:
    optimizer = OPTIMIZERS["sgd_momentum"](model.parameters())
    losses = []
    for step in _batches(4):
        optimizer.zero_grad()
        x = step[dist.get_rank()]
        if scaler is None:
            losses.append(run(model, x))
            optimizer.step()
            continue
        with autocast(dtype=torch.float16):
            with torch.no_grad():
                target = model(x.flip(0))
            loss = loss_of(model(x) - target) + loss_of(model(x))
            if len(losses) == 2:
                loss = loss * 1e5  # overflows
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return losses


@on_ranks(2)
def test_autocast_is_bitwise_that_of_ddp_with_and_without_a_scaler() -> None:
    scalers = [GradScaler("cpu", init_scale=256.0), torch.amp.GradScaler("cpu", init_scale=256.0)]
    runs = (outside, no_grad_pass_first, two_forwards_one_backward, pairs, None)
    for run in runs:
        with named("a scaled run" if run is None else run.__name__):
            models = [zero3(Mlp, Block), DistributedDataParallel(seeded(Mlp))]
            losses = [
                _train(model, run or outside, None if run else scaler)
                for model, scaler in zip(models, scalers, strict=True)
            ]
            for step, (loss, expected) in enumerate(zip(*losses, strict=True)):
                assert_bitwise(loss, expected, f"loss of step {step}")
            parameters = [full_parameters(model) for model in (models[0], models[1].module)]
            assert_same_parameters(*parameters)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 128.0


class _Stop(Exception):
    pass


def _stop_in_the_middle(model: ZeRO3, x: Tensor) -> None:
    def stop(*_: object) -> None:
        raise _Stop

    with model.module.blocks[1].register_forward_pre_hook(stop):
        model(x)


@on_ranks(2)
def test_weights_summoned_and_passes_that_fail_inside_an_autocast() -> None:
    model, reference = zero3(Mlp, Block), seeded(Mlp)
    (x,) = [step[dist.get_rank()] for step in _batches(1)]
    for each in (model, reference):
        with autocast():
            with torch.no_grad():
                each(x)
            full = each.summon_full_params() if isinstance(each, ZeRO3) else torch.no_grad()
            with full, torch.no_grad():
                each.head.weight.mul_(2.0)
                F.linear(x, each.stem.weight)
            torch.clear_autocast_cache()  # or the plain model goes on with the old weights
            loss = loss_of(each(x))
            loss.backward()
            if each is model:
                own = loss.detach()
    assert_bitwise(own, loss.detach())
    with pytest.raises(_Stop), autocast():
        _stop_in_the_middle(model, x)
    model.zero_grad()
    assert_trains_alike(model, reference, _batches(), run=pairs)


WIDE = 256
LAYERS = 8
LAYER_NBYTES = 2 * WIDE * WIDE * 2
"""Of the weights of one block in bfloat16."""


class Wide(nn.Module):
    """Blocks whose weights outweigh everything else."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.blocks = nn.Sequential(*(Block(WIDE, WIDE) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


def _held(model: nn.Module, under: Callable[[], Any], inside: bool, grad: bool = True) -> int:
    """Bytes that a forward leaves, while its autocast is still entered or after it."""
    x = torch.zeros(1, WIDE)
    loss_of(model(x)).backward()  # what is made once
    model.zero_grad()
    gc.collect()
    before = live_bytes()
    with contextlib.ExitStack() as stack:
        stack.enter_context(under())
        stack.enter_context(torch.set_grad_enabled(grad))
        output = model(x)
        if not inside:
            stack.close()
        held = live_bytes() - before
    if grad:
        loss_of(output).backward()
        model.zero_grad()
    return held


@on_ranks(2)
def test_casts_take_no_more_memory_than_mixed_precision() -> None:
    mixed = zero3(Wide, Block, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    wanted = _held(mixed, contextlib.nullcontext, inside=True)
    model = zero3(Wide, Block)
    # The unit that stays after its forward is in float32 here, twice as much, and has its casts:
    # two more. The very first product saves no weight, so its cast stays in autocast's cache.
    spare = 3 * LAYER_NBYTES
    for inside in (False, True):
        assert _held(model, autocast, inside) - wanted < spare, f"{inside=}"
    recomputing = zero3(lambda: Wide(recomputes=True), Block)
    assert _held(recomputing, autocast, inside=True) - wanted < spare, "with recomputation"
    assert _held(model, autocast, inside=True, grad=False) < LAYER_NBYTES, "in evaluation"


@on_ranks(2)
def test_hooks_of_the_users_own_see_what_autograd_saves_once() -> None:
    """Hooks of others on what autograd saves see it all, once."""
    x = _batches(1)[0][dist.get_rank()]
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    counts = []
    for each in (model, plain):
        saved: list[Tensor] = []

        def pack(tensor: Tensor, saved: list[Tensor] = saved) -> int:
            saved.append(tensor.detach().clone())
            return len(saved) - 1

        with autocast(), torch.autograd.graph.saved_tensors_hooks(pack, saved.__getitem__):
            loss = loss_of(each(x))
        loss.backward()
        counts.append(len(saved))
    assert counts[0] == counts[1]
    with torch.autograd.graph.save_on_cpu():
        assert_trains_alike(zero3(Mlp, Block), seeded(Mlp), _batches(), run=pairs)


class _ChangesWhatWasSaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.linear(x))
        return y.mul_(2)


class _GivesItsCast(nn.Module):
    """Uses a cast that it made by itself, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.linear.weight.bfloat16()
        return F.linear(x, weight), weight


@on_ranks(2)
def test_casts_of_the_users_own_are_left_as_they_are() -> None:
    x = _batches(1)[0][dist.get_rank()].requires_grad_()
    model = zero3(lambda: nn.Sequential(_ChangesWhatWasSaved()), _ChangesWhatWasSaved)
    with autocast():
        loss = loss_of(model(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    module = seeded(_GivesItsCast)
    weight = module.linear.weight.detach().bfloat16()
    giver = ZeRO3(nn.Sequential(module, Block()), auto_wrap_policy={_GivesItsCast, Block})
    with autocast():
        hidden, cast = giver.module[0](x)
        giver.module[1](hidden.float())
    for unit in inner_units(giver):
        unit.reshard()
    assert_bitwise(cast.detach(), weight, "a cast that left its unit")


class _KeepsARef(nn.Module):
    """An operation that saves its own result, to which it keeps a weak reference; may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.results: list[weakref.ref[Tensor]] = []
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        result = torch.sigmoid(self.linear(x))
        self.results.append(weakref.ref(result))
        if self.raises:
            raise _Stop
        return result * 2


@on_ranks(2)
def test_a_pass_without_a_backward_leaves_nothing() -> None:
    """Nothing of them stays; neither does the model."""
    x = _batches(1)[0][dist.get_rank()]
    model = zero3(lambda: nn.Sequential(_KeepsARef()), _KeepsARef)
    inner = model.module[0]
    for raises in (False, True):
        inner.raises = raises
        with autocast(), contextlib.suppress(_Stop):
            loss_of(model(x))
    assert [ref() for ref in inner.results] == [None, None]
    inner.raises = False
    with autocast():
        loss = loss_of(model(x))
    loss.backward()
    ref = weakref.ref(model)
    del model, inner, loss
    gc.collect()
    assert ref() is None


@on_ranks(2)
def test_the_first_rank_logs_once_what_mixed_precision_would_save() -> None:
    model = zero3(FrozenParts, Block)
    with logged("layerzero.step.autocast") as lines:
        for x in (torch.ones(2, WIDTH), torch.zeros(2, WIDTH)):
            outside(model, x)
    text = "\n".join(lines)
    assert text.count("MixedPrecision") == int(dist.get_rank() == 0)
    assert bool(text) == ("casts of 224 frozen parameters stay until backward" in text)
