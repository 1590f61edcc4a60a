"""Tensors are found and replaced in everything a module takes or returns."""

import dataclasses
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import torch

from tests.harness.internals import find_tensors, move

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    note: str


def nested(tensor: torch.Tensor):
    return {"a": [tensor, (1, None)], "b": Pair(Frozen(tensor, "x"), OrderedDict(c=tensor))}


def test_tensors_are_found_at_any_depth() -> None:
    tensor = torch.ones(2)
    deep: list = [tensor]
    for _ in range(20):
        deep = [deep]
    assert list(find_tensors(deep)) == [tensor]
    assert sum(found is tensor for found in find_tensors(nested(tensor))) == 3


def test_plain_objects_are_looked_through_and_a_cycle_ends() -> None:
    value = SimpleNamespace(inner=SimpleNamespace(tensor=torch.ones(1)))
    value.me = value
    assert value.inner.tensor in list(find_tensors(value))


def test_moving_takes_what_is_elsewhere_and_nothing_else() -> None:
    here, there = torch.ones(2), torch.ones(2, device="meta")
    value = {"there": there, "nested": nested(here)}
    assert move(value, torch.device("cpu")) is value, "meta tensors stay"
    moved = move(value, torch.device("meta"))
    assert {t.device.type for t in find_tensors(moved)} == {"meta"}
    assert moved["there"] is there
    assert {t.device.type for t in find_tensors(value["nested"])} == {"cpu"}
