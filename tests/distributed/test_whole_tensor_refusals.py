"""WholeTensorOptimizer: what does not fit is refused by name, on every rank, and nothing hangs."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, SGD, Muon, Optimizer

from layerzero import ZeRO3
from layerzero.optim import WholeTensorOptimizer
from tests.harness.checks import named
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.ranks import on_ranks
from tests.harness.reference import seeded

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


def _model() -> ZeRO3:
    return ZeRO3(seeded(Mlp), auto_wrap_policy={Block})


def _train(model: ZeRO3, optimizer: Optimizer) -> None:
    model(torch.randn(3, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


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
    model = _model()
    for name, (make, error, text) in REFUSED.items():
        with pytest.raises(error, match=text):
            make(model)
        with named(name):
            model(torch.randn(3, WIDTH)).sum().backward()  # Whether a group is still usable.
    _train(model, whole(model.parameters()))


def _differing(model: ZeRO3, rank: int) -> Iterable[tuple[Callable[[], Any], str]]:
    parameters = list(model.parameters())
    yield (
        lambda: whole(parameters[: 3 + rank]),
        r"arguments differ between ranks: rank 1 has 'blocks.0.up.bias' of shape \(7,\) .*, where "
        "rank 0 has no other argument",
    )
    yield (
        lambda: whole(parameters, lr=0.1 * (1 + rank)),
        "has lr=0.2, where rank 0 has lr=0.1",
    )
    yield lambda: whole(parameters if rank else parameters[::-1]), "where rank 0 has 'head.weight'"
    yield (
        lambda: whole([parameters, [*parameters, parameters[0]]][rank]),
        "rank 1 refused its arguments|'stem.weight' was given twice",
    )


@on_ranks(2)
def test_ranks_that_differ_are_refused_on_every_rank() -> None:
    model = _model()
    for make, text in _differing(model, dist.get_rank()):
        with pytest.raises((ValueError, TypeError), match=text):
            make()
    _train(model, whole(model.parameters()))


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
        with pytest.raises(RuntimeError, match=r"on 1 of 2 ranks only, \[2\]"):
            optimizer.step()


@on_ranks(2)
def test_errors_in_a_step_leave_the_ranks_together() -> None:
    rank = dist.get_rank()
    model = _model()
    *most, last = model.parameters()
    optimizer = WholeTensorOptimizer(most, Fails, lr=1e-3, bucket_bytes=100)
    with pytest.raises(ValueError, match=r"no more groups"):
        optimizer.add_param_group({"params": [last]})
    _train(model, optimizer)
    del optimizer
    optimizer = WholeTensorOptimizer(model.parameters(), Fails, lr=1e-3, bucket_bytes=100)
    _train(model, optimizer)
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
    _train(model, optimizer)
    # A gradient on one rank only.
    model(torch.randn(3, WIDTH)).sum().backward()
    if rank == 1:
        first.grad = None
    with pytest.raises(
        RuntimeError, match=r"stem.weight has a gradient on 1 of 2 ranks only, \[0\]"
    ):
        optimizer.step()
    # On none: as in plain torch, nothing happens to it.
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
    _train(model, optimizer)
