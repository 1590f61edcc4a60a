"""Ranks with uneven numbers of batches train as one process does on all batches (`join`), what that
costs, and errors.

A *plan* gives each rank the numbers of micro-batches of its steps: ((2, 1), (1,)) means that rank 0
takes a step of two and one of one, and rank 1 one of one. Every step adds the gradients of all its
micro-batches on all ranks.
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layerzero
from layerzero import ZeRO3, units
from layerzero.parallel.pipeline import ZeRO3PipelineStage
from tests.harness.checks import assert_close_in_float64, named, of_floats, recorded_warnings
from tests.harness.models import Block, Mlp, Routed, loss_of
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import on_ranks
from tests.harness.recording import counted_exchanges
from tests.harness.reference import full_parameters, on_meta, seeded
from tests.harness.simulated_device import simulated_device
from tests.harness.traffic import SentBytes

TIMEOUT = timedelta(seconds=20)
Plan = tuple[tuple[int, ...], ...]


def _counts(*counts: int) -> Plan:
    """Steps of one batch each."""
    return tuple((1,) * count for count in counts)


PLAN = _counts(3, 1)


def _batch(rank: int, step: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 100 * step + micro)
    return torch.randn(3, 5, generator=generator, dtype=torch.float64)


def _batches(plan: Plan = PLAN) -> list[Tensor]:
    """Of this rank."""
    rank = dist.get_rank()
    return [_batch(rank, step) for step in range(len(plan[rank]))]


def _wrapped(make: Callable[[], nn.Module] = Mlp, **settings: Any) -> ZeRO3:
    settings = {"auto_wrap_policy": {Block}, "timeout": TIMEOUT} | settings
    return ZeRO3(seeded(make).double(), **settings)


def _sgd(model: nn.Module, left_out: int = 0) -> torch.optim.Optimizer:
    given = [*model.parameters()][left_out:]
    return torch.optim.SGD(given, lr=0.05, momentum=0.9, weight_decay=0.1)


class Trainer:
    """A model, its optimizers and schedulers, and what a step of them is."""

    def __init__(
        self,
        model: nn.Module,
        *parts: Any,
        clips: float | None = None,
        route: Callable[[int, int], str] | None = None,
    ) -> None:
        """`route`: of a `Routed`, by rank and step."""
        self.model, self.clips, self.route = model, clips, route
        self.parts = parts or (_sgd(model),)
        self.is_sharded = isinstance(model, ZeRO3)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.parts[0]

    def loss(self, rank: int, step: int, micro: int = 0) -> Tensor:
        routes = [] if self.route is None else [self.route(rank, step)]
        return loss_of(self.model(_batch(rank, step, micro), *routes))

    def clip(self) -> None:
        if self.clips is not None and self.is_sharded:
            self.model.clip_grad_norm_(self.clips)
        elif self.clips is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clips)

    def finish(self, step: int) -> None:
        """After all backwards of a step."""
        self.clip()
        for part in self.parts:
            part.step()
        self.model.zero_grad()

    def train(self, plan: Plan) -> None:
        """On this rank's batches."""
        rank = dist.get_rank()
        for step, count in enumerate(plan[rank]):
            for micro in range(count):
                is_last = micro == count - 1
                with contextlib.nullcontext() if is_last else self.model.no_sync():
                    self.loss(rank, step, micro).backward()
            self.finish(step)

    def train_here(self, plan: Plan, active: bool = False) -> None:
        """On the batches of all ranks; `active`: means over the ranks that have some."""
        for step in range(max(map(len, plan))):
            ranks = [rank for rank, steps in enumerate(plan) if len(steps) > step]
            number = len(ranks) if active else len(plan)
            for rank in ranks:
                for micro in range(plan[rank][step]):
                    (self.loss(rank, step, micro) / number).backward()
            self.finish(step)


def _trains_alike(
    plan: Plan = PLAN,
    make: Callable[[], nn.Module] = Mlp,
    trainer: Callable[[nn.Module], Trainer] = Trainer,
    *,
    loop: Callable[[ZeRO3, torch.optim.Optimizer], None] | None = None,
    active: bool = False,
    under_torchs: bool = False,
    **settings: Any,
) -> tuple[Trainer, Trainer]:
    """Train on ranks inside a join (with `loop`, if given), and in one process; compare weights."""
    ours, theirs = trainer(_wrapped(make, **settings)), trainer(seeded(make).double())
    mean = {"divide_by_initial_world_size": not active}
    if under_torchs:
        context = Join([ours.model], optimizers=[ours.optimizer], **mean)
    else:
        context = layerzero.join(ours.model, *ours.parts, **mean)
    with context:
        if loop is None:
            ours.train(plan)
        else:
            loop(ours.model, ours.optimizer)
    theirs.train_here(plan, active)
    assert ours.model._root_state.join is None
    assert loop is not None or all(parameter.grad is None for parameter in ours.model.parameters())
    assert_close_in_float64(full_parameters(ours.model), full_parameters(theirs.model), "weight of")
    return ours, theirs


def _train(plan: Plan, clips: float | None, active: bool, **settings: Any) -> None:
    def trainer(model: nn.Module) -> Trainer:
        optimizer = _sgd(model, left_out=3 * active)  # Gradients of these are clipped, too.
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        return Trainer(model, optimizer, scheduler, clips=clips)

    with named(plan, settings):
        ours, _ = _trains_alike(plan, trainer=trainer, active=active, **settings)
    steps = max(map(len, plan))
    assert ours.parts[1].last_epoch == steps
    assert ours.optimizer.param_groups[0]["lr"] == of_floats(0.05 * 0.8**steps)


@on_ranks(2, timeout=120)
def test_every_distribution_of_batches_trains_as_one_process() -> None:
    for counts in itertools.product(range(4), repeat=2):
        if any(counts):
            clips = 0.05 if sum(counts) % 2 else None
            _train(_counts(*counts), clips, active=counts[0] % 2 == 1)


LOOPS = (
    *("zeroes first", "zeroes in place", "zeroes before backward", "evaluates", "reduces later"),
    *("runs a backward twice", "two forwards in a backward"),
)


def _loop(how: str, model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    twice = how == "runs a backward twice"
    for step, batch in enumerate(_batches()):
        if how == "zeroes first":
            optimizer.zero_grad(set_to_none=False)
        with model.no_sync() if twice or how == "reduces later" else contextlib.nullcontext():
            if twice:
                model(batch)  # Its backward never runs.
            number = 2 if how == "two forwards in a backward" else 1
            losses = [loss_of(model(batch)) for _ in range(number)]
            loss = torch.stack(losses).mean() / (2 if twice else 1)
            if how == "zeroes before backward":
                model.zero_grad()
            loss.backward(retain_graph=twice)
        if twice:
            loss.backward()
        elif how == "reduces later":
            model.reduce_gradients()
        elif how == "evaluates" and step == dist.get_rank():
            with torch.no_grad():
                model.eval()
                model(batch)
                model.train()
        optimizer.step()
        if how not in ("zeroes first", "zeroes before backward"):
            optimizer.zero_grad(set_to_none=how != "zeroes in place")


@on_ranks(2)
def test_loops_of_all_kinds() -> None:
    for how in LOOPS:
        with named(how):
            _trains_alike(loop=functools.partial(_loop, how))


class Half(Trainer):
    """The loss reads half of the outputs, so the last rank's part of the gradient is zeros. Each
    step is followed by one without a backward."""

    def loss(self, rank: int, step: int, micro: int = 0) -> Tensor:
        return loss_of(self.model(_batch(rank, step, micro))[:, :2])

    def finish(self, step: int) -> None:
        self.clip()
        self.optimizer.step()
        self.model.zero_grad(set_to_none=False)
        super().finish(step)


@on_ranks(2)
def test_gradients_that_are_zeros_are_cleared_or_not() -> None:
    make = functools.partial(nn.Linear, 5, 4, bias=False)
    for clips in (None, 0.05):
        trainer = functools.partial(Half, clips=clips)
        _trains_alike(((), (2, 2)), make, trainer, accumulation="sharded", auto_wrap_policy=None)


class Penalised(Trainer):
    """A gradient penalty; on rank 1 another forward runs between its two backwards."""

    def loss(self, rank: int, step: int, micro: int = 0) -> Tensor:
        x = _batch(rank, step, micro).requires_grad_()
        y = self.model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        other = self.model(x.detach() / 2) if rank else y
        return loss_of(y + other) + slope.square().mean()


@on_ranks(2)
def test_some_ranks_run_a_forward_amid_a_gradient_penalty() -> None:
    for plan in (((2, 1), (1, 2)), ((1,), (1, 1)), ((1, 1), (1,))):
        for reshards in (True, False):
            _trains_alike(plan, trainer=Penalised, reshard_after_forward=reshards)


class InBackward(Trainer):
    """Each step has a learning rate of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        if self.is_sharded:
            self.model.step_in_backward(self.optimizer)

    def loss(self, rank: int, step: int, micro: int = 0) -> Tensor:
        self.optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        return super().loss(rank, step, micro)

    def finish(self, step: int) -> None:
        if not self.is_sharded:
            self.optimizer.step()
        self.model.zero_grad()


class Sees(Trainer):
    """Block 0 may be skipped: rank 0 sees in its steps 0 and 2, rank 1 in its only one; in step 9
    rank 1 alone."""

    def __init__(self, model: nn.Module, active: bool) -> None:
        super().__init__(model, route=self.sees)
        self.active = active
        self.seen: list[bool] = []

    def sees(self, rank: int, step: int) -> str:
        self.seen.append(rank == 1 if step == 9 else step % 2 == 0)
        return "0 1 2" if self.seen[-1] else "1 2"

    def finish(self, step: int) -> None:
        """Gradients of what only some see are means over those that do."""
        number = len(self.seen) if self.active else 2
        for parameter in [] if self.is_sharded else self.model.blocks[0].parameters():
            if parameter.grad is not None:
                parameter.grad *= number / sum(self.seen)
        self.seen.clear()
        super().finish(step)


def _with_optional_modules(active: bool) -> None:
    plan = _counts(4, 1)
    expected, inner = seeded(Routed).double(), seeded(Routed).double()
    options = {"optional_modules": [inner.blocks[0]], "optional_mean": "participants"}
    model = ZeRO3(inner, auto_wrap_policy={Block}, timeout=TIMEOUT, **options)
    ours, theirs = (Sees(each, active) for each in (model, expected))
    for _ in range(2):  # Two epochs: the model's own regions come back.
        with layerzero.join(model, ours.optimizer, divide_by_initial_world_size=not active):
            ours.train(plan)
        ours.loss(dist.get_rank(), 9).backward()
        theirs.train_here(plan, active)
        for rank in range(2):
            (theirs.loss(rank, 9) / 2).backward()
        for each in (ours, theirs):
            each.finish(9)
    assert_close_in_float64(full_parameters(model), full_parameters(expected), "weight of")


@on_ranks(2)
def test_step_in_backward_other_ways_and_optional_modules() -> None:
    _trains_alike(trainer=InBackward)
    # Once the others are out of batches, a rank gathers units again in some steps.
    again = functools.partial(
        Trainer, route=lambda _, step: "0 1 0 1 2" if step > 1 and step % 2 == 0 else "0 1 2"
    )
    for torchs in (False, True):
        with named("another way", torchs):
            _trains_alike(_counts(5, 2), Routed, again, active=torchs, under_torchs=torchs)
    for active in (False, True):
        with named("optional modules", active):
            _with_optional_modules(active)


class Alone(Trainer):
    """Rank 1 evaluates, and runs a forward without a backward, while rank 0 does not; units stay
    unsharded before that or after, if at all."""

    unshards = "never"

    def train(self, plan: Plan) -> None:
        for when in ("before", "after"):
            for unit in units(self.model) if self.unshards == when else ():
                unit.unshard()
            if when == "before" and dist.get_rank() == 1:
                for _ in range(2):
                    with torch.no_grad():
                        self.model(_batch(1, 9))
                with self.model.no_sync():
                    self.model(_batch(1, 9))
        super().train(plan)


@on_ranks(2)
def test_passes_of_some_ranks_leave_the_same_state_on_all() -> None:
    layered = {"zero3_size": 1}
    smaller = layered | {"outer": "shard", "reshard_after_forward": "compute_shard"}
    for settings in ({}, layered, smaller, smaller | {"auto_wrap_policy": None}):
        for Alone.unshards in ("never", "before", "after"):
            with named(settings, Alone.unshards):
                _trains_alike(((3, 1), (1, 2)), trainer=Alone, **settings)
    _trains_alike(trainer=type("AloneInBackward", (Alone, InBackward), {}))


@on_ranks(2)
def test_torchs_join_may_be_off() -> None:
    ours, theirs = Trainer(_wrapped()), Trainer(seeded(Mlp).double())
    assert isinstance(ours.model, Joinable)
    root = ours.model._root_state
    for enable, plan in ((True, PLAN), (False, _counts(1, 1))):
        with Join([ours.model], enable=enable, optimizers=[ours.optimizer]):
            ours.train(plan)
            assert (root.join is not None) == enable
        assert root.join is None and not root.extensions.before_use
        theirs.train_here(plan)
    assert_close_in_float64(full_parameters(ours.model), full_parameters(theirs.model), "weight of")


@on_ranks(2)
def test_a_rank_without_a_batch_takes_part_in_the_check_of_loaded_values() -> None:
    twin = seeded(Mlp).double()
    options = {"auto_wrap_policy": {Block}, "param_init_fn": "later", "timeout": TIMEOUT}
    model = ZeRO3(on_meta().double(), **options)
    model.load_state_dict(twin.state_dict())
    ours, plan = Trainer(model), _counts(2, 0)
    with layerzero.join(model, ours.optimizer):
        ours.train(plan)
    Trainer(twin).train_here(plan)
    assert_close_in_float64(full_parameters(model), full_parameters(twin), "weight of")


@on_ranks(2)
def test_calls_without_a_backward_leave_ranks_in_step() -> None:
    loses = functools.partial(Trainer, route=lambda *_: "0 -1 1 2")
    ours, theirs = _trains_alike(_counts(0, 2), Routed, loses)
    ours.train(_counts(1, 1))
    theirs.train_here(_counts(1, 1))
    assert_close_in_float64(full_parameters(ours.model), full_parameters(theirs.model), "weight of")
    _trains_alike(((2, 1), (1, 1)), Routed, loses)


def _calls(trainer: Trainer, step: int) -> dict[str, Callable[[], Any]]:
    """The calls of one step, in order."""
    losses: list[Tensor] = []
    return {
        "forward": lambda: losses.append(trainer.loss(dist.get_rank(), step)),
        "backward": lambda: losses[0].backward(),
        "clip": trainer.clip,
        "step": trainer.optimizer.step,
        "zero_grad": trainer.optimizer.zero_grad,
    }


def _watched(joins: bool, watch: Callable[[Callable[[], Any]], Any], **settings: Any) -> Any:
    """What `watch` returns of each call of each step, by name; rank 1 is out after step 1."""
    trainer = Trainer(_wrapped(**settings), clips=1.0)
    context = layerzero.join(trainer.model, trainer.optimizer)
    with context if joins else contextlib.nullcontext():
        return [
            {name: watch(call) for name, call in _calls(trainer, step).items()}
            for step in range((4, 2)[dist.get_rank()] if joins else 2)
        ]


@on_ranks(2)
def test_a_step_has_four_exchanges_and_more_once_ranks_follow() -> None:
    """It sends what it does outside of a join, and the exchanges' integers."""

    def watch(call: Callable[[], Any]) -> tuple[int, int]:
        with counted_exchanges() as sizes, SentBytes() as counter:
            call()
        return len(sizes), counter.nbytes - sum(sizes)

    together = {"forward": 1, "backward": 1, "clip": 1, "step": 1, "zero_grad": 0}
    # Three blocks and the root: before each gather and reduction, and at the end; in backward also
    # which gradients exist.
    followed = {"forward": 4 + 2, "backward": 2 * 4 - 1 + 3}
    plain, joined = (_watched(joins, watch) for joins in (False, True))
    for step, calls in enumerate(joined):
        expected = together | (followed if step >= 2 else {})
        assert {name: number for name, (number, _) in calls.items()} == expected, step
    for ours, theirs in zip(joined[:2], plain, strict=True):
        assert [sent for _, sent in ours.values()] == [sent for _, sent in theirs.values()]


@on_ranks(2)
def test_a_join_adds_no_wait_for_a_device_and_no_access_that_is_not_ordered() -> None:
    waits = []
    for joins in (False, True):
        with simulated_device(on_current_stream=joins) as device:

            def watch(call: Callable[[], Any], waits: list[Any] = device.host_waits) -> set[str]:
                waits.clear()
                call()
                return set(map(str, waits))

            found = _watched(joins, watch, process_group=make_plain_group(TIMEOUT))
            waits.append(set[str]().union(*(each for step in found[1:] for each in step.values())))
            assert device.findings == [], device.findings
    assert waits[1] <= waits[0], waits


def _steps(
    model: ZeRO3,
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any] | None = None,
    before: Callable[..., Any] = lambda model: None,
) -> None:
    """A loop over PLAN's batches, with `before` each forward and `step` in the optimizer's place.
    On rank 1 it comes to the end first."""
    for batch in _batches():
        before(model)
        loss_of(model(batch)).backward()
        optimizer.step() if step is None else step(model, optimizer)


def _with_scaler(scaler_class: Any, is_native: bool, model: ZeRO3, optimizer: Any) -> None:
    scaler = scaler_class("cpu")
    optimizer = layerzero.optim.AdamW(model.parameters()) if is_native else optimizer
    for batch in _batches():
        scaler.scale(loss_of(model(batch))).backward()
        scaler.step(optimizer)


def _clips_on_rank_0(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    if dist.get_rank() == 0:
        model.clip_grad_norm_(1.0)
    optimizer.step()


def _has_stages(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))["pp"].get_group()
    stage = ZeRO3PipelineStage(model, 0, 1, torch.device("cpu"), group=alone)
    for _ in _batches():
        stage.clear_runtime_states()


_SCALERS = (
    (layerzero.GradScaler, False),
    (layerzero.GradScaler, True),
    (torch.amp.GradScaler, False),
)
ERRORS: list[tuple[str, Callable[[ZeRO3, torch.optim.Optimizer], Any]]] = [
    (
        "some have no batches (rank 0: global_norm; rank 1: out of",
        lambda *both: _steps(*both, before=layerzero.global_norm),
    ),
    (
        "rank 0: clip_grad_norm_; rank 1: optimizer.step",
        lambda *both: _steps(*both, step=_clips_on_rank_0),
    ),
    ("rewrap: the model is inside a join", lambda model, _: layerzero.rewrap(model)),
    ("pass every optimizer", lambda model, _: _steps(model, _sgd(model))),
    (
        "SGD.step(closure) inside a join",
        lambda *both: _steps(*both, step=lambda _, optimizer: optimizer.step(lambda: 0.0)),
    ),
    *(("a gradient scaler inside", functools.partial(_with_scaler, *case)) for case in _SCALERS),
    ("join: does not work around pipeline stages", _has_stages),
    ("inside a join already", lambda *both: layerzero.join(*both).__enter__()),
]
"""Words of the error on every rank, and what a loop does."""


def _raises(loop: Callable[..., Any], words: str, join: Callable[..., Any]) -> None:
    """Every rank gets an error with these words, and trains on afterwards."""
    model = _wrapped()
    optimizer = _sgd(model)
    with pytest.raises(Exception, match=re.escape(words)), join(model, optimizer):
        loop(model, optimizer)
    model.zero_grad()
    ours, theirs = Trainer(model), Trainer(seeded(Mlp).double())
    theirs.model.load_state_dict(full_parameters(model))
    with layerzero.join(model, ours.optimizer):
        ours.train(_counts(1, 0))
    theirs.train_here(_counts(1, 0))
    assert_close_in_float64(full_parameters(model), full_parameters(theirs.model), "weight of")


@on_ranks(2)
def test_errors_are_raised_on_every_rank_and_all_train_on() -> None:
    for words, loop in ERRORS:
        _raises(loop, words, layerzero.join)
    throwing = {"throw_on_early_termination": True}
    text = ("Throwing across", "exhausted all inputs")[dist.get_rank()]
    _raises(_steps, text, lambda m, o: Join([m], optimizers=[o], **throwing))


@on_ranks(2)
def test_what_cannot_join_is_refused() -> None:
    rank, model = dist.get_rank(), _wrapped()
    nested = ZeRO3(nn.Sequential(_wrapped(), nn.Linear(3, 3).double()), timeout=TIMEOUT)
    optimizer = _sgd(model)
    features = "join: tensor-parallel models and experts have collectives"
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("expected a ZeRO3 module, got Linear", (nn.Linear(2, 2), optimizer)),
        ("expected optimizers and learning-rate", (model, model)),
        ("got layerzero.optim.scaler", (model, layerzero.GradScaler("cpu"))),
        ("optimizers differ between ranks", (model, *[optimizer][:rank])),
        ("join the outermost one", (nested.module[0], optimizer)),
        (features, (_tensor_parallel(),)),
        (features, (_with_experts(),)),
    ]
    for words, given in cases:
        with pytest.raises(Exception, match=re.escape(words)):
            layerzero.join(*given).__enter__()
    scheduled = _sgd(model)
    torch.optim.lr_scheduler.StepLR(scheduled, 1, 0.8)
    with recorded_warnings() as texts:
        for _ in range(2):
            with layerzero.join(model, scheduled):
                pass
    assert len([text for text in texts if "join: the optimizer" in text]) == (rank == 0), texts
    with layerzero.join(model, optimizer):  # It is free again.
        _steps(model, optimizer)


def _tensor_parallel() -> ZeRO3:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    split = functools.partial(parallelize_module, device_mesh=mesh["tp"], parallelize_plan=plan)
    return _wrapped(lambda: split(Block()), process_group=mesh["dp"])


def _with_experts() -> ZeRO3:
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "edp"))["edp"]
    group = {"process_group": alone}
    return _wrapped(
        lambda: nn.ModuleDict({str(dist.get_rank()): Block(), "shared": Block()}),
        auto_wrap_policy=lambda part, fqn: group if fqn.isdigit() else isinstance(part, Block),
    )
