"""Code that takes shards for whole parameters warns: optimizers, groups by shape."""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero.optim import decay_groups
from tests.harness.compare import assert_same_values, zero3
from tests.harness.models import WIDTH, Block, Mlp, loss_of
from tests.harness.ranks import on_ranks
from tests.harness.reference import seeded


class Signed(torch.optim.Optimizer):
    """Element-wise, but of no class that is known."""

    def __init__(self, params: Any, lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


class Renamed(torch.optim.AdamW):
    """Steps as a known class does."""


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

    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"):
        _expect(steps(lambda p, name=name: getattr(torch.optim, name)(p, lr=1e-3)))
    _expect(steps(lambda p: layerzero.optim.AdamW(p, lr=1e-3)))
    gc.collect()  # It has its parameters alone, as long as it lives.
    _expect(steps(Renamed))
    with pytest.raises(NotImplementedError, match=r"Muon orthogonalizes.*WholeTensorOptimizer"):
        torch.optim.Muon(model.parameters())
    whole = "layerzero.optim.WholeTensorOptimizer(model.parameters(), Signed, ...)"
    _expect(steps(Signed), "Signed", "more than one element", whole, "AdamW or SGD")
    _expect(steps(Signed))  # once
    plain = nn.Linear(3, 3)
    plain(torch.ones(3)).sum().backward()
    with _told() as messages:
        Signed(plain.parameters()).step()
    _expect(messages)


def _second_order() -> None:
    batch = torch.ones(2, WIDTH)
    plain, model = seeded(Mlp), zero3(Mlp, Block)
    if dist.get_world_size() > 1:
        with pytest.raises(NotImplementedError, match="LBFGS needs the gradients of"):
            torch.optim.LBFGS(model.parameters())
        whole = r"(?s)Adafactor needs whole parameters.*optim\.WholeTensorOptimizer\("
        with pytest.raises(NotImplementedError, match=whole):
            torch.optim.Adafactor(model.parameters())
        return
    results = []
    for each in (plain, model):
        optimizer = torch.optim.LBFGS(each.parameters(), lr=0.5, max_iter=3)

        def closure(each: nn.Module = each, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(each(batch))
            loss.backward()
            return loss

        results.append(optimizer.step(closure))
    assert results[0] == results[1]
    assert_same_values(model, plain)


def _alone_with_rows() -> None:
    """One rank whose parameters keep their shapes has nothing that an optimizer could mistake."""
    for layout in ("rows", "elements"):
        model, _ = _with_gradients(layout=layout)
        with _told() as messages:
            Signed(model.parameters()).step()
        _expect(messages, *(["which are this rank's parts"] if layout == "elements" else []))


@on_ranks(1)
def test_where_shards_are_whole_lbfgs_trains_and_shapes_decide_about_a_warning() -> None:
    _second_order()
    _alone_with_rows()


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


@on_ranks(2)
def test_what_takes_shards_for_whole_parameters_warns_once_or_is_refused() -> None:
    _groups()  # Before a warning, which comes once.
    _split_by_ndim()
    _optimizers()
    _second_order()
