"""Models and optimizers that tests of checkpoints and state dicts build, train and compare."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import ZeRO3
from layerzero.checkpoint import get_model_state_dict, get_optimizer_state_dict
from tests.harness.checks import assert_bitwise
from tests.harness.models import WIDTH, Block, Mlp, loss_of

State = dict[str, Any]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.05),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.05), amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
}


class Whole(NamedTuple):
    """Full state dicts of a model and its optimizer."""

    model: State
    optimizer: State


def build(
    make: Callable[[], nn.Module] = Mlp,
    seed: int = 0,
    kind: str = "adamw",
    *,
    in_groups: bool = False,
    wrap: Callable[..., Any] = ZeRO3,
    **options: Any,
) -> tuple[ZeRO3, torch.optim.Optimizer]:
    """A wrapped model, with an optimizer; `in_groups`: vectors have a group and options apart."""
    torch.manual_seed(seed)
    model = wrap(make(), **{"auto_wrap_policy": {Block}, **options})
    if not in_groups:
        return model, OPTIMIZERS[kind](model.parameters())
    shapes = {p: getattr(p, "layerzero", p).shape for p in model.parameters()}
    vectors = [p for p, shape in shapes.items() if len(shape) < 2]
    others = [p for p, shape in shapes.items() if len(shape) >= 2]
    apart = {"params": vectors, "weight_decay": 0.0, "lr": 0.02}
    groups = [group for group in ({"params": others}, apart) if group["params"]]
    return model, OPTIMIZERS[kind](groups)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, begin: int = 0
) -> list[float]:
    """Steps with other batches on each rank; their losses."""
    losses = []
    for step in range(begin, begin + steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = loss_of(model(torch.randn(3, WIDTH, generator=generator)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything(model: ZeRO3, optimizer: torch.optim.Optimizer) -> Whole:
    """Collective."""
    full = get_model_state_dict(model, full=True)
    return Whole(full, get_optimizer_state_dict(model, optimizer, full=True))


def values_and_states(model: ZeRO3, optimizer: torch.optim.Optimizer) -> tuple[State, State]:
    """What this rank has in full, where ranks have other experts. Collective."""
    values, state = everything(model, optimizer)
    return values, {f"{n}: {k}": v for n, own in state["state"].items() for k, v in own.items()}


def assert_same(actual: tuple[State, State], expected: tuple[State, State], what: str = "") -> None:
    assert_same_state(actual[0], expected[0], what)
    assert_same_optimizer(actual[1], expected[1], what)


def assert_same_optimizer(actual: State, expected: State, what: str = "") -> None:
    # torch makes lists of tuples where it spreads full tensors.
    given, wanted = (
        [{k: list(v) if type(v) is tuple else v for k, v in g.items()} for g in each]
        for each in (actual["param_groups"], expected["param_groups"])
    )
    assert given == wanted, what
    assert actual["state"].keys() == expected["state"].keys(), what
    for name, state in expected["state"].items():
        assert_same_state(actual["state"][name], state, f"{what}: {name}")


def assert_same_state(actual: State, expected: State, what: str = "") -> None:
    """In whatever order."""
    assert actual.keys() == expected.keys(), what
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert_bitwise(actual[key], value, f"{what} {key}")
        else:
            assert actual[key] == value, f"{what} {key}"
