"""Checkpoints and state dicts where ranks have parts of a model: any split to any other. Experts
that have the same names on every rank of the expert axis are numbered among all."""

import functools
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torch_names
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from layerzero import ParallelManager, ShardingPlan, ZeRO3, checkpoint, units
from layerzero.experts.names import global_name, name_members
from tests.distributed import test_experts as experts
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
from tests.distributed.test_tensor_parallel import LENGTH, Llama, parallelize
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.compare import assert_same_where_present
from tests.harness.decoder import VOCAB, DecoderLayer
from tests.harness.models import Parts
from tests.harness.ranks import KeptRanks, of_all_ranks, on_ranks, run_ranks
from tests.harness.reference import OPTIMIZERS, backward_of_all_ranks, forward_backward, seeded
from tests.harness.saved_models import values_and_states

Values = dict[str, Any]
TENSOR_PARALLEL = "tensor-parallel"
ADAMW = functools.partial(torch.optim.AdamW, lr=0.05)


def build(kind: str, split: int, in_sequence: bool = True, **options: Any) -> ZeRO3:
    """A model of which `split` ranks have parts: tensor-parallel, or a class of experts."""
    if kind != TENSOR_PARALLEL:
        return experts.wrapped(split, getattr(experts, kind), **options)
    torch.manual_seed(0)
    model, group = Llama(), None
    if split > 1:
        shape = (dist.get_world_size() // split, split)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        parallelize(model, mesh["tp"], in_sequence)
        group = mesh["dp"]
    return ZeRO3(model, group, auto_wrap_policy={DecoderLayer}, **options)


def _train(kind: str, model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for step, of_ranks in enumerate(batches(2)):
        if kind == TENSOR_PARALLEL:
            # The same on all ranks: those of one tensor-parallel group must have it.
            draw = torch.Generator().manual_seed(step)
            model(torch.randint(VOCAB, (4, LENGTH + 1), generator=draw)).backward()
        else:
            forward_backward(model, of_ranks[dist.get_rank()])
        optimizer.step()
        optimizer.zero_grad()


def _found(model: ZeRO3, optimizer: torch.optim.Optimizer) -> tuple[Values, Values]:
    """Weights, and states of the parameters of which this rank has a part, in full."""
    state = checkpoint.get_optimizer_state_dict(model, optimizer, full=True)["state"]
    return checkpoint.get_model_state_dict(model, full=True), dict(state)


def _check(found: tuple[Values, ...], expected: tuple[Values, ...], what: str) -> None:
    """What this rank has is what is expected of all."""
    for own, everything in zip(found, expected, strict=True):
        assert own and own.keys() <= everything.keys(), what
        for name, value in own.items():
            leaves = (
                tree_leaves(dict(sorted(each.items())) if isinstance(each, dict) else each)
                for each in (value, everything[name])
            )
            for got, wanted in zip(*leaves, strict=True):
                if isinstance(got, Tensor):
                    assert_bitwise(got, wanted, f"{what}: {name}")
                else:
                    assert got == wanted, f"{what}: {name}"


def _write(root: str, kind: str, split: int, options: Values) -> tuple[Values, ...]:
    model = build(kind, split, **options)
    adamw = ADAMW(model.parameters())
    _train(kind, model, adamw)
    checkpoint.save(f"{root}/ours", model, adamw)
    weights, state = theirs.get_state_dict(model, adamw)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{root}/dcp")
    expected = _found(model, adamw)
    values = expected[0]
    how = theirs.StateDictOptions(full_state_dict=True)
    weights, state = theirs.get_state_dict(model, adamw, options=how)
    _check((weights, state["state"]), expected, "full_state_dict=True")
    _check((dict(checkpoint.stream_full(model, 600)),), (values,), "streamed")
    # Full values go from one rank to all, shards to their own rank, DTensors, too.
    other = build(kind, split, **options)
    its_adamw = ADAMW(other.parameters())
    if kind == "NamedExperts":
        for call in (
            lambda: checkpoint.get_model_state_dict(model, full=True, rank0_only=True),
            lambda: checkpoint.set_model_state_dict(model, values, broadcast_from_rank0=True),
        ):
            with pytest.raises(NotImplementedError, match="different experts"):
                call()
    else:
        state = checkpoint.get_optimizer_state_dict(model, adamw, full=True)
        given = (values, state) if dist.get_rank() == 0 else ({}, {})
        checkpoint.set_model_state_dict(other, given[0], broadcast_from_rank0=True)
        checkpoint.set_optimizer_state_dict(other, its_adamw, given[1], broadcast_from_rank0=True)
        _check(_found(other, its_adamw), expected, "broadcast")
    _zero(other)
    other.load_state_dict(model.state_dict())
    _check((checkpoint.get_model_state_dict(other, full=True),), (values,), "shards")
    with model.summon_full_params(writeback=False):
        summoned = model.state_dict()
        whole = {n: v.full_tensor() if type(v) is DTensor else v for n, v in summoned.items()}
        _check((whole,), (values,), "summoned")
        _zero(other)
        other.load_state_dict(summoned)
    _check((checkpoint.get_model_state_dict(other, full=True),), (values,), "DTensors")
    return expected


def _zero(model: ZeRO3) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def _read(root: str, kind: str, split: int, expected: tuple[Values, ...]) -> list[set[str]]:
    is_split_in_two_ways = kind == TENSOR_PARALLEL and split > 1
    for in_sequence in (True, False)[: 1 + is_split_in_two_ways]:
        what = f"{kind}: {dist.get_world_size()} ranks, split {split}, {in_sequence}"
        for way in ("ours", "dcp"):
            model = build(kind, split, in_sequence)
            adamw = ADAMW(model.parameters())
            _zero(model)
            if way == "ours":
                checkpoint.load(f"{root}/ours", model, adamw)
            else:
                tools: Any = theirs if in_sequence else checkpoint  # torch's functions, or ours
                weights = tools.get_model_state_dict(model)
                state = tools.get_optimizer_state_dict(model, adamw)
                dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{root}/dcp")
                tools.set_model_state_dict(model, weights)
                tools.set_optimizer_state_dict(model, adamw, state)
            _check(found := _found(model, adamw), expected, f"{what}, {way}")
    return [set(each) for each in found]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "num_ranks", "split", "options", "readers"),
    [
        (TENSOR_PARALLEL, 2, 2, {}, [(1, 1), (4, 2)]),
        ("NamedExperts", 4, 2, {}, [(4, 1), (4, 4), (1, 1)]),
        ("StackedExperts", 4, 2, {}, [(4, 1), (4, 4), (1, 1)]),
        pytest.param(
            TENSOR_PARALLEL, 4, 2, {"in_sequence": False, "zero3_size": 1}, [(2, 1)], marks=slow
        ),
        pytest.param(TENSOR_PARALLEL, 3, 1, {}, [(4, 4)], marks=slow),
        pytest.param("StackedExperts", 4, 1, {}, [(2, 2), (1, 1)], marks=slow),
    ],
)
def test_any_split_loads_into_any_other(
    tmp_path: Path,
    kind: str,
    num_ranks: int,
    split: int,
    options: Values,
    readers: list[tuple[int, int]],
    ranks: KeptRanks,
) -> None:
    """Readers: numbers of ranks, and over how many of them the model is split."""
    expected: tuple[Values, ...] = ({}, {})
    for values in ranks(num_ranks, _write, str(tmp_path), kind, split, options):
        for into, own in zip(expected, values, strict=True):
            into.update(own)
    for name, value in load_file(tmp_path / "ours/step-00000000/model.safetensors").items():
        assert_bitwise(value, expected[0][name], name)
    for world_size, own_split in readers:
        found = ranks(world_size, _read, str(tmp_path), kind, own_split, expected)
        for names, own in zip(zip(*found, strict=True), expected, strict=True):
            assert set().union(*names) == own.keys()


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


def _train_local(way: str, ep: int) -> tuple[ZeRO3, torch.optim.Optimizer]:
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
        _train_local(way, ep)
    model, optimizer = _train_local("each", 2)
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


def lists(numbers: dict[str, str]) -> nn.Module:
    """Lists of modules and of parameters, and a sequence whose numbers are the same everywhere."""
    up = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    down = nn.ParameterList(nn.Parameter(torch.randn(2)) for _ in range(2))
    for each in (up, down) if numbers else ():
        name_members(each, numbers)
    return Parts(up=up, down=down, rest=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_state_dicts_of_all_lists_have_the_numbers_among_all() -> None:
    plain, renamed = lists({}), lists({"0": "2", "1": "3"})
    names = [global_name(renamed, name) for name in plain.state_dict()]
    assert names[0] == "up.2.0.weight" and {"down.3", "rest.1.bias"} <= {*names}
    assert list(renamed.state_dict()) == names
    assert list(renamed.state_dict(prefix="x.")) == [f"x.{name}" for name in names]
    renamed.load_state_dict(dict(zip(names, plain.state_dict().values(), strict=True)))
    assert_same_parameters(dict(renamed.named_parameters()), dict(plain.named_parameters()))
    # Local numbers are those of another rank's.
    found = renamed.load_state_dict(lists({}).state_dict(), strict=False)
    in_lists = {name for name in plain.state_dict() if not name.startswith("rest.")}
    assert {*found.unexpected_keys} == in_lists
    assert {*found.missing_keys} == {global_name(renamed, name) for name in in_lists}
    for name in in_lists & dict(plain.named_parameters()).keys():
        assert torch.equal(renamed.get_parameter(name), plain.get_parameter(name)), name
