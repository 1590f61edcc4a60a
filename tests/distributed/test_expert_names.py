"""Experts that have the same names on every rank of the expert axis are numbered among all, in
state dicts and by name."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torch_names
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

from layerzero import ParallelManager, ShardingPlan, ZeRO3, checkpoint, units
from layerzero.experts.names import global_name, name_members
from tests.distributed.test_experts import (
    EXPERTS,
    Expert,
    Model,
    Moe,
    NamedExperts,
    batches,
    expert_mesh,
    part_of,
    wrapped,
)
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.compare import assert_same_where_present
from tests.harness.ranks import of_all_ranks, on_ranks, run_ranks
from tests.harness.reference import OPTIMIZERS, backward_of_all_ranks, forward_backward, seeded
from tests.harness.saved_models import values_and_states


class LocalExperts(nn.Module):
    """In a list of this rank's, as Megatron's `local_experts` are; each with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(Expert() for _ in range(EXPERTS))
        for number, expert in enumerate(self.each):
            expert.register_buffer("number", torch.tensor(float(number)))

    def keep(self, mesh: DeviceMesh) -> None:
        share, rank = EXPERTS // mesh["ep"].size(), mesh["ep"].get_local_rank()
        self.each = self.each[share * rank : share * (rank + 1)]

    def forward(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [expert(x) for expert, x in zip(self.each, parts, strict=True)]


PLAN = {
    "apply_modules": ["layers.{*}", "layers.{*}.experts"],
    "ep_plan": ["layers.{*}.experts"],
    "local_experts": True,
    "defaults": {"timeout": 25},
}


def _own(ep: int) -> range:
    share = EXPERTS // ep
    return range(share * (dist.get_rank() % ep), share * (dist.get_rank() % ep + 1))


def _make(way: str, ep: int) -> ZeRO3:
    mesh, model = expert_mesh(ep), part_of(seeded(lambda: Model(LocalExperts)), ep)
    if way == "manager":
        return ParallelManager(ep_size=ep).parallelize(model, ShardingPlan.from_dict(PLAN))
    numbers: Any = mesh["ep"] if way == "axis" else mesh["ep"].get_group()

    def choose(module: nn.Module, fqn: str) -> Any:
        if isinstance(module, Expert if way == "each" else LocalExperts):
            return {"process_group": mesh["edp"], "expert_numbers": numbers}
        return isinstance(module, Moe)

    return ZeRO3(model, auto_wrap_policy=choose, timeout=timedelta(seconds=25))


def _names(ep: int) -> set[str]:
    """Of this rank's parameters, among all."""
    others = {f".each.{number}." for number in range(EXPERTS)} - {f".each.{n}." for n in _own(ep)}
    whole = seeded(lambda: Model(LocalExperts))
    names = {name for name, _ in whole.named_parameters()}
    return {name for name in names if not any(other in name for other in others)}


def _train(way: str, ep: int) -> tuple[ZeRO3, torch.optim.Optimizer]:
    """A step beside the whole model on one process."""
    model, reference = _make(way, ep), seeded(lambda: Model(LocalExperts))
    names = _names(ep)
    assert {sharded_param.layerzero.fqn for sharded_param in model.parameters()} == names
    buffers = {f"layers.{layer}.experts.each.{n}.number" for layer in (0, 1) for n in _own(ep)}
    assert model.state_dict().keys() == names | buffers
    own, expected = (OPTIMIZERS["sgd_momentum"](m.parameters()) for m in (model, reference))
    (batch,) = batches(1)
    forward_backward(model, batch[dist.get_rank()])
    backward_of_all_ranks(reference, batch)
    own.step()
    expected.step()
    values, _ = values_and_states(model, own)
    assert_same_where_present(values, reference.state_dict(), way)
    with model.summon_full_params():
        assert model.state_dict().keys() == values.keys()
    return model, own


def _ways(folder: str) -> Any:
    for way, ep in {"group": 4, "manager": 4}.items():
        _train(way, ep)
    model, optimizer = _train("each", 2)
    assert [unit.fqn for unit in units(model)][-2:] == [
        f"layers.1.experts.each.{index}" for index in (0, 1)
    ], "units are called what their modules are"
    values, states = values_and_states(model, optimizer)
    checkpoint.save(f"{folder}/ours", model, optimizer)

    # Its own state dict, by torch's own means, and by another way of wrapping.
    fresh = _make("each", 2)
    fresh.load_state_dict(model.state_dict())
    assert_same_parameters(checkpoint.get_model_state_dict(fresh, full=True), values)
    fresh = _make("axis", 2)
    assert not checkpoint.set_model_state_dict(fresh, values).missing_keys
    assert_same_parameters(checkpoint.get_model_state_dict(fresh, full=True), values)
    fresh, both = _make("axis", 2), {"model": checkpoint.get_model_state_dict(model)}
    dcp.save(both, checkpoint_id=f"{folder}/torch")
    wanted = {"model": checkpoint.get_model_state_dict(fresh)}
    dcp.load(wanted, checkpoint_id=f"{folder}/torch")
    checkpoint.set_model_state_dict(fresh, wanted["model"])
    assert_same_parameters(checkpoint.get_model_state_dict(fresh, full=True), values)

    # torch's own functions would name them by their modules.
    for ask in (torch_names.get_model_state_dict, torch_names.get_state_dict):
        with pytest.raises(NotImplementedError, match=r"of layerzero\.checkpoint"):
            ask(model, *([optimizer] if ask is torch_names.get_state_dict else []))
    with pytest.raises(NotImplementedError, match="one rank's state would replace another's"):
        torch_names.get_optimizer_state_dict(model, optimizer)
    # The groups' lists of names are no tensors, of which dcp keeps one rank's.
    saved = checkpoint.get_optimizer_state_dict(model, optimizer)["state"]
    dcp.save(saved, checkpoint_id=f"{folder}/states")
    again = OPTIMIZERS["sgd_momentum"](model.parameters())
    wanted = checkpoint.get_optimizer_state_dict(model, again)
    dcp.load(wanted["state"], checkpoint_id=f"{folder}/states")
    checkpoint.set_optimizer_state_dict(model, again, wanted)
    assert_same_parameters(values_and_states(model, again)[1], states)
    torch_names.get_model_state_dict(_make("manager", 1))  # which has all of them

    # The optimizer's own numbers stand for other experts on other ranks.
    with pytest.raises(CheckpointException, match="on ranks with other experts to another"):
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/local")

    # What another rank has is not taken for one's own.
    theirs = of_all_ranks(values)[dist.get_rank() ^ 1]
    before = checkpoint.get_model_state_dict(fresh, full=True)
    own, other = _own(2)[0], 2 - _own(2)[0]
    message = (
        rf'Missing key[^:]*: "layers.0.experts.each.{own}.*Unexp[^:]*: "layers.0[a-z.]*{other}'
    )
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        fresh.load_state_dict(theirs)
    after = checkpoint.get_model_state_dict(fresh, full=True)
    for expert in _own(2):
        name = f"layers.0.experts.each.{expert}.up.weight"
        assert_bitwise(after[name], before[name], name)
    return values, states


def _load(folder: str, expected: Any, named: bool) -> None:
    """At another split, and into a model whose experts are named by their number among all."""
    for ep in {4: (1, 4), 1: (1,)}[dist.get_world_size()]:
        model = wrapped(ep, NamedExperts) if named else _make("axis", ep)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = OPTIMIZERS["sgd_momentum"](model.parameters())
        checkpoint.load(folder, model, optimizer, strict=not named)  # of buffers
        for own, whole in zip(values_and_states(model, optimizer), expected, strict=True):
            assert own
            assert_same_parameters(own, {name: whole[name] for name in own}, what=f"ep {ep}")


def test_local_experts_train_and_are_saved_under_their_numbers_among_all(tmp_path: Path) -> None:
    expected: Any = ({}, {})
    for values in run_ranks(4, _ways, str(tmp_path), in_float64=True):
        for into, own in zip(expected, values, strict=True):
            into.update(own)
    run_ranks(4, _load, f"{tmp_path}/ours", expected, False, in_float64=True)
    run_ranks(1, _load, f"{tmp_path}/ours", expected, True, in_float64=True)


@on_ranks(4)
def test_numbers_that_do_not_fit_are_refused_on_every_rank() -> None:
    mesh, rank = expert_mesh(2), dist.get_rank()
    edp, ep = mesh["edp"], mesh["ep"]
    where = rf"layers.0.experts \(rank {rank}\): expert_numbers"

    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(2, 2)

    for own, error, message, kind in (
        ({"expert_numbers": ep}, ValueError, f"{where} needs a process_group too", LocalExperts),
        (
            {"process_group": edp, "expert_numbers": edp},
            ValueError,
            "only this rank may be in both",
            0,
        ),
        ({"process_group": edp, "expert_numbers": 2}, TypeError, "expected a ProcessGroup", 0),
        ({"process_group": edp, "expert_numbers": ep}, ValueError, "contains no number", Stacked),
        ({"process_group": edp, "expert_numbers": ep}, ValueError, "remove expert_n", NamedExperts),
        ({"process_group": edp}, ValueError, "pass expert_numbers with the process_group", 0),
    ):
        kind = kind or LocalExperts
        model = seeded(lambda kind=kind: Model(kind))
        for layer in model.layers if kind is not Stacked else ():
            layer.experts.keep(mesh)

        def choose(module: nn.Module, fqn: str, own: Any = own, kind: Any = kind) -> Any:
            return own if isinstance(module, kind) else False

        with pytest.raises(error, match=message):
            ZeRO3(model, auto_wrap_policy=choose)
        assert not any("_layerzero" in key for m in model.modules() for key in vars(m))


class Lists(nn.Module):
    """Lists of modules and of parameters, and a sequence whose numbers are the same everywhere."""

    def __init__(self, numbers: dict[str, str]) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
        self.down = nn.ParameterList(nn.Parameter(torch.randn(2)) for _ in range(2))
        self.rest = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if numbers:
            name_members(self.up, numbers)
            name_members(self.down, numbers)


def test_state_dicts_of_all_lists_have_the_numbers_among_all() -> None:
    plain, renamed = Lists({}), Lists({"0": "2", "1": "3"})
    names = [global_name(renamed, name) for name in plain.state_dict()]
    assert names[0] == "up.2.0.weight" and {"down.3", "rest.1.bias"} <= {*names}
    assert list(renamed.state_dict()) == names
    assert list(renamed.state_dict(prefix="x.")) == [f"x.{name}" for name in names]
    renamed.load_state_dict(dict(zip(names, plain.state_dict().values(), strict=True)))
    assert_same_parameters(dict(renamed.named_parameters()), dict(plain.named_parameters()))
    # Local numbers are those of another rank's.
    found = renamed.load_state_dict(Lists({}).state_dict(), strict=False)
    in_lists = {name for name in plain.state_dict() if not name.startswith("rest.")}
    assert {*found.unexpected_keys} == in_lists
    assert {*found.missing_keys} == {global_name(renamed, name) for name in in_lists}
    for name in in_lists & dict(plain.named_parameters()).keys():
        assert torch.equal(renamed.get_parameter(name), plain.get_parameter(name)), name
