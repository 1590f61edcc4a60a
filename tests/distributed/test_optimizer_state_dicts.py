"""An optimizer's own state dict: torch's functions save and load it as they do of one process."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.checkpoint.api import CheckpointException

from layerzero import ZeRO3, checkpoint
from layerzero.checkpoint import CheckpointError, ParameterShard
from tests.harness.checks import assert_bitwise
from tests.harness.models import WIDTH, Block, Mlp, loss_of
from tests.harness.ranks import on_ranks
from tests.harness.saved_models import OPTIMIZERS, assert_same, build, everything, train

FULL = theirs.StateDictOptions(full_state_dict=True)


@on_ranks(2)
def test_a_rank_keeps_saving_and_loading_its_own_state() -> None:
    model, optimizer = build(in_groups=True)
    train(model, optimizer)
    expected = everything(model, optimizer)
    state = optimizer.state_dict()
    number = state["param_groups"][0]["params"][0]
    shard = state["state"][number]["exp_avg"]
    sharded_param = optimizer.param_groups[0]["params"][0]
    kept = optimizer.state[sharded_param]["exp_avg"]
    assert type(shard) is ParameterShard and type(kept) is Tensor
    assert shard.shape == sharded_param.layerzero.shape
    assert shard.local.data_ptr() == kept.data_ptr(), "shares its memory"
    name = sharded_param.layerzero.fqn
    assert_bitwise(shard.full_tensor(), expected[1]["state"][name]["exp_avg"], name)
    assert_bitwise(model.state_dict()[name].full_tensor(), expected[0][name], name)

    copied = copy.deepcopy(state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file)
    bare = {
        "state": {
            number: {k: v.local if isinstance(v, ParameterShard) else v for k, v in own.items()}
            for number, own in copied["state"].items()
        },
        "param_groups": copied["param_groups"],
    }
    train(model, optimizer, 1)
    for what, given in {"a copy": copied, "a file": read, "bare pieces": bare}.items():
        other, other_optimizer = build(Mlp, 1, in_groups=True)
        other.load_state_dict(expected[0])
        other_optimizer.load_state_dict(given)
        assert_same(everything(other, other_optimizer), expected, what)
    with pytest.raises(ValueError, match="read from a file"):
        next(v for v in read["state"][number].values() if v.ndim).full_tensor()

    # Schedulers, copies and pickles see an optimizer as ever.
    schedule = torch.optim.lr_scheduler.LambdaLR(other_optimizer, lambda step: 0.5**step)
    twin = copy.copy(other_optimizer)
    assert type(twin.state_dict()["state"][number]["exp_avg"]) is ParameterShard
    pickled = io.BytesIO()
    torch.save(other_optimizer, pickled)
    pickled.seek(0)
    loaded = torch.load(pickled, weights_only=False)
    loaded.load_state_dict(other_optimizer.state_dict())
    train(other, other_optimizer, 1)
    schedule.step()
    assert other_optimizer.state_dict()["param_groups"][0]["lr"] == 0.025


class _Late(torch.optim.SGD):
    """Keeps more from its second step on."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "seen" in state:
                state["slow"] = parameter.detach().clone()
            state["seen"] = 1
        return super().step(closure)


@on_ranks(2)
def test_state_that_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model, optimizer = build(in_groups=True)
    train(model, optimizer)
    expected = everything(model, optimizer)
    groups = [{"params": group["params"]} for group in optimizer.param_groups]
    momentum = OPTIMIZERS["momentum"]([dict(group) for group in groups])
    train(model, momentum, 1)
    model.load_state_dict(expected[0])
    saved = {"adamw": optimizer.state_dict(), "momentum": momentum.state_dict()}
    by_name = theirs.get_optimizer_state_dict(model, optimizer)
    kept = copy.deepcopy(momentum.state_dict())

    checkpoint.save(tmp_path, model, optimizer)
    with torch.no_grad():
        model.head.weight.zero_()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    ungrouped = {"param_groups": [{"params": [*range(len([*model.parameters()]))]}]}
    bad = [copy.deepcopy(saved["momentum"]) for _ in range(2)]
    for state, wrong in zip(bad, (torch.zeros(2, 3), torch.zeros(3)), strict=True):
        state["state"][0]["momentum_buffer"] = wrong
    mismatch = f"'momentum_buffer' of {groups[0]['params'][0].layerzero.fqn}: size mismatch"
    for load, text in (
        (lambda: momentum.load_state_dict(saved["adamw"]), "saved by another optimizer class"),
        (lambda: optimizer.load_state_dict(saved["momentum"]), "saved by another optimizer class"),
        (
            lambda: theirs.set_optimizer_state_dict(model, momentum, by_name),
            "exp_avg.* SGD keeps momentum_buffer",
        ),
        (
            lambda: checkpoint.set_optimizer_state_dict(model, momentum, by_name),
            "another optimizer class",
        ),
        (lambda: checkpoint.load(tmp_path, model, momentum), "another optimizer class"),
        (lambda: sgd.load_state_dict({**saved["adamw"], **ungrouped}), "SGD keeps nothing"),
        (lambda: momentum.load_state_dict(bad[0]), mismatch),
        (lambda: momentum.load_state_dict(bad[1]), mismatch),
    ):
        with pytest.raises(CheckpointError, match=text):
            load()
    assert not model.head.weight.any(), "nothing was loaded"
    full = copy.deepcopy(saved["momentum"])
    full["state"][0]["momentum_buffer"] = torch.ones(groups[0]["params"][0].layerzero.shape)
    for state, own in kept["state"].items():
        now = momentum.state_dict()["state"][state]["momentum_buffer"]
        assert torch.equal(now, own["momentum_buffer"]), "what was refused changed nothing"
    momentum.load_state_dict(full)
    buffer = momentum.state[groups[0]["params"][0]]["momentum_buffer"]
    assert buffer.shape == groups[0]["params"][0].shape
    assert bool((buffer == 1).all())

    # AdamW takes what Adam kept, and a class may add state after its first step.
    torch.optim.Adam([dict(group) for group in groups]).load_state_dict(saved["adamw"])
    late = _Late(model.parameters(), lr=0.1)
    train(model, late, 2)
    fresh = _Late(model.parameters(), lr=0.1)
    fresh.load_state_dict(late.state_dict())
    assert "slow" in next(iter(fresh.state.values()))


class Flat(torch.optim.SGD):
    """Keeps one vector of all that it has, as LBFGS does."""

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        loss = super().step(closure)
        self.state[parameters[0]]["d"] = torch.cat([each.detach() for each in parameters])
        return loss


@on_ranks(2)
def test_state_that_no_other_ranks_could_load_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    model = ZeRO3(Mlp(), auto_wrap_policy={Block})
    optimizer = Flat(model.parameters(), lr=0.1)
    batch = torch.ones(2, WIDTH)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(batch))
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state_dict()
    with pytest.raises(CheckpointException, match="cannot be resharded"):
        dcp.save({"optimizer": state}, checkpoint_id=tmp_path)
    with pytest.raises(NotImplementedError, match=r"optimizer state 'd' of .*torch\.save"):
        theirs.get_optimizer_state_dict(model, optimizer, options=FULL)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = Flat(model.parameters(), lr=0.1)
    again.load_state_dict(torch.load(file))
    (own,), (expected,) = again.state.values(), optimizer.state.values()
    assert type(own["d"]) is Tensor
    assert_bitwise(own["d"], expected["d"])
    again.step(closure)


@on_ranks(2)
def test_ranks_that_would_gather_different_tensors_raise() -> None:
    model, optimizer = build(in_groups=True)
    train(model, optimizer)
    weights = model.state_dict()
    if dist.get_rank() == 1:
        del weights["head.weight"]
    with pytest.raises(CheckpointError, match=r"differ between ranks: 15 on rank 0, 14 on rank 1"):
        theirs._gather_state_dict(weights)
