"""Functions that are called for each torch optimizer of sharded parameters."""

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from layerzero.flat.parameter_info import ParameterInfo, set_info
from layerzero.optim import attach, steps


def sharded_param() -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(2))
    set_info(parameter, ParameterInfo("w", torch.Size([4]), (0, 2)))
    return parameter


def plain() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2))


class Calls:
    """What the registered functions were called with."""

    def __init__(self) -> None:
        self.met: list[torch.optim.Optimizer] = []
        self.stepping: list[torch.optim.Optimizer] = []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    found = Calls()
    monkeypatch.setattr(attach, "_on_sharded_params", [])
    monkeypatch.setattr(attach, "_on_first_step", [])
    monkeypatch.setattr(attach, "_before_first", [])
    attach.on_sharded_params(found.met.append)
    attach.on_first_step(found.stepping.append)
    steps.watch(lambda: None)
    return found


def test_functions_are_called_once_for_an_optimizer_of_shards(calls: Calls) -> None:
    for given in (
        [sharded_param()],
        [{"params": [plain()]}, {"params": [sharded_param()]}],
        [("w", sharded_param())],
    ):
        calls.met.clear()
        optimizer = torch.optim.Adam(given)
        other = ("other", sharded_param()) if isinstance(given[0], tuple) else sharded_param()
        optimizer.add_param_group({"params": [other]})
        assert calls.met == [optimizer]
    optimizer = torch.optim.AdamW([plain()])
    assert calls.met[1:] == [] and not optimizer._optimizer_step_pre_hooks
    optimizer.add_param_group({"params": [sharded_param()]})
    assert calls.met[1:] == [optimizer], "a group added later counts"


def test_functions_for_the_first_step_run_once_before_it(calls: Calls) -> None:
    optimizer = torch.optim.SGD([sharded_param()], lr=0.1)
    assert calls.stepping == []
    for _ in range(3):
        optimizer.step()
    assert calls.stepping == [optimizer]


def test_a_copy_of_an_optimizer_is_another_one(calls: Calls) -> None:
    optimizer = torch.optim.SGD([sharded_param()], lr=0.1)
    twin = copy.copy(optimizer)
    stream = io.BytesIO()
    torch.save(optimizer, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    assert calls.met == [optimizer, twin, loaded]
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(calls.met) == 3, "loading state makes no other one of it"
