"""An optimizer's own state dict: torch's functions save and load it as they do of one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.checkpoint.api import CheckpointException

from layerzero import ZeRO3, checkpoint
from layerzero.checkpoint import CheckpointError, ParameterShard
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.models import WIDTH, Block, FrozenParts, Mlp, OddShapes, TiedAcrossUnits, loss_of
from tests.harness.ranks import run_ranks

State = dict[str, Any]
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.05),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.05, amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
}
SETTINGS: list[tuple[type[nn.Module], str, State]] = [
    (Mlp, "adamw", {}),
    (Mlp, "momentum", {"zero3_size": 1, "outer": "zero1"}),
    (TiedAcrossUnits, "adamw", {"zero3_size": 1, "outer": "replicate"}),
    (OddShapes, "amsgrad", {}),  # more ranks than elements: shards are empty somewhere
    (FrozenParts, "momentum", {}),
    (Mlp, "adagrad", {}),
]
GROUPS = "param_groups"
FULL = theirs.StateDictOptions(full_state_dict=True)


def _build(
    make: type[nn.Module], kind: str, seed: int = 0, **options: Any
) -> tuple[ZeRO3, torch.optim.Optimizer]:
    """Two groups with options of their own, the vectors and the rest."""
    torch.manual_seed(seed)
    model = ZeRO3(make(), auto_wrap_policy={Block}, **options)
    vectors = [p for p in model.parameters() if len(p.layerzero.shape) < 2]
    others = [p for p in model.parameters() if len(p.layerzero.shape) >= 2]
    groups = [{"params": others}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]
    return model, OPTIMIZERS[kind](groups)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss_of(model(torch.randn(3, WIDTH, generator=generator))).backward()
        optimizer.step()
        optimizer.zero_grad()


def _expected(model: ZeRO3, optimizer: torch.optim.Optimizer) -> tuple[State, State]:
    """Gathered by our own functions."""
    full = checkpoint.get_model_state_dict(model, full=True)
    return full, checkpoint.get_optimizer_state_dict(model, optimizer, full=True)


def _assert_same(actual: tuple[State, State], expected: tuple[State, State], what: str) -> None:
    assert_same_parameters(actual[0], expected[0], what=what)
    # torch makes lists of tuples where it spreads full tensors.
    given = [{k: list(v) if k == "betas" else v for k, v in g.items()} for g in actual[1][GROUPS]]
    wanted = [
        {k: list(v) if k == "betas" else v for k, v in g.items()} for g in expected[1][GROUPS]
    ]
    assert given == wanted, what
    assert actual[1]["state"].keys() == expected[1]["state"].keys(), what
    for name, state in expected[1]["state"].items():
        assert_same_parameters(actual[1]["state"][name], state, what=f"{what}: {name}")


def _write(folder: str) -> list[tuple[State, State]]:
    found, everything = [], {}
    for number, (make, kind, options) in enumerate(SETTINGS):
        model, optimizer = _build(make, kind, **options)
        _train(model, optimizer)
        expected = _expected(model, optimizer)
        what = f"{make.__name__} {kind}"
        full = theirs.get_state_dict(model, optimizer, options=FULL)
        assert all(type(value) is Tensor for value in full[0].values()), what
        _assert_same(full, expected, what)
        weights, state = theirs.get_state_dict(model, optimizer)
        everything[str(number)] = [weights, state, optimizer.state_dict()]
        found.append(expected)
    dcp.save(everything, checkpoint_id=folder)
    return found


def _read(folder: str, expected: list[tuple[State, State]]) -> None:
    world_size = dist.get_world_size()
    size = 2 if world_size == 4 else None
    built, everything = [], {}
    for number, (make, kind, _) in enumerate(SETTINGS):
        model, optimizer = _build(make, kind, 1, zero3_size=size)
        weights, state = theirs.get_state_dict(model, optimizer)
        # The optimizer's own, without names, goes into one that has state.
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        other = OPTIMIZERS[kind](groups)
        _train(model, other, 1)
        everything[str(number)] = [weights, state, other.state_dict()]
        built.append((model, optimizer, other))
    dcp.load(everything, checkpoint_id=folder)
    for number, (model, optimizer, other) in enumerate(built):
        weights, state, own = everything[str(number)]
        theirs.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        other.load_state_dict(own)
        what = f"{SETTINGS[number]} on {world_size} ranks"
        _assert_same(_expected(model, optimizer), expected[number], what)
        _assert_same(_expected(model, other), expected[number], f"{what}, without names")


@pytest.mark.parametrize("world_sizes", [[1, 3], pytest.param([4], marks=pytest.mark.slow)])
def test_torchs_functions_save_on_two_ranks_and_load_on_any_number(
    tmp_path: Path, world_sizes: list[int]
) -> None:
    expected = run_ranks(2, _write, str(tmp_path))[0]
    for world_size in world_sizes:
        run_ranks(world_size, _read, str(tmp_path), expected)


def _full_and_broadcast() -> None:
    for make, kind, options in SETTINGS[:4]:
        what = f"{make.__name__} {kind}"
        model, optimizer = _build(make, kind, **options)
        _train(model, optimizer)
        expected = _expected(model, optimizer)
        first = theirs.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, state = theirs.get_state_dict(model, optimizer, options=first)
        if dist.get_rank() == 0:
            _assert_same((weights, state), expected, what)
        else:
            assert not weights and not state
        # An unsharded model and optimizer take what came out.
        if dist.get_rank() == 0:
            plain = make()
            pairs = [(p, p.ndim < 2) for p in plain.parameters()]
            groups = [
                {"params": [p for p, own in pairs if own == wants]} for wants in (False, True)
            ]
            twin = OPTIMIZERS[kind](groups)
            theirs.set_state_dict(
                plain,
                twin,
                model_state_dict=copy.deepcopy(weights),
                optim_state_dict=copy.deepcopy(state),
                options=FULL,
            )
            again = theirs.get_state_dict(plain, twin)
            _assert_same(again, expected, f"{what}, unsharded")
        # From the first rank to all; from every rank's full tensors; without saying so.
        all_weights, all_state = theirs.get_state_dict(model, optimizer, options=FULL)
        for given, how in (
            (
                (weights, state),
                theirs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
            ),
            ((all_weights, all_state), FULL),
            ((all_weights, all_state), theirs.StateDictOptions()),
        ):
            other, other_optimizer = _build(make, kind, 1)
            own_weights, own_state = copy.deepcopy(given)
            theirs.set_model_state_dict(other, own_weights, options=how)
            theirs.set_optimizer_state_dict(other, other_optimizer, own_state, options=how)
            _assert_same(_expected(other, other_optimizer), expected, f"{what} {how}")
        _train(model, optimizer, 1)
        _train(other, other_optimizer, 1)
        # `replicate` and one group sum in other orders; the rest of the settings are bitwise.
        if not options:
            _assert_same(_expected(other, other_optimizer), _expected(model, optimizer), what)


def test_full_state_dicts_of_torch_are_whole_and_load_from_one_rank_or_all() -> None:
    run_ranks(2, _full_and_broadcast)


def _flat(folder: str) -> None:
    flat = theirs.StateDictOptions(flatten_optimizer_state_dict=True)
    full_flat = theirs.StateDictOptions(flatten_optimizer_state_dict=True, full_state_dict=True)
    model, optimizer = _build(Mlp, "adamw", 1)
    if dist.get_world_size() == 2:
        _train(model, optimizer)
        expected = _expected(model, optimizer)
        state = theirs.get_optimizer_state_dict(model, optimizer, options=full_flat)
        for name, own in expected[1]["state"].items():
            for key, value in own.items():
                assert_bitwise(state[f"state.{name}.{key}"], value, f"{name} {key}")
        state = theirs.get_optimizer_state_dict(model, optimizer, options=flat)
        dcp.save({"optimizer": state}, checkpoint_id=folder)
        torch.save(expected, f"{folder}/expected") if dist.get_rank() == 0 else None
        return
    state = theirs.get_optimizer_state_dict(model, optimizer, options=flat)
    dcp.load({"optimizer": state}, checkpoint_id=folder)
    theirs.set_optimizer_state_dict(model, optimizer, state, options=flat)
    expected = torch.load(f"{folder}/expected")
    _assert_same((expected[0], _expected(model, optimizer)[1]), expected, "flat")


def test_flattened_optimizer_state_loads_on_other_ranks(tmp_path: Path) -> None:
    run_ranks(2, _flat, str(tmp_path))
    run_ranks(3, _flat, str(tmp_path))


def _per_rank() -> None:
    model, optimizer = _build(Mlp, "adamw")
    _train(model, optimizer)
    expected = _expected(model, optimizer)
    before = {p: dict(state) for p, state in optimizer.state.items()}
    state = optimizer.state_dict()
    for parameter, own in before.items():
        assert dict(optimizer.state[parameter]) == own, "the optimizer keeps its own entries"
    number = state["param_groups"][0]["params"][0]
    shard = state["state"][number]["exp_avg"]
    sharded_param = optimizer.param_groups[0]["params"][0]
    assert type(shard) is ParameterShard
    assert shard.shape == sharded_param.layerzero.shape
    assert shard.local.data_ptr() == before[sharded_param]["exp_avg"].data_ptr(), (
        "and shares their memory"
    )
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
    _train(model, optimizer, 1)
    for what, given in {"a copy": copied, "a file": read, "bare pieces": bare}.items():
        other, other_optimizer = _build(Mlp, "adamw", 1)
        other.load_state_dict(expected[0])
        other_optimizer.load_state_dict(given)
        _assert_same(_expected(other, other_optimizer), expected, what)
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
    _train(other, other_optimizer, 1)
    schedule.step()
    assert other_optimizer.state_dict()["param_groups"][0]["lr"] == 0.025


def test_a_rank_keeps_saving_and_loading_its_own_state() -> None:
    run_ranks(2, _per_rank)


def _refused(folder: str) -> None:
    model, optimizer = _build(Mlp, "adamw")
    _train(model, optimizer)
    expected = _expected(model, optimizer)
    groups = [{"params": group["params"]} for group in optimizer.param_groups]
    momentum = OPTIMIZERS["momentum"]([dict(group) for group in groups])
    _train(model, momentum, 1)
    model.load_state_dict(expected[0])
    saved = {"adamw": optimizer.state_dict(), "momentum": momentum.state_dict()}
    by_name = theirs.get_optimizer_state_dict(model, optimizer)
    kept = copy.deepcopy(momentum.state_dict())

    for own, other in ((momentum, "adamw"), (optimizer, "momentum")):
        with pytest.raises(CheckpointError, match=r"saved by another optimizer class"):
            own.load_state_dict(saved[other])
    with pytest.raises(CheckpointError, match=r"exp_avg.* SGD keeps momentum_buffer"):
        theirs.set_optimizer_state_dict(model, momentum, by_name)
    with pytest.raises(CheckpointError, match="another optimizer class"):
        checkpoint.set_optimizer_state_dict(model, momentum, by_name)
    checkpoint.save(folder, model, optimizer)
    with torch.no_grad():
        model.head.weight.zero_()
    with pytest.raises(CheckpointError, match="another optimizer class"):
        checkpoint.load(folder, model, momentum)
    assert not model.head.weight.any(), "nothing was loaded"
    plain_sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="SGD keeps nothing"):
        plain_sgd.load_state_dict(
            {
                **saved["adamw"],
                "param_groups": [{"params": list(range(len(list(model.parameters()))))}],
            }
        )

    name = groups[0]["params"][0].layerzero.fqn
    for wrong in (torch.zeros(2, 3), torch.zeros(3)):
        bad = copy.deepcopy(saved["momentum"])
        bad["state"][0]["momentum_buffer"] = wrong
        with pytest.raises(CheckpointError, match=f"'momentum_buffer' of {name}: size mismatch"):
            momentum.load_state_dict(bad)
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
    _train(model, late, 2)
    fresh = _Late(model.parameters(), lr=0.1)
    fresh.load_state_dict(late.state_dict())
    assert "slow" in next(iter(fresh.state.values()))


class _Late(torch.optim.SGD):
    """Keeps more from its second step on."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "seen" in state:
                state["slow"] = parameter.detach().clone()
            state["seen"] = 1
        return super().step(closure)


def test_state_that_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    run_ranks(2, _refused, str(tmp_path))


class Flat(torch.optim.SGD):
    """Keeps one vector of all that it has, as LBFGS does."""

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        loss = super().step(closure)
        self.state[parameters[0]]["d"] = torch.cat([each.detach() for each in parameters])
        return loss


def _not_elementwise(folder: str) -> None:
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
        dcp.save({"optimizer": state}, checkpoint_id=folder)
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


def test_state_that_no_other_ranks_could_load_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    run_ranks(2, _not_elementwise, str(tmp_path))


def _unequal() -> None:
    model, optimizer = _build(Mlp, "adamw")
    _train(model, optimizer)
    weights = model.state_dict()
    if dist.get_rank() == 1:
        del weights["head.weight"]
    with pytest.raises(CheckpointError, match=r"number of entries .*on rank 0.*on rank 1"):
        theirs._gather_state_dict(weights)


def test_ranks_that_would_gather_different_tensors_raise() -> None:
    run_ranks(2, _unequal)
