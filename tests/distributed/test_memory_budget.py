"""`ZeRO3(memory_budget=...)`: what is chosen holds the budget, and a larger one gathers less; and
`plan_memory` against the storages of real steps on gloo: models, settings, features."""

import gc
import itertools
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from layerzero import (
    BackwardPrefetch,
    MixedPrecision,
    OffloadPolicy,
    ReductionPolicy,
    ZeRO3,
    join,
    optim,
    plan_memory,
    rewrap,
)
from layerzero.memory_budget import MemoryChoice
from layerzero.memory_budget.learner import Learned, Settings
from layerzero.memory_budget.storages import StorageCount
from tests.harness.counted_memory import Measured, measure, watching
from tests.harness.internals import Extension
from tests.harness.models import Parts, tensors_of
from tests.harness.planned_models import CASES, Batch, Block, Tower
from tests.harness.ranks import KeptRanks, of_all_ranks, on_ranks, run_ranks
from tests.harness.recording import logged
from tests.harness.traffic import SentBytes

HUGE = "1TB"
LEARNED = 5
BFLOAT16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Outcome(NamedTuple):
    learned: int
    """The most bytes in a step of those that are learned from."""
    held: int
    """The most bytes in a step after the choice."""
    sent: int
    """Bytes that this rank sends in the last step."""
    choice: MemoryChoice | None
    error: str


def _train(
    case: str,
    budget: int | str,
    arguments: dict[str, Any],
    micro_batches: int = 1,
    make_optimizer: Callable[..., Any] = torch.optim.AdamW,
    steps: int = 4,
    repeats_batch: int = 1,
) -> Outcome:
    """Train on this rank, and count all storages as `plan_memory` does. Collective."""
    of_case = CASES[case]
    count = StorageCount()
    torch.manual_seed(0)
    peaks = []
    with watching(count):
        args, kwargs = of_case.batch()
        args = tuple(each.repeat(repeats_batch, *[1] * (each.ndim - 1)) for each in args)
        try:
            given = {"auto_wrap_policy": of_case.units, **arguments}
            model = ZeRO3(of_case.make(), memory_budget=budget, **given)
            optimizer = make_optimizer(model.parameters(), lr=1e-4)
            for _ in range(LEARNED + steps):
                gc.collect()
                count.restart()
                with SentBytes() as sent:
                    for number in range(micro_batches):
                        model.set_requires_gradient_sync(number == micro_batches - 1)
                        _backward(model, args, kwargs)
                    optimizer.step()
                    optimizer.zero_grad()
                peaks.append(count.peak)
        except (RuntimeError, ValueError) as error:
            return Outcome(0, 0, 0, None, str(error))
    return Outcome(
        max(peaks[1:LEARNED]), max(peaks[LEARNED:]), sent.nbytes, model.memory_choice, ""
    )


def _backward(model: nn.Module, args: Any, kwargs: Any) -> None:
    parts = [part for part in tensors_of(model(*args, **kwargs)) if part.requires_grad]
    torch.stack([part.float().sum() for part in parts]).sum().backward()


def _climb(
    case: str, arguments: dict[str, Any], shares: list[float], micro_batches: int = 1
) -> list[Outcome]:
    """With all memory; then with the least and these shares of what is above it."""
    free = _train(case, HUGE, arguments, micro_batches)
    assert free.choice is not None, free.error
    least, most = free.choice.least_bytes, free.choice.most_bytes
    budgets = [round(least + share * (most - least)) for share in shares]
    return [free, *(_train(case, budget, arguments, micro_batches) for budget in budgets)]


def _check(name: str, ranks: list[list[Outcome]]) -> None:
    for outcomes in ranks:
        for own, first in zip(outcomes, ranks[0], strict=True):
            assert own.choice is not None, (name, own.error)
            assert own.choice == first.choice, name
            budget = own.choice.budget_bytes
            assert own.held <= own.choice.bound_bytes <= budget, (name, own)
            assert own.learned <= own.choice.least_bytes, (name, own)
            assert own.choice.least_bytes <= budget
        free, *climbed = outcomes
        sent = [each.sent for each in (*climbed, free)]
        assert sent == sorted(sent, reverse=True), (name, sent)
        kept = [set(each.choice.kept) for each in (*climbed, free) if each.choice]
        assert all(below <= above for below, above in itertools.pairwise(kept)), name


def test_the_budget_is_held_and_a_larger_one_gathers_less(ranks: KeptRanks) -> None:
    each = ranks(2, _climb, "tower", {}, [0.0, 0.7, 1.0], timeout=120)
    _check("tower", each)
    least, some, most = each[0][1:]
    assert least.choice is not None and not least.choice.kept
    assert some.choice is not None and some.choice.kept
    assert least.sent > some.sent > most.sent


@pytest.mark.slow
def test_the_budget_is_held_in_layered_mode(ranks: KeptRanks) -> None:
    arguments = {"zero3_size": 2, "mixed_precision": BFLOAT16}
    _check("layered", ranks(4, _climb, "nested units", arguments, [0.4], timeout=120))


@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_steps_of_micro_batches_and_of_other_optimizers_hold_the_budget() -> None:
    climbed = _climb("tower", {}, [0.6], micro_batches=3)
    native = {
        make.__name__: _train("tower", HUGE, {}, make_optimizer=make)
        for make in (optim.AdamW, torch.optim.SGD)
    }
    each = of_all_ranks((climbed, native))
    _check("micro-batches", [climbed for climbed, _ in each])
    for _, native in each:
        for name, own in native.items():
            assert own.choice is not None, own.error
            assert own.held <= own.choice.bound_bytes, name


@on_ranks(2, timeout=120)
def test_ranks_with_batches_of_other_sizes_choose_alike() -> None:
    repeats = 1 + 7 * dist.get_rank()
    free = _train("many tokens", HUGE, {}, repeats_batch=repeats)
    assert free.choice is not None, free.error
    middle = (free.choice.least_bytes + free.choice.most_bytes) // 2
    (free, middle), (larger_free, larger) = of_all_ranks(
        (free, _train("many tokens", middle, {}, repeats_batch=repeats))
    )
    assert free.choice == larger_free.choice and middle.choice == larger.choice
    assert middle.choice is not None and middle.choice.kept
    assert free.learned < larger_free.learned <= larger.choice.least_bytes
    assert larger.held <= middle.choice.budget_bytes


def _kept_blocks(module: nn.Module, fqn: str) -> Any:
    return isinstance(module, Block) and {"reshard_after_forward": False}


@on_ranks(2)
def test_what_cannot_be_held_is_refused_on_every_rank() -> None:
    free = _train("tower", HUGE, {})
    assert free.choice is not None
    least = free.choice.least_bytes
    for budget, arguments, message in (
        ("1kB", {}, "a step needs at least"),
        (least - 1, {}, f"a step needs at least {least:,} bytes"),
        (HUGE, {"reshard_after_forward": False}, "leave out reshard_after_forward"),
        (HUGE, {"forward_prefetch": 2}, "prefetched; leave out forward_prefetch"),
        (HUGE, {"auto_wrap_policy": _kept_blocks}, "reshard_after_forward"),
        (10**9 + dist.get_rank(), {}, "memory_budget"),
    ):
        assert message in _train("tower", budget, arguments).error
    for value in ("forty", 0, True, 4.5e9):
        with pytest.raises((TypeError, ValueError), match="memory_budget"):
            ZeRO3(Tower(), memory_budget=value)
    module = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="leave out memory_budget"):
        ZeRO3(module, memory_budget=HUGE)
    model = ZeRO3(nn.Linear(2, 2), memory_budget=HUGE)
    model.compile()
    with pytest.raises(ValueError, match="leave out memory_budget"):
        model(torch.ones(1, 2))


class _Resizes(Extension):
    def __init__(self) -> None:
        self.nbytes: Counter[int] = Counter()

    def resized(self, storage: torch.UntypedStorage) -> None:
        self.nbytes[storage.nbytes()] += 1


@on_ranks(2)
def test_each_resize_is_an_event_of_the_extensions_of_its_own_model() -> None:
    arguments: tuple[dict[str, Any], ...] = (
        {},
        {"mixed_precision": BFLOAT16, "offload": OffloadPolicy(grads=True)},
        {"mixed_precision": BFLOAT16, "zero3_size": 1},
        {"arena": True},
    )
    resize = torch.UntypedStorage.resize_
    for given in arguments:
        seen: Counter[int] = Counter()

        def counted(storage: torch.UntypedStorage, nbytes: int, seen: Any = seen) -> Any:
            seen[nbytes] += 1
            return resize(storage, nbytes)

        model, other = (ZeRO3(Tower(), auto_wrap_policy={Block}, **given) for _ in range(2))
        events, others = _Resizes(), _Resizes()
        model._root_state.extensions.add(events)
        other._root_state.extensions.add(others)
        with mock.patch.object(torch.UntypedStorage, "resize_", counted):
            for _ in range(3):
                with model.no_sync():
                    model(torch.ones(3, 96)).sum().backward()
                model(torch.ones(3, 96)).sum().backward()
                model.zero_grad()
            model._root_state.extensions.remove(events)
        assert events.nbytes == seen and min(seen) == 0 < max(seen), given
        model(torch.ones(3, 96)).sum().backward()
        assert events.nbytes == seen and not others.nbytes, given


@on_ranks(2)
def test_nothing_is_left_once_the_choice_is_made() -> None:
    stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack
    batch = (torch.randn(8, 96),)

    def train(model: nn.Module, steps: int) -> Tensor:
        for _ in range(steps):
            loss: Tensor = model(*batch).sum()
            loss.backward()
            for parameter in model.parameters():
                parameter.data.add_(0) if parameter.grad is None else parameter.detach().add_(1e-3)
                parameter.grad = None
        return loss.detach()

    torch.manual_seed(0)
    models = [ZeRO3(Tower(), auto_wrap_policy={Block}, memory_budget=HUGE) for _ in range(2)]
    plain = ZeRO3(Tower(), auto_wrap_policy={Block})
    assert plain.memory_choice is None and not plain._root_state.extensions.begin_action
    # Two models learn at once, and the first one ends first.
    train(models[0], 2), train(models[1], 2)
    assert len(stack()) == 2
    with torch.no_grad():
        models[1](*batch)
    with logged("layerzero.memory_budget.learner") as lines:
        train(models[0], 4)
    assert lines == [str(models[0].memory_choice)][dist.get_rank() :]
    assert models[0].memory_choice is not None and models[1].memory_choice is None
    assert len(stack()) == 1
    # A model goes while it learns.
    del models[1]
    gc.collect()
    assert not stack()
    root = models[0]._root_state
    assert not any(handle.events.resized for unit in root.units for handle in unit.handles)
    assert len(root.extensions.before_forward) == len(plain._root_state.extensions.before_forward)
    assert not root.extensions.begin_action
    text = str(models[0].memory_choice)
    assert "stay full between forward and backward: " in text and "blocks.0" in text


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])


def _steps(model: nn.Module, count: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or _optimizer(model)
    for _ in range(count):
        model(torch.randn(8, 96)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_odd_uses() -> None:
    def make(tower: Tower | None = None, **given: Any) -> ZeRO3:
        tower = tower or Tower()
        return ZeRO3(tower, auto_wrap_policy={Block}, memory_budget=HUGE, **given)

    def kept(model: ZeRO3) -> int:
        assert model.memory_choice is not None
        return len(model.memory_choice.kept)

    # Passes that fail, and evaluation.
    model = make()
    _steps(model, 2)
    with pytest.raises(RuntimeError):
        model(torch.randn(8, 95))
    with torch.no_grad():
        model.eval()(torch.randn(8, 96))
    model.train()
    _steps(model, 5)
    assert kept(model) == 4
    # A second wrapping learns again; an outer model refuses a budget inside.
    rewrap(model)
    assert model.memory_choice is None
    _steps(model, 7)
    assert kept(model) == 4
    outer = nn.Sequential(model)
    with pytest.raises(ValueError, match="use it on the outermost one"):
        ZeRO3(outer)
    # Units that ranks may skip are never kept; frozen ones are, where gradients pass them.
    tower = Tower()
    model = make(tower, optional_modules=[tower.blocks[1]])
    _steps(model, 7)
    assert kept(model) == 3
    tower = Tower()
    tower.blocks[:2].requires_grad_(False)
    model = make(tower)
    _steps(model, 7)
    assert kept(model) == 4
    # Several backward passes before the optimizer steps are one step.
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(6):
        assert model.memory_choice is None, step
        for _ in range(3):
            model(torch.randn(8, 96)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # Inside a join it does not learn.
    model = make()
    optimizer = _optimizer(model)
    with join(model, optimizer):
        _steps(model, 7 + dist.get_rank(), optimizer)
    assert model.memory_choice is None
    _steps(model, 7)
    assert kept(model) == 4


@on_ranks(2)
def test_evaluations_in_inference_mode_may_come_while_it_learns() -> None:
    model = ZeRO3(Tower(), auto_wrap_policy={Block}, memory_budget=HUGE)
    optimizer = _optimizer(model)
    for _ in range(LEARNED + 2):
        _steps(model, 1, optimizer)
        with torch.inference_mode():
            model(torch.randn(8, 96))
        torch.randn(2)  # Fails if operations of this thread are counted after the last step.
    assert model.memory_choice is not None


def test_a_budget_buys_the_highest_rung_that_fits_to_the_byte() -> None:
    learned = Learned(outside=210, inside=200, sizes=(50, 30, 40), saved=(0, 1, 2))
    below = Settings()
    for prefetches, kept, nbytes in (
        (False, set(), 210),
        (True, set(), 240),
        (True, {2}, 280),
        (True, {1, 2}, 310),
    ):
        settings = Settings(prefetches, frozenset(kept))
        assert learned.bound(settings) == nbytes
        assert (learned.choose(nbytes - 1), learned.choose(nbytes)) == (below, settings)
        below = settings


def test_storages_may_die_while_the_peak_is_noted() -> None:
    """Of garbage that is collected, as it may be wherever Python makes an object."""
    thresholds = gc.get_threshold()
    try:
        for threshold in range(5, 60, 2):
            count = StorageCount()
            kept = [torch.empty(1) for _ in range(100)]
            gc.disable()
            for tensor in kept:
                count.note(tensor)
            gc.collect()
            cycle: list[Any] = [torch.empty(1000)]
            cycle.append(cycle)
            count.note(cycle[0])
            del cycle
            gc.set_threshold(threshold)
            gc.enable()
            assert len(count.at_peak()) >= 100
            gc.collect()
            assert count.live == 4 * len(kept)
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)


SEVERAL = ReductionPolicy(in_flight="1MB")


class Wish(NamedTuple):
    """What is measured on every rank, and planned on one."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    optimizer: str
    arguments: Callable[[], dict[str, Any]]
    """Of `ZeRO3`."""


Compared = dict[str, tuple[Measured, Any]]


def _of_rank(names: list[str]) -> Compared:
    """What each wish takes on this rank; and its plan, if it is this rank's turn to make it."""
    found: Compared = {}
    # A model on one rank, in all settings: torch remembers what its operators return.
    models = list(dict.fromkeys(name.partition(": ")[0] for name in names))
    mine = models[dist.get_rank() :: dist.get_world_size()]
    for name in names:
        wish = WISHES[name] if name in WISHES else _in_setting(*name.split(": "))
        torch.manual_seed(0)
        arguments = wish.arguments()
        measured, plan = measure(wish.make, wish.batch(), wish.optimizer, arguments, 5), None
        module = wish.make()  # On all ranks: a DTensor's is collective.
        if name.partition(": ")[0] in mine:
            group = arguments.pop("process_group", dist.group.WORLD)
            of = {"world_size": group.size(), "device": "cpu", "optimizer": wish.optimizer}
            plan = plan_memory(module, batch=wish.batch(), **of, **arguments)
        found[name] = measured, plan
    return found


def _compare(num_ranks: int, names: list[str]) -> list[str]:
    """The wishes whose plan is off by more than 5 %."""
    ranks, bad = run_ranks(num_ranks, _of_rank, names, timeout=900), []
    for name in names:
        plan = next(of[name][1] for of in ranks if of[name][1] is not None)
        resting, peak = map(max, zip(*(of[name][0] for of in ranks), strict=True))
        resting, peak = plan.resting_bytes / resting, plan.peak_bytes / peak
        print(name, num_ranks, plan.peak_moment, plan.peak_unit, resting, peak)
        if abs(resting - 1) > 0.05 or abs(peak - 1) > 0.05:
            bad.append(f"{name}, {num_ranks} ranks: resting {resting:.3f}, peak {peak:.3f}")
    return bad


SETTINGS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "2 ranks": (2, "adamw", {}),
    "bfloat16": (2, "sgd", {"mixed_precision": BFLOAT16, "limit_all_gathers": "400kB"}),
    "kept": (2, "adamw", {"reshard_after_forward": False, "backward_prefetch": None}),
    "layered": (4, "adamw", {"zero3_size": 2, "mixed_precision": BFLOAT16}),
    "replicated": (4, "sgd", {"zero3_size": 2, "outer": "replicate", "deterministic": True}),
    "one hop": (
        4,
        "adamw",
        {"zero3_size": 2, "outer": "shard", "reshard_after_forward": "compute_shard"},
    ),
    "on demand": (2, "sgd", {"forward_prefetch": False, "backward_prefetch": None}),
    "post": (2, "sgd", {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
    "whole": (2, "adamw", {"zero3_size": 1, "mixed_precision": BFLOAT16}),
    "several": (2, "sgd", {"reduction": SEVERAL, "forward_prefetch": 2}),
}


def _in_setting(case: str, setting: str) -> Wish:
    _, optimizer, arguments = SETTINGS[setting]
    if CASES[case].float32_only:
        arguments = {name: of for name, of in arguments.items() if name != "mixed_precision"}
    arguments = {**arguments, "auto_wrap_policy": CASES[case].units}
    return Wish(CASES[case].make, CASES[case].batch, optimizer, lambda: {**arguments})


class Experts(nn.ModuleList):
    """Those of this rank, each for a part of the rows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([e(part) for e, part in zip(self, x.chunk(len(self)), strict=True)])


def mixture(depth: int = 2, hidden: int = 128) -> nn.Module:
    """Layers of a dense block and experts."""

    def run(own: Any, x: Tensor) -> Tensor:
        x = own.stem(x)
        for dense, experts in zip(own.dense, own.experts, strict=True):
            x = experts(dense(x))
        return x

    dense = nn.ModuleList(Block(96, 192) for _ in range(depth))
    experts = nn.ModuleList(Experts(Block(96, hidden) for _ in range(2)) for _ in range(depth))
    return Parts(run, stem=nn.Linear(96, 96), dense=dense, experts=experts)


@cache
def _grid(shape: tuple[int, int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "edp", "ep"))


def _with_experts(ep: int, num_outer: int = 1, hidden: int = 128, **of: Any) -> Wish:

    def arguments() -> dict[str, Any]:
        mesh = _grid((num_outer, dist.get_world_size() // ep // num_outer, ep))
        same = mesh["outer", "edp"] if num_outer > 1 else mesh["edp"]
        experts = {"process_group": same, "expert_numbers": mesh["ep"]}

        def policy(module: nn.Module, fqn: str) -> Any:
            return experts if isinstance(module, Experts) else fqn[:6] == "dense."

        return {**of, "auto_wrap_policy": policy}

    make = partial(mixture, hidden=hidden)
    return Wish(make, lambda: ((torch.randn(16, 96),), {}), "adamw", arguments)


def _tensor_parallel(size: int, **of: Any) -> Wish:

    def mesh() -> DeviceMesh:
        return _grid((1, dist.get_world_size() // size, size))

    def make() -> nn.Module:
        styles = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        return parallelize_module(Tower(), mesh()["ep"], styles)

    of["auto_wrap_policy"] = {Block}
    batch = CASES["many tokens"].batch
    return Wish(make, batch, "adamw", lambda: {**of, "process_group": mesh()["edp"]})


WISHES = {
    "experts, large": _with_experts(2, hidden=1024, reshard_after_forward=False),
    "experts, mesh": _with_experts(2, 2, outer="replicate", zero3_size=1),
    "tensor parallel": _tensor_parallel(2, mixed_precision=BFLOAT16),
}
MORE = ["tower: on demand", "odd: post", "gpt: whole", "adapted: several"]


def _all(num_ranks: int) -> list[str]:
    """All models in the settings of so many ranks among the first six."""
    six = [name for name in list(SETTINGS)[:6] if SETTINGS[name][0] == num_ranks]
    return [f"{case}: {setting}" for case, setting in itertools.product(CASES, six)]


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, ["tower: 2 ranks", "tied gpt: bfloat16", "tower: whole", "experts, large"]),
        pytest.param(4, ["experts, mesh", "tensor parallel"], marks=pytest.mark.slow),
        pytest.param(2, MORE, marks=pytest.mark.slow),
        pytest.param(2, _all(2), marks=pytest.mark.soak),
        pytest.param(4, _all(4), marks=pytest.mark.soak),
    ],
)
def test_the_planned_peak_is_the_measured_one(num_ranks: int, names: list[str]) -> None:
    assert _compare(num_ranks, names) == []
