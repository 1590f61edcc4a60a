"""Members of lists under their names among all ranks, in state dicts and by name. No ranks."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from layerzero.experts.names import global_name, name_members, numbers_of


class Layer(nn.Module):
    """Lists of modules and of parameters, and a sequence whose numbers are the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
        self.down = nn.ParameterList(nn.Parameter(torch.randn(2)) for _ in range(2))
        self.rest = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def _named(numbers: dict[str, str]) -> tuple[nn.Module, nn.Module]:
    """A model, and the same whose lists are renamed."""
    torch.manual_seed(0)
    plain = nn.Sequential(Layer(), Layer())
    renamed = copy.deepcopy(plain)
    for layer in renamed:
        name_members(layer.up, numbers)
        name_members(layer.down, numbers)
    return plain, renamed


@pytest.mark.parametrize(
    "numbers", [{"0": "2", "1": "3"}, {"0": "1", "1": "0"}, {"0": "1", "1": "2"}, {"0": "0"}]
)
def test_state_dicts_have_the_names_among_all_and_load_back(numbers: dict[str, str]) -> None:
    plain, renamed = _named(numbers)
    expected = OrderedDict((global_name(renamed, n), v) for n, v in plain.state_dict().items())
    assert global_name(renamed, "1.up.1.0.weight") == f"1.up.{numbers.get('1', '1')}.0.weight"
    assert global_name(renamed, "0.down.0") == f"0.down.{numbers['0']}"
    assert global_name(renamed, "0.rest.1.bias") == "0.rest.1.bias"
    assert global_name(plain, "1.up.1.0.weight") == "1.up.1.0.weight"
    found = renamed.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert list(renamed.state_dict(prefix="x.")) == [f"x.{name}" for name in expected]
    inside = renamed[0].up.state_dict()
    assert set(inside) == {name[5:] for name in expected if name.startswith("0.up.")}
    assert set(renamed[0].up[1].state_dict()) == set(plain[0].up[1].state_dict())

    torch.manual_seed(1)
    fresh = nn.Sequential(Layer(), Layer())
    for layer in fresh:
        name_members(layer.up, numbers)
        name_members(layer.down, numbers)
    fresh.load_state_dict(found)
    for name, value in plain.named_parameters():
        assert torch.equal(fresh.get_parameter(name), value), name
    assert {name for name, _ in fresh.named_parameters()} == dict(plain.named_parameters()).keys()


def test_members_that_another_rank_has_are_unexpected_and_own_ones_missing_by_their_names() -> None:
    plain, renamed = _named({"0": "2", "1": "3"})
    before = copy.deepcopy(dict(renamed.named_parameters()))
    found = renamed.load_state_dict(plain.state_dict(), strict=False)
    of_lists = {name for name in plain.state_dict() if ".rest." not in name}
    assert set(found.unexpected_keys) == of_lists
    assert set(found.missing_keys) == {global_name(renamed, name) for name in of_lists}
    for name, value in renamed.named_parameters():
        assert torch.equal(value, before[name]), name
    assert numbers_of(plain[0].up) == {}
    both = {**plain.state_dict(), **renamed.state_dict()}
    assert renamed.load_state_dict(both, strict=False).missing_keys == []
