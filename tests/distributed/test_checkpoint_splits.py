"""Checkpoints and state dicts where ranks have parts of a model: any split to any other."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from layerzero import ZeRO3, checkpoint
from tests.distributed import test_experts as experts
from tests.distributed.test_tensor_parallel import LENGTH, Llama, parallelize
from tests.harness.checks import assert_bitwise
from tests.harness.decoder import VOCAB, DecoderLayer
from tests.harness.ranks import KeptRanks
from tests.harness.reference import forward_backward

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
    for step, batches in enumerate(experts.batches(2)):
        if kind == TENSOR_PARALLEL:
            # The same on all ranks: those of one tensor-parallel group must have it.
            draw = torch.Generator().manual_seed(step)
            model(torch.randint(VOCAB, (4, LENGTH + 1), generator=draw)).backward()
        else:
            forward_backward(model, batches[dist.get_rank()])
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
