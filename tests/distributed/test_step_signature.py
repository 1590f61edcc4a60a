"""`model.step_signature()`: equal for equal bits, on any number of ranks and with any units."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero import ZeRO3
from tests.distributed import test_experts as experts
from tests.distributed import test_tensor_parallel as tensor_parallel
from tests.harness.models import Block
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.reference import seeded

OPTIMIZERS: dict[str, Callable[[ZeRO3], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "native": lambda model: layerzero.optim.AdamW(model.parameters(), lr=0.1),
    "8bit": lambda model: layerzero.optim.AdamW(
        [p for p in model.parameters() if p.dtype == torch.float32], lr=0.1, state="8bit"
    ),
    "whole": lambda model: layerzero.optim.WholeTensorOptimizer(
        [p for name, p in model.named_parameters() if "blocks" in name and "weight" in name],
        torch.optim.AdamW,
        lr=0.1,
    ),
}


class _Odd(nn.Module):
    """With a scalar, an empty parameter, float64, a frozen one and one that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.wide = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.ignored = nn.Parameter(torch.randn(5))


def _model(**given: Any) -> ZeRO3:
    torch.manual_seed(0)
    module = _Odd()
    return ZeRO3(module, ignored_parameters=[module.ignored], **given)


def _signatures(settings: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, set[str]]:
    """By optimizer, the signatures after two steps under all of the settings."""
    found: dict[str, set[str]] = {name: set() for name in [*names, "none"]}
    for given in settings:
        found["none"].add(_model(**given).step_signature())
        for name in names:
            model = _model(**given)
            optimizer = OPTIMIZERS[name](model)
            for number in range(2):
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.full_like(parameter, 0.5 + number)
                optimizer.step()
            found[name].add(model.step_signature(optimizer))
    return found


SETTINGS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"auto_wrap_policy": {Block}}, {"auto_wrap_policy": {nn.Linear}}],
    3: [{}],
    4: [
        {"zero3_size": 2, "auto_wrap_policy": {Block}},
        {"zero3_size": 2, "outer": "replicate"},
    ],
}
"""By number of ranks."""


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((1, 2), ["AdamW", "8bit"]),
        pytest.param(SETTINGS.keys(), list(OPTIMIZERS), marks=pytest.mark.slow),
    ],
    ids=["units", "modes and optimizers"],
)
def test_signatures_do_not_depend_on_units_and_ranks(
    sizes: Sequence[int], names: list[str], ranks: KeptRanks
) -> None:
    everywhere = [
        found for size in sizes for found in ranks(size, _signatures, SETTINGS[size], names)
    ]
    for name, signatures in everywhere[0].items():
        assert len(signatures) == 1, name
        for found in everywhere:
            assert found[name] == signatures, name
    assert len(set.union(*everywhere[0].values())) == len(everywhere[0]), "all differ"


@on_ranks(2)
def test_every_change_changes_the_signature() -> None:
    model = _model()
    optimizer = OPTIMIZERS["AdamW"](model)
    seen = [model.step_signature(optimizer)]
    last = dist.get_world_size() - 1
    shard = model._root_state.units[0].handles[0].main_shard
    moved = shard.clone()

    def note() -> None:
        seen.append(model.step_signature(optimizer))
        assert seen.count(seen[-1]) == 1, "the change is not seen"

    with torch.no_grad():
        if dist.get_rank() == last:
            shard[:2] = moved[:2].flip(0)
        note()
        shard.copy_(moved)
        assert model.step_signature(optimizer) == seen[0]
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    note()
    for state in optimizer.state.values():
        state["step"] += 1
    note()
    second = OPTIMIZERS["SGD"](model)
    assert model.step_signature({"a": optimizer, "b": second}) == seen[-1]


def _of_other_axes(kind: str) -> list[str]:
    if dist.get_world_size() == 1:
        build = tensor_parallel.Llama if kind == "tensor parallel" else experts.Model
        return [ZeRO3(seeded(build)).step_signature()]
    if kind == "tensor parallel":
        mesh = tensor_parallel.grid(dist.get_world_size() // 2)
        parts = [tensor_parallel.wrapped(mesh, in_sequence) for in_sequence in (True, False)]
        return [model.step_signature() for model in parts]
    return [experts.wrapped(ep).step_signature() for ep in (2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor parallel", "experts"])
def test_signatures_do_not_depend_on_tensor_parallel_ranks_and_experts(
    kind: str, ranks: KeptRanks
) -> None:
    (expected,) = ranks(1, _of_other_axes, kind)
    for found in ranks(4, _of_other_axes, kind):
        assert found == expected * 2
