"""WholeTensorOptimizer trains as the same optimizer on one process, with averaged gradients; what
does not fit is refused by name, on every rank, and nothing hangs."""

import copy
import functools
import gc
import io
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Muon, Optimizer

from benchmarks.memory import live_bytes
from layerzero import GradScaler, ZeRO3
from layerzero.optim import WholeTensorOptimizer
from layerzero.optim.whole_tensor.plan import assign_owners
from tests.harness.checks import named
from tests.harness.compare import assert_same_values, follow, zero3
from tests.harness.models import (
    CASES,
    WIDTH,
    Block,
    Case,
    Mlp,
    Transformer,
    TransformerBlock,
    loss_of,
)
from tests.harness.ranks import of_all_ranks, on_ranks
from tests.harness.recording import recorded_operations
from tests.harness.reference import seeded
from tests.harness.saved_models import train
from tests.harness.traffic import SentBytes
from tests.harness.whole_optimizers import Shampoo

BUCKET = 3000
Options = dict[str, Any]


class Kind(NamedTuple):
    cls: type[Optimizer]
    options: Options
    takes: Callable[[int], bool] = lambda ndim: True
    """Whether it takes tensors of so many dimensions."""


KINDS = {
    "Muon": Kind(Muon, {"lr": 0.02}, lambda ndim: ndim == 2),
    "Shampoo": Kind(Shampoo, {"lr": 0.02}, lambda ndim: ndim > 0),
    "AdamW": Kind(AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True, "foreach": True}),
}


def shape_of(parameter: nn.Parameter) -> torch.Size:
    return parameter.layerzero.shape if hasattr(parameter, "layerzero") else parameter.shape


def chosen(model: nn.Module, kind: Kind) -> list[nn.Parameter]:
    return [p for p in model.parameters() if kind.takes(len(shape_of(p)))]


class Pair:
    """A sharded model and a plain one, which gets the averaged gradients bit for bit."""

    def __init__(self, case: Case, kind: Kind, **arguments: Any) -> None:
        self.case = case
        self.plain = seeded(case.build)
        self.model = ZeRO3(seeded(case.build), auto_wrap_policy=set(case.units), **arguments)
        self.optimizer = WholeTensorOptimizer(
            chosen(self.model, kind), kind.cls, bucket_bytes=BUCKET, **kind.options
        )
        self.expected = kind.cls(chosen(self.plain, kind), **kind.options)
        self.num_steps = 0

    def backward(self) -> None:
        draw = torch.Generator().manual_seed(1000 * self.num_steps + dist.get_rank())
        self.num_steps += 1
        loss_of(self.model(self.case.batch(draw))).backward()

    def step(self) -> None:
        follow(self.model, self.plain)
        self.optimizer.step()
        self.expected.step()

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.backward()
            self.step()

    def check(self, what: str) -> None:
        assert_same_values(self.model, self.plain, f"{what}: parameter")


def _sweep(cases: Iterable[str], kinds: Iterable[str], num_steps: int, **arguments: Any) -> None:
    for case in cases:
        for kind in kinds:
            pair = Pair(CASES[case], KINDS[kind], **arguments)
            pair.train(num_steps)
            pair.check(f"{kind} on {case}, {arguments}")


def _edits() -> None:
    pair = Pair(CASES["mlp"], KINDS["AdamW"])
    pair.train(2)

    def of_all(change: Callable[[Any], object]) -> None:
        for model in (pair.model, pair.plain):
            for parameter in model.parameters():
                change(parameter)

    def on_one_rank() -> None:
        """The rank with the most of it; the others do not write at all."""
        if dist.get_rank() == 0:
            next(pair.model.parameters())[:1].fill_(7.0)
        next(pair.plain.parameters()).view(-1)[:1].fill_(7.0)

    for edit in (
        lambda: of_all(lambda parameter: parameter.data.mul_(0.5)),
        on_one_rank,
        lambda: of_all(lambda parameter: setattr(parameter, "data", parameter.data * 2)),
    ):
        with torch.no_grad():
            edit()
        pair.train(2)
        pair.check("after an edit")
    with recorded_operations(pair.model) as operations:
        pair.train(1)
        if dist.get_rank() == 1:
            pair.optimizer.refresh()
        pair.train(1)
    verbs = [operation.verb for operation in operations]
    at = verbs.index("values to owners")
    assert "values from owners" in verbs[:at], "only in the step after `refresh`"


def _groups(model: nn.Module) -> list[Options]:
    parameters = list(model.parameters())
    return [
        {"params": parameters[:5], "lr": 0.05, "weight_decay": 0.3},
        {"params": parameters[5:9], "betas": (0.5, 0.9)},
    ]


def _as_any_optimizer() -> None:
    """Groups, schedulers, accumulation, clipping, closures, a group more, another optimizer."""
    case, cls = CASES["mlp"], AdamW
    pair = Pair(case, KINDS["AdamW"])
    del pair.optimizer
    optimizer = WholeTensorOptimizer(_groups(pair.model), cls, bucket_bytes=BUCKET, lr=0.01)
    pair.optimizer, pair.expected = optimizer, cls(_groups(pair.plain), lr=0.01)
    both = (pair.optimizer, pair.expected)
    assert [group.keys() for group in both[0].param_groups] == [
        group.keys() for group in both[1].param_groups
    ]
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in both]
    for step in range(6):
        optimizer.zero_grad()
        for sync in (False, True):
            with nullcontext() if sync else pair.model.no_sync():
                pair.backward()
        pair.model.clip_grad_norm_(0.1)
        pair.step()
        for schedule in schedules:
            schedule.step()
        if step == 2:
            for each, model in zip(both, (pair.model, pair.plain), strict=True):
                with torch.no_grad():
                    torch._foreach_mul_(list(model.parameters()), 0.9)
                each.add_param_group({"params": list(model.parameters())[9:], "lr": 0.2})
            assert {p for g in optimizer.param_groups for p in g["params"]} == {
                *pair.model.parameters()
            }
    pair.check("groups")
    assert optimizer.param_groups[0]["lr"] == pair.expected.param_groups[0]["lr"]

    follow(pair.model, pair.plain)
    calls: list[bool] = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        return 1.5

    with torch.no_grad():
        assert optimizer.step(closure) == 1.5 and calls == [True]
    pair.expected.step()
    pair.check("closure")
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in pair.model.parameters())
    before = [p.detach().clone() for p in pair.model.parameters()]
    optimizer.step()
    assert all(map(torch.equal, before, pair.model.parameters()))


def _counts_steps() -> None:
    """Also on a rank that owns none of a group, a step counts once."""
    pair = Pair(CASES["transformer"], KINDS["Shampoo"])
    pair.train(3)
    first = list(pair.model.parameters())[:1]
    del pair.optimizer
    alone = WholeTensorOptimizer([{"params": first}], Shampoo)
    assert (
        (alone.inner is None)
        == (alone.owned == {})
        == (alone.owner_of(first[0]) != dist.get_rank())
    )
    for _ in range(2):
        first[0].grad = torch.ones_like(first[0])
        alone.step()
    assert alone.param_groups[0]["steps"] == 2


def _scaler() -> None:
    pair = Pair(CASES["mlp"], KINDS["AdamW"])
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    pair.backward()
    before = [p.detach().clone() for p in pair.model.parameters()]
    if dist.get_rank() == 0:
        max(pair.model.parameters(), key=Tensor.numel).grad[0] = torch.inf
    scaler.step(pair.optimizer)
    scaler.update()
    assert all(map(torch.equal, before, pair.model.parameters()))
    assert scaler.get_scale() == 2.0
    pair.optimizer.zero_grad()
    pair.backward()
    follow(pair.model, pair.plain)
    for plain in pair.plain.parameters():
        plain.grad /= 2.0
    scaler.step(pair.optimizer)
    pair.expected.step()
    pair.check("scaler")


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks(timeout=120)
def test_it_does_what_the_optimizer_does_on_one_process(world_size: int) -> None:
    _sweep(["transformer"], KINDS, 3)
    _as_any_optimizer()
    if dist.get_world_size() > 1:
        _sweep(["odd_shapes", "mixed_dtypes", "tied_across_units"], ["AdamW"], 2)
        _edits()


def _traffic() -> list[tuple[int, int]]:
    """Bytes that this rank sends in a step, and those of its pieces that others own."""
    found = []
    for arguments in ({}, {"zero3_size": 2}):
        pair = Pair(CASES["transformer"], KINDS["AdamW"], **arguments)
        pair.train(1)
        pair.optimizer.zero_grad()
        pair.backward()
        with SentBytes() as sent:
            pair.optimizer.step()
        parameters = list(pair.model.parameters())
        flags = (dist.get_world_size() - 1) * len(parameters)
        away = [p for p in parameters if pair.optimizer.owner_of(p) != dist.get_rank()]
        found.append((sent.nbytes - flags, sum(parameter.nbytes for parameter in away)))
    return found


def _owned() -> tuple[list[int], int]:
    model = ZeRO3(
        seeded(lambda: Transformer(vocab=301, width=48, layers=6, hidden=128)),
        auto_wrap_policy={TransformerBlock},
    )
    optimizer = WholeTensorOptimizer(model.parameters(), AdamW, bucket_bytes=100_000)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [s for state in optimizer.state.values() for s in state.values() if s.ndim]
    largest = max(bucket.to_owners.nbytes for _, bucket in next(iter(optimizer._buckets.values())))
    return [
        sum(p.numel() for p in optimizer.owned.values()),
        sum(s.numel() for s in states),
    ], largest


def test_owners_even_out_earlier_loads_and_hold_most_of_their_tensors() -> None:
    assert assign_owners([1] * 10, [{}] * 10, 2, loads=[6, 0]).count(0) == 2
    held = [{2: 5, 1: 4}, {0: 9}, {1: 1}]
    assert assign_owners([1, 1, 1], held, 3) == [2, 0, 1]


@on_ranks(4)
def test_pieces_travel_once_each_way_and_owners_are_balanced() -> None:
    _sweep(["mlp"], ["Shampoo"], 2, zero3_size=2, outer="replicate")
    found = of_all_ranks((_traffic(), _owned()))
    for ranks in zip(*(traffic for traffic, _ in found), strict=True):
        # What leaves a rank are its pieces for other owners, and the pieces of its own tensors.
        assert sum(sent for sent, _ in ranks) == 2 * sum(pieces for _, pieces in ranks) > 0
    for sizes in zip(*(own for _, (own, _) in found), strict=True):
        assert max(sizes) <= 1.1 * sum(sizes) / 4
    assert max(largest for _, (_, largest) in found) <= 100_000 * 4


class RecordsMemory(SGD):
    live: ClassVar[list[int]] = []

    def step(self, closure: Any = None) -> None:
        self.live.append(live_bytes())
        super().step()


def _memory(bucket: int) -> int:
    """Bytes that a step takes at most while the inner optimizer runs."""
    model = ZeRO3(nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(120))))
    optimizer = WholeTensorOptimizer(model.parameters(), RecordsMemory, lr=0.1, bucket_bytes=bucket)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        RecordsMemory.live.clear()
        gc.collect()
        before = live_bytes()
        optimizer.step()
    return max(RecordsMemory.live) - before


def _resume(kind: str) -> None:
    pair = Pair(CASES["transformer"], KINDS[kind])
    pair.train(2)
    optimizer = pair.optimizer
    assert optimizer.state.keys() == {
        p for p in chosen(pair.model, KINDS[kind]) if optimizer.owner_of(p) == dist.get_rank()
    }
    for parameter in optimizer.state:
        info = parameter.layerzero
        assert optimizer.owned[info.fqn].shape == info.shape
        assert optimizer.state[parameter] is optimizer.inner.state[optimizer.owned[info.fqn]]
    file = io.BytesIO()
    torch.save([pair.model.state_dict(), optimizer.state_dict()], file)
    pair.train(2)
    expected = [p.detach().clone() for p in pair.model.parameters()]

    del pair.optimizer, optimizer
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    options = {**KINDS[kind].options, "lr": 0.5}
    again = WholeTensorOptimizer(chosen(pair.model, KINDS[kind]), KINDS[kind].cls, **options)
    pair.model.load_state_dict(weights)
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == KINDS[kind].options["lr"]
    pair.optimizer, pair.num_steps = again, 2
    pair.train(2)
    assert all(map(torch.equal, pair.model.parameters(), expected))
    reordered = dict(reversed(state["whole_tensors"]["owners"].items()))
    changes = {"rank": 7}, {"num_ranks": 5}, {"owners": {}}, {"owners": reordered}
    for change in (*changes, {"group_sizes": [1, 2]}):
        other = {**state, "whole_tensors": {**state["whole_tensors"], **change}}
        with pytest.raises(ValueError, match=r"layerzero.checkpoint.save and load"):
            again.load_state_dict(other)
    with pytest.raises(ValueError, match=r"layerzero.checkpoint.save and load"):
        again.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
    with pytest.raises(TypeError, match=r"cannot be copied or pickled"):
        copy.deepcopy(again)


@on_ranks(2)
def test_what_a_step_holds_counts_and_saves() -> None:
    owned, bucket = 60 * 128 * 128 * 4, 1 << 18
    assert _memory(bucket) < owned + bucket, "the gradients of the owned tensors"
    _counts_steps()
    _resume("Shampoo")
    _scaler()


Make = Callable[[ZeRO3], Any]


class NeedsClosure(SGD):
    def step(self, closure: Callable[[], Any]) -> Any:
        return super().step(closure)


class OwnGroups(SGD):
    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        super().__init__([{"params": params[:1]}, {"params": params[1:]}], lr)


class RefusesOneElement(SGD):
    """In its constructor, and only real memory, so that only an owner sees it."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        super().__init__(params, lr)
        for parameter in self.param_groups[0]["params"]:
            if parameter.numel() == WIDTH * WIDTH and not parameter.is_meta:
                raise ValueError("no square matrices please")


def _summoned(model: ZeRO3) -> Any:
    with model.summon_full_params():
        return WholeTensorOptimizer(model.parameters(), SGD, lr=0.1)


def _inside_backward(model: ZeRO3) -> Any:
    x = torch.randn(3, WIDTH, requires_grad=True)
    x.register_hook(lambda _: WholeTensorOptimizer(model.parameters(), SGD, lr=0.1))
    return model(x).sum().backward()


whole = functools.partial(WholeTensorOptimizer, optimizer_class=SGD, lr=0.1)


def _of(cls: Any, **options: Any) -> Make:
    return lambda model: WholeTensorOptimizer(model.parameters(), cls, **options)


REFUSED: dict[str, tuple[Make, type[Exception], str]] = {
    "no parameters": (lambda m: whole([]), ValueError, "got no parameters"),
    "unsharded": (_summoned, ValueError, "belongs to no ZeRO3 module"),
    "given twice": (
        lambda m: whole([{"params": m.parameters()}, {"params": [m.module.head.weight]}]),
        ValueError,
        "'head.weight' was given twice",
    ),
    "no class": (_of(nn.Linear), TypeError, "expected a class derived from torch.optim.Optimizer"),
    "LBFGS": (_of(LBFGS), TypeError, "LBFGS needs"),
    "a closure": (_of(NeedsClosure, lr=0.1), TypeError, "NeedsClosure needs a closure"),
    "groups of its own": (
        _of(OwnGroups, lr=0.1),
        TypeError,
        "OwnGroups makes parameter groups of its own",
    ),
    "vectors": (_of(Muon), ValueError, "Muon only supports 2D"),
    "bucket_bytes": (_of(SGD, bucket_bytes=0), ValueError, "bucket_bytes: expected at least 1"),
    "cost": (
        _of(SGD, cost=lambda shape: -1),
        ValueError,
        r"cost of 'stem.weight' with shape \(5, 5\): expected a number >= 0",
    ),
    "in backward": (_inside_backward, RuntimeError, "made inside forward or backward"),
    "in the constructor of one owner": (
        lambda m: WholeTensorOptimizer([m.module.stem.weight], RefusesOneElement, lr=0.1),
        ValueError,
        "no square matrices please",
    ),
}


@on_ranks(2)
def test_bad_input_is_refused_by_name_on_every_rank() -> None:
    model = zero3(Mlp, Block)
    for name, (make, error, text) in REFUSED.items():
        with pytest.raises(error, match=text):
            make(model)
        with named(name):
            model(torch.randn(3, WIDTH)).sum().backward()  # Whether a group is still usable.
    train(model, whole(model.parameters()), 1)


def _differing(model: ZeRO3, rank: int) -> Iterable[tuple[Callable[[], Any], str]]:
    parameters = list(model.parameters())
    yield (
        lambda: whole(parameters[: 3 + rank]),
        r"arguments differ between ranks: rank 1 has 'blocks.0.up.bias' of shape \(7,\) .*, where "
        "rank 0 has no other argument",
    )
    yield (lambda: whole(parameters, lr=0.1 * (1 + rank)), "has lr=0.2, where rank 0 has lr=0.1")
    yield lambda: whole(parameters if rank else parameters[::-1]), "where rank 0 has 'head.weight'"
    yield (
        lambda: whole([parameters, [*parameters, parameters[0]]][rank]),
        "rank 1 refused its arguments|'stem.weight' was given twice",
    )


@on_ranks(2)
def test_ranks_that_differ_are_refused_on_every_rank() -> None:
    model = zero3(Mlp, Block)
    for make, text in _differing(model, dist.get_rank()):
        with pytest.raises((ValueError, TypeError), match=text):
            make()
    train(model, whole(model.parameters()), 1)


class Fails(SGD):
    def add_param_group(self, param_group: Any) -> None:
        super().add_param_group(param_group)
        late = len(self.param_groups) > 1 and not param_group["params"][0].is_meta
        if late and param_group["params"][0].numel() > 1:  # On the owner alone.
            self.param_groups.pop()
            raise ValueError("no more groups")

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not parameter.grad.isfinite().all():
                    raise ArithmeticError("not finite")
        super().step()


@on_ranks(3)
def test_ranks_with_a_gradient_are_named_by_their_global_numbers() -> None:
    rank, group = dist.get_rank(), dist.new_group([1, 2])
    if rank:
        model = ZeRO3(seeded(Mlp), process_group=group)
        optimizer = WholeTensorOptimizer(model.parameters(), SGD, lr=1e-3)
        model(torch.randn(3, WIDTH)).sum().backward()
        if rank == 1:
            next(model.parameters()).grad = None
        with pytest.raises(
            RuntimeError, match=r"stem.weight has a gradient on 1 of 2 ranks only, \[2\]"
        ):
            optimizer.step()


@on_ranks(2)
def test_errors_in_a_step_leave_the_ranks_together() -> None:
    rank = dist.get_rank()
    model = zero3(Mlp, Block)
    *most, last = model.parameters()
    optimizer = WholeTensorOptimizer(most, Fails, lr=1e-3, bucket_bytes=100)
    with pytest.raises(ValueError, match=r"no more groups"):
        optimizer.add_param_group({"params": [last]})
    train(model, optimizer, 1)
    del optimizer
    optimizer = WholeTensorOptimizer(model.parameters(), Fails, lr=1e-3, bucket_bytes=100)
    train(model, optimizer, 1)
    first, *others = model.parameters()
    # One rank's optimizer raises; the exchanges go on, and so does training.
    model(torch.randn(3, WIDTH)).sum().backward()
    if first.numel():
        first.grad[0] = torch.inf
    if optimizer.owner_of(first) == rank:
        with pytest.raises(ArithmeticError):
            optimizer.step()
        assert all(p.grad is None for p in optimizer.owned.values())
    else:
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 1)
    # A parameter without a gradient on any rank: as in plain torch, nothing happens to it.
    model(torch.randn(3, WIDTH)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    first.grad = None
    optimizer.step()
    assert torch.equal(before[0], first)
    changed = [not torch.equal(a, b) for a, b in zip(before[1:], others, strict=True) if a.numel()]
    assert all(changed) and changed
    optimizer.zero_grad()
    # Inside backward, by itself, or unit by unit.
    with pytest.raises(ValueError, match=r"call its step\(\) after backward"):
        model.step_in_backward(optimizer)
    x = torch.randn(3, WIDTH, requires_grad=True)
    x.register_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match=r"step: called inside forward or backward"):
        model(x).sum().backward()
    with (
        model.summon_full_params(),
        pytest.raises(RuntimeError, match=r"called inside summon_full_params"),
    ):
        optimizer.step()
    optimizer.zero_grad()
    members = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = members[1:]
    with pytest.raises(RuntimeError, match=r"lists of parameters in its groups were changed"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = members
    with pytest.raises(ValueError, match=r"'stem.weight' was given twice"):
        optimizer.add_param_group({"params": members[:1]})
    train(model, optimizer, 1)
