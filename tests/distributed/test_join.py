"""Ranks with uneven numbers of batches train as one process does on all batches (`join`).

A *plan* gives each rank the numbers of micro-batches of its steps: ((2, 1), (1,)) means that rank 0
takes a step of two and one of one, and rank 1 one of one. Every step adds the gradients of all its
micro-batches on all ranks.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import layerzero
from layerzero import ZeRO3
from layerzero.parallel.pipeline import ZeRO3PipelineStage
from tests.harness.checks import assert_close_in_float64, of_floats
from tests.harness.models import Block, Mlp
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import run_ranks
from tests.harness.simulated_device import simulated_device

TIMEOUT = timedelta(seconds=20)
Plan = tuple[tuple[int, ...], ...]


def _batch(rank: int, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 100 * step + micro)
    return torch.randn(3, 5, generator=generator, dtype=torch.float64)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output**2).mean()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Mlp().double()


def _optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)


def _train_here(plan: Plan, clips: float | None, active: bool = False) -> nn.Module:
    """One process on the batches of all ranks."""
    model = _model()
    optimizer, scheduler = _optimizer(model)
    for step in range(max(map(len, plan))):
        ranks = [rank for rank, steps in enumerate(plan) if len(steps) > step]
        for micro in range(max(plan[rank][step] for rank in ranks)):
            for rank in ranks:
                if micro < plan[rank][step]:
                    number = len(ranks) if active else len(plan)
                    (loss_of(model(_batch(rank, step, micro))) / number).backward()
        if clips is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clips)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


def _loop(model: ZeRO3, plan: Plan, clips: float | None, optimizer: Any, scheduler: Any) -> None:
    rank = dist.get_rank()
    for step, count in enumerate(plan[rank]):
        for micro in range(count):
            last = micro == count - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss_of(model(_batch(rank, step, micro))).backward()
        if clips is not None:
            model.clip_grad_norm_(clips)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def _train(plan: Plan, clips: float | None = None, active: bool = False, **settings: Any) -> ZeRO3:
    model = ZeRO3(_model(), auto_wrap_policy={Block}, timeout=TIMEOUT, **settings)
    optimizer, scheduler = _optimizer(model)
    with layerzero.join(model, optimizer, scheduler, divide_by_initial_world_size=not active):
        _loop(model, plan, clips, optimizer, scheduler)
    _check(model, plan, clips, active)
    steps = max(map(len, plan))
    assert scheduler.last_epoch == steps
    assert optimizer.param_groups[0]["lr"] == of_floats(0.05 * 0.8**steps)
    return model


def _check(model: ZeRO3, plan: Plan, clips: float | None, active: bool) -> None:
    expected = _train_here(plan, clips, active)
    assert model._root_state.join is None
    for name, parameter in model.named_parameters():
        assert parameter.grad is None, name
    with model.summon_full_params(writeback=False):
        for (name, ours), theirs in zip(
            model.named_parameters(), expected.parameters(), strict=True
        ):
            assert_close_in_float64(ours, theirs, f"{name} {plan}")


def _every_distribution(once: bool) -> None:
    """`once`: of those that differ in who is which rank alone, one."""
    each = list(itertools.product(range(4), repeat=dist.get_world_size()))
    if once:
        random.Random(0).shuffle(each)
        each = list({tuple(sorted(counts)): counts for counts in each}.values())
    for counts in each:
        if any(counts):
            clips = 0.05 if sum(counts) % 2 else None
            _train(tuple((1,) * count for count in counts), clips, active=counts[0] % 2 == 1)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_distribution_of_batches_trains_as_one_process(
    world_size: int, in_full: bool
) -> None:
    """On three ranks without those that another order of the ranks has; `make soak`: all."""
    run_ranks(world_size, _every_distribution, world_size > 2 and not in_full, timeout=120)


# Micro-batches --------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {},
    {"accumulation": "sharded"},
    {"accumulation": "unsharded", "reshard_after_forward": False},
    {"deterministic": True, "limit_all_gathers": 1},
    {"backward_prefetch": layerzero.BackwardPrefetch.BACKWARD_POST, "forward_prefetch": 2},
    {"reduction": layerzero.ReductionPolicy(in_flight="1MB")},
    {"offload": layerzero.OffloadPolicy(params=True, grads=True)},
]
LAYERED: list[dict[str, Any]] = [
    {"zero3_size": 2, "outer": outer, "accumulation": accumulation}
    for outer in ("zero1", "replicate", "shard")
    for accumulation in ("sharded", "unsharded")
]


def _random_plan(rng: random.Random, world_size: int) -> Plan:
    plan = tuple(
        tuple(rng.randint(1, 3) for _ in range(rng.randint(0, 3))) for _ in range(world_size)
    )
    return plan if any(plan) else ((1,), *plan[1:])


def _random_plans(seeds: range, settings: list[dict[str, Any]]) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        plan = _random_plan(rng, dist.get_world_size())
        clips = rng.choice([None, 0.05])
        chosen = settings[seed % len(settings)]
        try:
            _train(plan, clips, active=rng.random() < 0.5, **chosen)
        except Exception as error:
            raise AssertionError(f"seed {seed}, plan {plan}, {chosen}") from error


@pytest.mark.parametrize(
    ("world_size", "count", "settings"),
    [(2, 7, SETTINGS), pytest.param(4, 13, SETTINGS + LAYERED, marks=pytest.mark.slow)],
    ids=["2", "4"],
)
def test_random_numbers_of_micro_batches_train_like_one_process(
    world_size: int, count: int, settings: list[dict[str, Any]], pytestconfig: pytest.Config
) -> None:
    stop = pytestconfig.getoption("--seeds") or count
    for first in range(0, stop, 26):
        seeds = range(first, min(first + 26, stop))
        run_ranks(world_size, _random_plans, seeds, settings, timeout=120)


def _without_names_and_on_a_device() -> None:
    group = make_plain_group(TIMEOUT)
    _random_plans(range(3), [{"process_group": group}])
    for seed in range(2):
        with simulated_device(on_current_stream=seed == 1) as device:
            _random_plans(range(seed, seed + 1), [{"process_group": group}])
            assert device.findings == [], f"seed {seed}"


def test_they_do_where_messages_carry_no_name_and_on_a_device() -> None:
    run_ranks(2, _without_names_and_on_a_device, timeout=60)


# What a loop may do ---------------------------------------------------------------------

COUNTS = (3, 1)


def _wrapped(model: nn.Module | None = None, **settings: Any) -> ZeRO3:
    model = _model() if model is None else model
    return ZeRO3(model, auto_wrap_policy={Block}, timeout=TIMEOUT, **settings)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def _batches(counts: tuple[int, ...] = COUNTS) -> list[torch.Tensor]:
    rank = dist.get_rank()
    return [_batch(rank, step, 0) for step in range(counts[rank])]


def _plan(counts: tuple[int, ...] = COUNTS) -> Plan:
    return tuple((1,) * count for count in counts)


def _steps_of_all_kinds() -> None:
    for loop in LOOPS:
        model = _wrapped()
        optimizer = _sgd(model)
        with layerzero.join(model, optimizer):
            loop(model, optimizer)
        expected = _model()
        here = _sgd(expected)
        for step in range(max(COUNTS)):
            for rank, count in enumerate(COUNTS):
                if step < count:
                    (loss_of(expected(_batch(rank, step, 0))) / 2).backward()
            here.step()
            here.zero_grad()
        _same_weights(model, expected, loop.__name__)


def _zeroes_first(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for batch in _batches():
        optimizer.zero_grad(set_to_none=False)
        loss_of(model(batch)).backward()
        optimizer.step()


def _zeroes_in_place(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for batch in _batches():
        loss_of(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def _zeroes_before_backward(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for batch in _batches():
        loss = loss_of(model(batch))
        model.zero_grad()
        loss.backward()
        optimizer.step()


def _evaluates(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for step, batch in enumerate(_batches()):
        loss_of(model(batch)).backward()
        if step == dist.get_rank():
            with torch.no_grad():
                model.eval()
                model(batch)
                model.train()
        optimizer.step()
        optimizer.zero_grad()


def _reduces_later(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for batch in _batches():
        with model.no_sync():
            loss_of(model(batch)).backward()
        model.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()


def _forwards_twice(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    """A forward whose backward never runs, and a backward that is run twice."""
    for batch in _batches():
        with model.no_sync():
            model(batch)
            loss = loss_of(model(batch)) / 2
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _two_in_one(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for batch in _batches():
        halves = [loss_of(model(batch)) / 2 for _ in range(2)]
        sum(halves).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


LOOPS: list[Callable[[ZeRO3, torch.optim.Optimizer], None]] = [
    _zeroes_first,
    _zeroes_in_place,
    _zeroes_before_backward,
    _evaluates,
    _reduces_later,
    _forwards_twice,
    _two_in_one,
]


def _same_weights(model: ZeRO3, expected: nn.Module, what: str) -> None:
    with model.summon_full_params(writeback=False):
        for (name, ours), theirs in zip(
            model.named_parameters(), expected.parameters(), strict=True
        ):
            assert_close_in_float64(ours, theirs, f"{what}: {name}")


def test_loops_of_all_kinds() -> None:
    run_ranks(2, _steps_of_all_kinds, timeout=60)


# Models and optimizers ------------------------------------------------------------------


class Tied(nn.Module):
    """A frozen block, a block that runs twice, tied weights, a buffer, and checkpoints."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.frozen = Block().requires_grad_(False)
        self.twice = Block()
        self.unused = Block()
        self.last = Block()
        self.last.down.weight = self.twice.down.weight
        self.scale = nn.Parameter(torch.ones(5))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x * self.scale)
        for block in (self.twice, self.twice, self.last):
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


def _made(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype)


def _sum_of_ranks(
    make: Callable[[], nn.Module],
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]],
    **settings: Any,
) -> None:
    model, expected = _wrapped(_made(make), **settings), _made(make)
    ours, theirs = optimizers(model), optimizers(expected)
    with layerzero.join(model, *ours):
        for batch in _batches():
            loss_of(model(batch)).backward()
            model.clip_grad_norm_(0.3)
            for optimizer in ours:
                optimizer.step()
                optimizer.zero_grad()
    for step in range(max(COUNTS)):
        for rank, count in enumerate(COUNTS):
            if step < count:
                (loss_of(expected(_batch(rank, step, 0))) / 2).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 0.3)
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    _same_weights(model, expected, f"{make} {settings}")


def _two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    first = [p for name, p in named.items() if "up" in name]
    rest = [p for name, p in named.items() if "up" not in name]
    return [torch.optim.SGD(first, lr=0.1, momentum=0.5), torch.optim.Adam(rest, lr=0.01, eps=1e-3)]


def _models_and_optimizers() -> None:
    def one(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [_sgd(model)]

    for recomputes in (False, True):
        _sum_of_ranks(lambda r=recomputes: Tied(r), one)  # type: ignore[misc]
    _sum_of_ranks(Mlp, _two_optimizers)

    def native(model: nn.Module) -> list[torch.optim.Optimizer]:
        cls = layerzero.optim.SGD if isinstance(model, ZeRO3) else torch.optim.SGD
        return [cls(model.parameters(), lr=0.05, momentum=0.9)]

    _sum_of_ranks(Mlp, native)

    def whole(model: nn.Module) -> list[torch.optim.Optimizer]:
        options = {"lr": 0.05, "momentum": 0.9}
        if isinstance(model, ZeRO3):
            return [
                layerzero.optim.WholeTensorOptimizer(model.parameters(), torch.optim.SGD, **options)
            ]
        return [torch.optim.SGD(model.parameters(), **options)]

    _sum_of_ranks(Mlp, whole)


def test_models_and_optimizers_of_all_kinds() -> None:
    run_ranks(2, _models_and_optimizers, timeout=60)


def _steps_in_backward() -> None:
    model, expected = _wrapped(), _model()
    ours, theirs = _sgd(model), _sgd(expected)
    model.step_in_backward(ours)
    with layerzero.join(model, ours):
        for step, batch in enumerate(_batches()):
            ours.param_groups[0]["lr"] = 0.1 / (step + 1)
            loss_of(model(batch)).backward()
            ours.zero_grad()
    for step in range(max(COUNTS)):
        theirs.param_groups[0]["lr"] = 0.1 / (step + 1)
        for rank, count in enumerate(COUNTS):
            if step < count:
                (loss_of(expected(_batch(rank, step, 0))) / 2).backward()
        theirs.step()
        theirs.zero_grad()
    _same_weights(model, expected, "step_in_backward")


class SeesAndReads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sees, self.reads = Block(), Block()

    def forward(self, x: torch.Tensor, sees: bool) -> torch.Tensor:
        return self.reads(self.sees(x) if sees else x)


def _with_optional_modules(mean: str, active: bool) -> None:
    """Rank 0 sees in its steps 0 and 2, rank 1 in its only one."""
    counts = (4, 1)
    inner, expected = _made(SeesAndReads), _made(SeesAndReads)
    model = _wrapped(inner, optional_modules=[inner.sees], optional_mean=mean)
    ours, theirs = _sgd(model), _sgd(expected)
    for _ in range(2):  # Two epochs: the model's own regions come back.
        with layerzero.join(model, ours, divide_by_initial_world_size=not active):
            for step, batch in enumerate(_batches(counts)):
                loss_of(model(batch, step % 2 == 0)).backward()
                ours.step()
                ours.zero_grad()
        loss_of(model(_batch(dist.get_rank(), 9, 0), dist.get_rank() == 1)).backward()
        ours.step()
        ours.zero_grad()
        for step in range(max(counts)):
            here = [rank for rank, count in enumerate(counts) if step < count]
            batches = [(_batch(rank, step, 0), step % 2 == 0) for rank in here]
            _step_here(expected, theirs, batches, len(here) if active else 2, mean)
        last = [(_batch(rank, 9, 0), rank == 1) for rank in range(2)]
        _step_here(expected, theirs, last, 2, mean)
    _same_weights(model, expected, f"optional_modules {mean} {active}")


def _step_here(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[torch.Tensor, bool]],
    number: int,
    mean: str,
) -> None:
    for batch, sees in batches:
        loss_of(model(batch, sees)).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            seen = sum(sees for _, sees in batches)
            is_own = mean == "participants" and name.startswith("sees")
            parameter.grad /= seen if is_own else number
    optimizer.step()
    optimizer.zero_grad()


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Block(), Block(), Block()

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = self.second(self.first(x))
        return self.last(x)


def _one_rank_takes_another_way() -> None:
    """Once the others are out of batches, a rank gathers units again in some steps."""
    counts = (5, 2)

    def times(rank: int, step: int) -> int:
        return 2 if step > 1 and step % 2 == 0 else 1

    for under_torchs in (False, True):
        model, expected = _wrapped(_made(Loops)), _made(Loops)
        ours, theirs = _sgd(model), _sgd(expected)
        context = Join([model], optimizers=[ours]) if under_torchs else layerzero.join(model, ours)
        with context:
            for step, batch in enumerate(_batches(counts)):
                loss_of(model(batch, times(dist.get_rank(), step))).backward()
                ours.step()
                ours.zero_grad()
        for step in range(max(counts)):
            for rank, count in enumerate(counts):
                if step < count:
                    loss = loss_of(expected(_batch(rank, step, 0), times(rank, step)))
                    (loss / 2).backward()
            theirs.step()
            theirs.zero_grad()
        _same_weights(model, expected, f"another way, torch's Join: {under_torchs}")


def _special_modes() -> None:
    _steps_in_backward()
    _one_rank_takes_another_way()
    for mean, active in itertools.product(("all", "participants"), (False, True)):
        _with_optional_modules(mean, active)


def test_step_in_backward_and_optional_modules() -> None:
    run_ranks(2, _special_modes, timeout=60)


def _scaled(unscales: bool, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """Rank 0 overflows in step 1, where rank 1 is out; then the scale is set, and grows."""
    counts = (5, 1)
    model, expected = _wrapped(), _model()
    ours, theirs = make(model), torch.optim.AdamW(expected.parameters(), lr=0.01, eps=1e-3)
    scaler = layerzero.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    plain = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def finish(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, step: int) -> None:
        scaler.step(optimizer)
        scaler.update(16.0 if step == 2 else None)
        optimizer.zero_grad()

    with layerzero.join(model, ours, scaler):
        for step, batch in enumerate(_batches(counts)):
            factor = float("inf") if step == 1 else 1.0
            scaler.scale(factor * loss_of(model(batch))).backward()
            if unscales:
                scaler.unscale_(ours)
                model.clip_grad_norm_(0.05)
            finish(scaler, ours, step)
    for step in range(max(counts)):
        factor = float("inf") if step == 1 else 1.0
        for rank, count in enumerate(counts):
            if step < count:
                plain.scale(factor * loss_of(expected(_batch(rank, step, 0))) / 2).backward()
        if unscales:
            plain.unscale_(theirs)
            nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
        finish(plain, theirs, step)
    assert scaler.get_scale() == plain.get_scale() == 32.0
    _same_weights(model, expected, f"scaler {type(ours).__name__} {unscales}")


def _scalers() -> None:
    def whole(model: nn.Module) -> torch.optim.Optimizer:
        cls = layerzero.optim.WholeTensorOptimizer
        return cls(model.parameters(), torch.optim.AdamW, lr=0.01, eps=1e-3)

    for unscales in (True, False):
        for cls in (torch.optim.AdamW, layerzero.optim.AdamW):
            _scaled(unscales, lambda m, c=cls: c(m.parameters(), lr=0.01, eps=1e-3))  # type: ignore[misc]
        _scaled(unscales, whole)


def test_gradient_scalers() -> None:
    run_ranks(2, _scalers, timeout=60)


# Errors ---------------------------------------------------------------------------------


def _error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _raises_everywhere(
    loop: Callable[[ZeRO3, torch.optim.Optimizer], object],
    *parts: str,
    counts: tuple[int, ...] = COUNTS,
    **options: Any,
) -> None:
    """Every rank gets an error with these parts, and trains on afterwards."""
    model = _wrapped()
    ours = _sgd(model)

    def run() -> None:
        with layerzero.join(model, ours, **options):
            loop(model, ours)

    found = _error_of(run)
    assert any(part in found for part in parts), found
    model.zero_grad()
    ours = _sgd(model)
    for _ in range(2):
        with layerzero.join(model, ours):
            for batch in _batches((2, 1)):
                loss_of(model(batch)).backward()
        ours.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model(_batch(dist.get_rank(), 0, 0))).backward()
    ours.step()
    changed = [bool((p != b).any()) for p, b in zip(model.parameters(), before, strict=True)]
    assert any(changed)


def _step(model: ZeRO3, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    loss_of(model(batch)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _fails_between(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for step, batch in enumerate(_batches()):
        _step(model, optimizer, batch)
        if dist.get_rank() == 0 and step == 1:
            raise KeyError("no such image")


def _fails_in_forward(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for step, batch in enumerate(_batches()):
        is_bad = dist.get_rank() == 0 and step == 2
        _step(model, optimizer, batch[:, :2] if is_bad else batch)


def _fails_in_backward(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    def fail(_: torch.Tensor) -> None:
        raise KeyError("no such image")

    for step, batch in enumerate(_batches()):
        output = model(batch)
        if dist.get_rank() == 0 and step == 2:
            output.register_hook(fail)
        loss_of(output).backward()
        optimizer.step()
        optimizer.zero_grad()


def _summons(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for batch in _batches():
        with model.summon_full_params():
            pass
        _step(model, optimizer, batch)


def _saves(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for batch in _batches():
        _step(model, optimizer, batch)
        layerzero.checkpoint.get_model_state_dict(model, full=True)


def _takes_norms(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for batch in _batches():
        layerzero.global_norm(model)
        _step(model, optimizer, batch)


def _rewraps(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    layerzero.rewrap(model)


def _parts(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for batch in _batches((2, 2)):
        loss_of(model(batch)).backward()
        if dist.get_rank() == 0:
            model.clip_grad_norm_(1.0)
        optimizer.step()


def _steps_another(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    other = _sgd(model)
    for batch in _batches():
        _step(model, other, batch)


def _scales(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    scaler = layerzero.GradScaler("cpu")
    for batch in _batches():
        scaler.scale(loss_of(model(batch))).backward()
        scaler.step(optimizer)


def _scales_with_torchs(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for batch in _batches():
        scaler.scale(loss_of(model(batch))).backward()
        scaler.step(optimizer)


def _has_a_closure(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for batch in _batches():
        loss_of(model(batch)).backward()
        optimizer.step(lambda: 0.0)


def _has_stages(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))["pp"].get_group()
    stage = ZeRO3PipelineStage(model, 0, 1, torch.device("cpu"), group=alone)
    for _ in _batches():
        stage.clear_runtime_states()


def _nests(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    with layerzero.join(model, optimizer):
        pass


def _plain(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for batch in _batches():
        _step(model, optimizer, batch)


def _throws_under_torchs_join() -> None:
    model = _wrapped()
    optimizer = _sgd(model)

    def run() -> None:
        with Join([model], throw_on_early_termination=True, optimizers=[optimizer]):
            _plain(model, optimizer)

    assert ("Throwing across", "exhausted all inputs")[dist.get_rank()] in _error_of(run)


def _errors() -> None:
    _throws_under_torchs_join()
    _raises_everywhere(_fails_between, "KeyError", "rank 0 left the join with an error: KeyError")
    _raises_everywhere(_fails_in_forward, "mat1 and mat2", "rank 0 raised")
    _raises_everywhere(_fails_in_backward, "no such image", "rank 0 raised", "rank 0 left")
    _raises_everywhere(_summons, "some have no batches (rank 0: summon_full_params; rank 1: out")
    _raises_everywhere(_saves, "rank 0: get_model_state_dict; rank 1: out of batches")
    _raises_everywhere(_takes_norms, "rank 0: global_norm; rank 1: out of batches")
    _raises_everywhere(_rewraps, "rewrap: the model is inside a join")
    _raises_everywhere(_parts, "rank 0: clip_grad_norm_; rank 1: optimizer.step")
    _raises_everywhere(_steps_another, "pass every optimizer")
    _raises_everywhere(_scales, "a gradient scaler that the join does not have")
    _raises_everywhere(_scales_with_torchs, "a gradient scaler that the join does not have")
    _raises_everywhere(_has_a_closure, "SGD.step(closure) inside a join")
    _raises_everywhere(_has_stages, "join: not for pipeline stages")
    _raises_everywhere(_nests, "inside a join already")
    _raises_everywhere(
        _plain, "some ranks are out of batches (rank 0: a forward", throw_on_early_termination=True
    )


def test_errors_are_raised_on_every_rank() -> None:
    run_ranks(2, _errors, timeout=60)


# torch's Join ---------------------------------------------------------------------------


def _under_torchs_join() -> None:
    model, expected = _wrapped(), _model()
    assert isinstance(model, Joinable)
    ours, theirs = _sgd(model), _sgd(expected)
    root = model._root_state
    parts = [root, root.scheduler, root.reducer, root.backward, root.context]
    classes = [*map(type, parts)]
    with Join([model], optimizers=[ours]):
        _plain(model, ours)
        assert [*map(type, parts)] == classes, "no object changes its class"
    assert root.join is None and root.scheduler.agreed is None
    with Join([model], enable=False, optimizers=[ours]):
        _step(model, ours, _batch(dist.get_rank(), 7, 0))
    assert root.join is None and root.scheduler.agreed is None
    for step in range(max(COUNTS)):
        ranks = [rank for rank, count in enumerate(COUNTS) if step < count]
        _step_of_ranks(expected, theirs, ranks, step)
    _step_of_ranks(expected, theirs, [0, 1], 7)
    _same_weights(model, expected, "torch's Join")


def _optimizers_under_torchs_join() -> None:
    """Means over the ranks that have batches left, with each kind of optimizer."""
    makes: list[tuple[Callable[[nn.Module], torch.optim.Optimizer], Callable[..., Any]]] = [
        (lambda m: layerzero.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3), torch.optim.AdamW),
        (
            lambda m: layerzero.optim.WholeTensorOptimizer(
                m.parameters(), torch.optim.AdamW, lr=0.01, eps=1e-3
            ),
            torch.optim.AdamW,
        ),
    ]
    for make, plain in makes:
        model, expected = _wrapped(), _model()
        ours, theirs = make(model), plain(expected.parameters(), lr=0.01, eps=1e-3)
        with Join([model], divide_by_initial_world_size=False, optimizers=[ours]):
            _plain(model, ours)
        for step in range(max(COUNTS)):
            ranks = [rank for rank, count in enumerate(COUNTS) if step < count]
            _step_of_ranks(expected, theirs, ranks, step, len(ranks))
        _same_weights(model, expected, f"torch's Join, {type(ours).__name__}")


def _step_of_ranks(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: list[int],
    step: int,
    number: int = 2,
) -> None:
    for rank in ranks:
        (loss_of(model(_batch(rank, step, 0))) / number).backward()
    optimizer.step()
    optimizer.zero_grad()


def _even_batches_have_the_same_bits() -> None:
    models = [_wrapped(), _wrapped()]
    for joined, model in zip((False, True), models, strict=True):
        optimizer = _sgd(model)
        with layerzero.join(model, optimizer) if joined else contextlib.nullcontext():
            for batch in _batches((3, 3)):
                with model.no_sync():
                    loss_of(model(batch)).backward()
                loss_of(model(batch)).backward()
                model.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def _means_low_precision() -> None:
    """bfloat16 in forward and backward, sums of gradients in float32: to the bit, as powers of two
    divide and one rank alone has gradients."""
    policy = layerzero.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = []
    for alone in (False, True):
        torch.manual_seed(0)
        model = _wrapped(Mlp(), mixed_precision=policy)
        optimizer = _sgd(model)
        counts = (2, 0) if alone else (2, 2)
        with layerzero.join(model, optimizer, divide_by_initial_world_size=False):
            for step in range(counts[dist.get_rank()]):
                _step(model, optimizer, _batch(0, step, 0).float())
        models.append(model)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def _refuses() -> None:
    model = _wrapped()
    other = _wrapped()
    nested = ZeRO3(nn.Sequential(_wrapped(), nn.Linear(3, 3).double()), timeout=TIMEOUT)
    optimizer = _sgd(model)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: layerzero.join(nn.Linear(2, 2), optimizer), "expected a ZeRO3 module, got Linear"),
        (lambda: layerzero.join(model, model), "expected optimizers, learning-rate"),
        (lambda: layerzero.join(model, torch.amp.GradScaler("cpu")), "got torch.amp.grad_scaler"),
        (lambda: Join([model], optimizer=[optimizer]), "unexpected keyword argument 'optimizer'"),
        (
            lambda: layerzero.join(model, *[optimizer][: dist.get_rank()]),
            "optimizers differ between ranks",
        ),
        (lambda: layerzero.join(nested.module[0], optimizer), "join the outermost one"),
    ]
    for make, text in cases:

        def enter(make: Callable[[], Any] = make) -> None:
            with make():
                pass

        found = _error_of(enter)
        assert text in found, (text, found)

    for refused in (_tensor_parallel(), _with_experts()):
        found = _error_of(lambda m=refused: layerzero.join(m, _sgd(m)).__enter__())  # type: ignore[misc]
        assert "NotImplementedError: join: not for tensor-parallel models or experts" in found
    found = _error_of(lambda: Join([model, optimizer]))  # type: ignore[list-item]
    assert "'SGD' object has no attribute 'join_hook'" in found, found

    scheduled, _ = _optimizer(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with layerzero.join(model, scheduled):
                pass
    texts = [str(each.message) for each in caught if "join: the optimizer" in str(each.message)]
    assert len(texts) == (dist.get_rank() == 0), texts

    def several() -> None:
        with Join([model, other], optimizers=[optimizer]):
            other(_batch(0, 0, 0))

    # By torch, before anything hangs.
    assert "multiple process groups" in _error_of(several)
    with layerzero.join(model, optimizer):  # It is free again.
        _plain(model, optimizer)


def _tensor_parallel() -> ZeRO3:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    inner = _model()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(inner.blocks[0], mesh["tp"], plan)
    return ZeRO3(inner, process_group=mesh["dp"], auto_wrap_policy={Block}, timeout=TIMEOUT)


def _with_experts() -> ZeRO3:
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "edp"))["edp"]
    inner = _model()
    inner.experts = nn.ModuleDict({str(dist.get_rank()): Block().double()})

    def policy(module: nn.Module, fqn: str) -> Any:
        return {"process_group": alone} if "experts." in fqn else isinstance(module, Block)

    return ZeRO3(inner, auto_wrap_policy=policy, timeout=TIMEOUT)


def _models_are_freed_at_once() -> None:
    """No cycle of the join keeps them until a collection."""
    gc.collect()
    gc.disable()
    for joins in (False, True):
        model = _wrapped()
        optimizer = _sgd(model)
        with layerzero.join(model, optimizer) if joins else contextlib.nullcontext():
            _step(model, optimizer, _batch(0, 0, 0))
        alive = [weakref.ref(each) for each in (model._root_state, *model.parameters())]
        optimizer.zero_grad()
        del model, optimizer
        assert [reference() for reference in alive] == [None] * len(alive), joins
    gc.enable()


def _torchs_join_and_refusals() -> None:
    _under_torchs_join()
    _optimizers_under_torchs_join()
    _even_batches_have_the_same_bits()
    _means_low_precision()
    _refuses()
    _models_are_freed_at_once()


def test_torchs_join_even_batches_and_refusals() -> None:
    run_ranks(2, _torchs_join_and_refusals, timeout=60)
