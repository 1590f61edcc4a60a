"""Code that takes shards for whole parameters warns: optimizers, norms, groups by shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_  # before the engine looks at it
from torch.optim.optimizer import register_optimizer_step_pre_hook

from layerzero.optim import WholeTensorOptimizer, decay_groups
from layerzero.optim.probe import differs_on_parts
from tests.harness.compare import assert_same_values, zero3
from tests.harness.models import WIDTH, Block, Mlp, loss_of
from tests.harness.ranks import run_ranks
from tests.harness.reference import seeded


class Normed(torch.optim.SGD):
    """Divides each gradient by its norm; nothing in its name says so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm() + 1e-6)
        return super().step(closure)


class Signed(torch.optim.Optimizer):
    """Element-wise, with state of its own and a count."""

    def __init__(self, params: Any, lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0
        self.seen = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.seen.append(self.count)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", parameter.grad.clone())
                    mean.lerp_(parameter.grad, 0.1)
                    parameter.add_(mean.sign(), alpha=-group["lr"])


class Cautious(Signed):
    """Leaves out what momentum and gradient disagree on, and makes up for it by a mean."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(gradient))
                    update = mean.lerp(gradient, 0.1).sign()
                    mean.lerp_(gradient, 0.01)
                    mask = (update * gradient > 0).to(gradient.dtype)
                    mask.div_(mask.mean().clamp(min=1e-3))
                    parameter.sub_(update * mask, alpha=group["lr"])


class DecaysByMean(torch.optim.SGD):
    """A little decay, by a mean over the parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    decay = group["lr"] * group["weight_decay"] / parameter.grad.abs().mean()
                    parameter.mul_(1 - decay.clamp(max=1))
        return super().step(closure)


class Noisy(Normed):
    """Draws noise, so that a step says nothing of the next."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        return super().step(closure)


class Holder(Normed):
    """Holds something that a step may use."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.log: Callable[[], None] = lambda: None


class Summed(torch.optim.SGD):
    """A step of it is collective."""

    def step(self, closure: Any = None) -> Any:
        dist.all_reduce(torch.ones(1))
        return super().step(closure)


class Squares(Signed):
    """Asks for parameters of two dimensions; nothing in its name says so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                rows, columns = parameter.shape
                parameter.mul_(1 - group["lr"] / (rows * columns))


class AdaFactor(Signed):
    pass


class DAdaptSGD(Signed):
    pass


class MyLamb(Signed):
    pass


class SAM(torch.optim.Optimizer):
    """As it is widely copied: its own step is not called."""

    def __init__(self, params: Any, base: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def second_step(self) -> None:
        self.base.step()


@contextmanager
def _told() -> Iterator[list[str]]:
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages.extend(str(each.message) for each in caught if each.category is UserWarning)


def _with_gradients(**options: Any) -> tuple[Any, Tensor]:
    model, batch = zero3(Mlp, Block, **options), torch.ones(2, WIDTH)
    loss_of(model(batch)).backward()
    return model, batch


def _expect(messages: list[str], *parts: str) -> None:
    """On the first rank one message with these parts; on others none."""
    expected = 1 if parts and dist.get_rank() == 0 else 0
    assert len(messages) == expected, messages
    assert all(part in message for message in messages for part in parts), messages


def _optimizers() -> None:
    model, _ = _with_gradients()

    def steps(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> list[str]:
        optimizer = make(model.parameters())
        with _told() as messages:
            optimizer.step()
            optimizer.step()
        return messages

    for lr in (0.0, 0.1):  # a schedule may begin at 0
        _expect(steps(lambda p, lr=lr: Signed(p, lr)))
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"):
        _expect(steps(lambda p, name=name: getattr(torch.optim, name)(p, lr=1e-3)))
    whole = "layerzero.optim.WholeTensorOptimizer(model.parameters(), AdaFactor, ...)"
    _expect(steps(AdaFactor), "AdaFactor", "rows", whole, "AdamW or SGD")
    messages = steps(DAdaptSGD)
    _expect(messages, "the elements of all parameters", "whole parameters. Use one that treats")
    for cls, parts in ((DAdaptSGD, ("inside WholeTensorOptimizer each rank",)), (MyLamb, ())):
        whole_model, _ = _with_gradients()
        inside = WholeTensorOptimizer(whole_model.parameters(), cls, lr=0.1)
        with _told() as messages:
            inside.step()
        _expect(messages, *parts)
    asks = Squares(model.parameters(), 0.1)
    with _told() as messages, pytest.raises(ValueError, match="not enough values to unpack"):
        asks.step()
    _expect(messages, "Squares", "more than one element", "WholeTensorOptimizer")
    for parameters in (model.parameters(), [model.stem.weight]):
        with pytest.raises(ValueError, match=r"such as 'stem\.weight'.*WholeTensorOpt") as error:
            torch.optim.Muon(parameters)
        also = f"'stem.bias' has shape ({WIDTH},)" in str(error.value)
        assert also == (type(parameters) is not list)
    _expect(steps(AdaFactor))  # once
    _expect(steps(MyLamb), "MyLamb", "norm")
    _expect(steps(lambda p: Normed(p, lr=0.0)), "Normed", "more than one element")
    _expect(steps(Cautious), "Cautious", "more than one element")
    little = lambda p: DecaysByMean(p, lr=0.1, weight_decay=1e-4)  # noqa: E731
    _expect(steps(little), "DecaysByMean", "more than one element")
    # Those that cannot be tried are found by what they take of a shard, which is told once.
    norm = "that of this rank's part"
    for unknown, parts in ((Noisy, (norm,)), (Holder, ()), (Summed, ())):
        _expect(steps(lambda p, unknown=unknown: unknown(p, lr=0.1)), *parts)
    sam = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    with _told() as messages:
        sam.second_step()
    _expect(messages, "SAM", "layerzero.global_norm(model)")
    plain = nn.Linear(3, 3)
    plain(torch.ones(3)).sum().backward()
    with _told() as messages:
        Normed(plain.parameters(), lr=0.1).step()
    _expect(messages)


def test_an_optimizer_that_is_not_element_wise_warns_once_on_the_first_rank() -> None:
    run_ranks(2, _optimizers)


def _leaves_no_trace() -> None:
    sharded_params = [nn.Parameter(torch.randn(6))]
    calls: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda *given: calls.append(given))
    optimizer = Signed(sharded_params, 0.1)
    optimizer.register_step_pre_hook(lambda *given: calls.append(given))
    generator, before = torch.get_rng_state(), dict(vars(optimizer))
    value = sharded_params[0].detach().clone()
    assert differs_on_parts(optimizer, 2, 2) is False
    assert differs_on_parts(Normed(sharded_params, 0.1), 2, 2) is True
    assert differs_on_parts(Normed(sharded_params, 0.1), 1, 1) is False
    assert differs_on_parts(torch.optim.LBFGS(sharded_params), 1, 2) is None
    assert torch.equal(torch.get_rng_state(), generator)
    assert not calls and not optimizer.state and optimizer.count == 0 and optimizer.seen == [0]
    assert dict(vars(optimizer)) == before and torch.equal(sharded_params[0].detach(), value)
    optimizer.step()
    assert len(calls) == 2
    handle.remove()


def test_a_probe_leaves_no_trace() -> None:
    run_ranks(1, _leaves_no_trace)


def _second_order() -> None:
    batch = torch.ones(2, WIDTH)
    plain, model = seeded(Mlp), zero3(Mlp, Block)
    results = []
    for each in (plain, model):
        optimizer = torch.optim.LBFGS(each.parameters(), lr=0.5, max_iter=3)

        def closure(each: nn.Module = each, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(each(batch))
            loss.backward()
            return loss

        if each is model and dist.get_world_size() > 1:
            with pytest.raises(NotImplementedError, match="LBFGS needs the gradients of"):
                optimizer.step(closure)
            whole = r"(?s)Adafactor needs whole parameters.*optim\.WholeTensorOptimizer\("
            with pytest.raises(NotImplementedError, match=whole):
                torch.optim.Adafactor(each.parameters()).step()
        else:
            results.append(optimizer.step(closure))
    if dist.get_world_size() == 1:
        assert results[0] == results[1]
        assert_same_values(model, plain, roundings=64)


@pytest.mark.parametrize("world_size", [1, 2])
def test_lbfgs_is_refused_on_every_rank_unless_shards_are_whole(world_size: int) -> None:
    run_ranks(world_size, _second_order)


def _clips() -> None:
    model, _ = _with_gradients()
    torch.optim.SGD(model.parameters(), lr=0.1)
    with _told() as messages:
        model.clip_grad_norm_(1.0)
        plain = nn.Linear(3, 3)
        plain(torch.ones(3)).sum().backward()
        clip_grad_norm_(plain.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
    _expect(messages)
    with _told() as messages:
        own = [p.grad.square().sum().sqrt() for p in model.parameters()]
        norm = clip_grad_norm_(model.parameters(), 1.0)
        torch.testing.assert_close(norm, torch.stack(own).norm())
        clip_grad_norm_(model.parameters(), 1.0)
    _expect(messages, "clip_grad_norm_", "model.clip_grad_norm_(max_norm)")
    with _told() as messages:
        nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.get_total_norm(model.parameters())
    _expect(messages, "get_total_norm", "layerzero.global_norm(model)")


def test_torchs_norm_of_shards_warns() -> None:
    run_ranks(2, _clips)


def _whole_on_one_rank() -> None:
    model, _ = _with_gradients()
    torch.optim.SGD(model.parameters(), lr=0.1)
    with _told() as messages:
        clip_grad_norm_(model.parameters(), 1.0)
    assert not messages


def test_one_rank_has_the_norm_of_all() -> None:
    run_ranks(1, _whole_on_one_rank)


def _groups() -> None:
    model, _ = _with_gradients()
    sharded_params = list(model.parameters())

    def steps(*groups: tuple[list[nn.Parameter], float]) -> list[str]:
        made = [{"params": params, "weight_decay": decay} for params, decay in groups]
        with _told() as messages:
            torch.optim.AdamW(made, lr=1e-3).step()
        return messages

    # In backward it steps with one unit: a group that has nothing there is not empty.
    parts = [(sharded_params[:1], 0.0), (sharded_params[1:], 0.1)]
    groups = [{"params": params, "weight_decay": decay} for params, decay in parts]
    model.step_in_backward(torch.optim.AdamW(groups, lr=1e-3))
    with _told() as messages:
        loss_of(model(torch.ones(2, WIDTH))).backward()
    _expect(messages)
    model.step_in_backward(None)
    loss_of(model(torch.ones(2, WIDTH))).backward()

    matrices, vectors = (group["params"] for group in decay_groups(model))
    _expect(steps((matrices, 0.1), (vectors, 0.0)))
    _expect(steps((sharded_params, 0.1)))
    _expect(steps((sharded_params, 0.1), ([], 0.1)))
    _expect(steps((matrices, 0.1), ([], 0.0)))


def _split_by_ndim() -> None:
    """The usual recipe: weight decay for matrices. Shards have one dimension."""
    model, _ = _with_gradients()
    sharded_params = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in sharded_params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in sharded_params if p.ndim < 2], "weight_decay": 0.0},
    ]

    def messages_of(cls: type[torch.optim.Optimizer], groups: Any, **options: Any) -> list[str]:
        with _told() as messages:
            cls(groups, lr=1e-3, **options).step()
        return messages

    advice = "decay_groups(model, weight_decay=0.1)"
    _expect(messages_of(torch.optim.AdamW, groups), "weight_decay=0.1 is empty", advice)
    _expect(messages_of(torch.optim.AdamW, groups))  # once
    # The same without the empty group.
    _expect(messages_of(torch.optim.NAdam, groups[1:]))  # its default is 0
    none = "none has the optimizer's weight_decay=0.1"
    _expect(messages_of(torch.optim.RAdam, groups[1:], weight_decay=0.1), none, advice)
    halves = [{**groups[1], "params": each} for each in (sharded_params[:3], sharded_params[3:])]
    _expect(messages_of(_Own, halves, weight_decay=0.1), none)
    # Nothing says that these were meant to decay.
    _expect(messages_of(torch.optim.SGD, sharded_params, weight_decay=0.0))
    _expect(messages_of(_Other, halves))
    _expect(messages_of(torch.optim.Adam, halves))
    vectors = decay_groups(model)[1]["params"]
    _expect(messages_of(_Other, [{"params": vectors, "weight_decay": 0.0}]))


class _Own(torch.optim.AdamW):
    pass


class _Other(torch.optim.AdamW):
    pass


def test_groups_split_by_the_dimensions_of_shards_warn() -> None:
    run_ranks(2, _split_by_ndim)


def test_other_groups_do_not_warn() -> None:
    run_ranks(2, _groups)
