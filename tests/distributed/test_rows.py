"""`layout="rows"`: sharded parameters keep their shape; all else is as with "elements"."""

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from layerzero import MixedPrecision, ZeRO3, plan_memory, units
from layerzero.checkpoint import (
    DeltaStream,
    get_model_state_dict,
    get_optimizer_state_dict,
    load,
    save,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from layerzero.flat import rows
from layerzero.optim import AdamW, decay_groups
from tests.harness.checks import assert_bitwise, assert_same_parameters, named
from tests.harness.compare import sharded
from tests.harness.internals import inner_units
from tests.harness.models import CASES, Case, OddShapes, loss_of
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.recording import logged
from tests.harness.reference import full_gradients, full_parameters, plain

Values = dict[str, Any]
LAYOUTS = ("elements", "rows", "rows(2)")
MODELS = [CASES[name] for name in ("transformer", "mlp", "odd_shapes", "frozen_parts")]
HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS: dict[str, Any] = {
    "torch's AdamW": lambda of: torch.optim.AdamW(of, lr=0.01, foreach=True),
    "torch's SGD": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9),
    "AdamW": lambda of: AdamW(of, lr=0.01),
    "AdamW of bfloat16": lambda of: AdamW(of, lr=0.01, state="bfloat16"),
}


def _batch(case: Case, step: int) -> Any:
    return case.batch(torch.Generator().manual_seed(10 * step + dist.get_rank()))


def _train(model: nn.Module, case: Case, optimizer: Optimizer, steps: int = 2) -> list[Tensor]:
    """Two micro-batches a step, the first without synchronization."""
    losses = []
    for step in range(steps):
        with model.no_sync():
            loss_of(model(_batch(case, 100 + step))).backward()
        losses.append(loss_of(model(_batch(case, step))))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses]


def _check_shapes(model: ZeRO3, multiple: int = 1) -> bool:
    """Each piece has whole rows, and gradients its shape; whether any parameter is cut."""
    is_cut = False
    for name, parameter in model.named_parameters():
        shape, (start, stop) = parameter.layerzero.shape, parameter.layerzero.range
        row = shape[1:].numel()
        assert parameter.is_contiguous() and parameter.numel() == stop - start, name
        if len(shape) < 2:
            assert parameter.ndim == 1, name
            continue
        assert parameter.shape == ((stop - start) // row if row else 0, *shape[1:]), name
        assert start % (row * multiple or 1) == 0, name
        is_cut |= 0 < stop - start < shape.numel()
        if parameter.grad is not None:
            assert parameter.grad.shape == parameter.shape
    return is_cut


def _trains_alike(
    case: str, kind: str = "torch's AdamW", layouts: Sequence[str] = LAYOUTS, **arguments: Any
) -> None:
    with named(kind, case, arguments):
        found = []
        for own in layouts:
            what = own
            model = sharded(CASES[case], layout=own, **arguments)
            optimizer = KINDS[kind](model.parameters())
            losses = torch.stack(_train(model, CASES[case], optimizer))
            if own != "elements":
                is_cut = _check_shapes(model, 2 if own == "rows(2)" else 1)
                assert is_cut or case != "transformer", what
            # The gradients of one pass more, which the optimizer has not taken.
            loss_of(model(_batch(CASES[case], 7))).backward()
            if own != "elements":
                _check_shapes(model)
            found.append((losses, full_parameters(model), full_gradients(model)))
            assert_bitwise(losses, found[0][0], f"{what}: losses")
            assert_same_parameters(found[-1][1], found[0][1], what=f"{what}: parameter")
            assert_same_parameters(found[-1][2], found[0][2], what=f"{what}: gradient of")


@on_ranks(2, timeout=120)
def test_training_has_the_bits_of_elements() -> None:
    """Each optimizer in one precision."""
    for number, kind in enumerate(KINDS):
        _trains_alike("transformer", kind, mixed_precision=HALF if number % 2 else None)
    for case in ("mlp", "odd_shapes", "frozen_parts", "mixed_dtypes", "tied_across_units"):
        _trains_alike(case, layouts=["elements", "rows(2)" if case == "mlp" else "rows"])


@on_ranks(2)
def test_rules_by_ndim_are_as_people_expect() -> None:
    for case in MODELS:
        module = plain(case)
        expected = [name for name, p in module.named_parameters() if p.ndim >= 2]
        model = sharded(case, layout="rows")
        assert [name for name, p in model.named_parameters() if p.ndim >= 2] == expected
        for name, parameter in module.named_parameters():
            assert model.get_parameter(name).shape[1:] == parameter.shape[1:]
        # Torch's rule by shape and ours make the same groups.
        decay, rest = decay_groups(model, weight_decay=0.1)
        matrices = {id(p) for p in model.parameters() if p.ndim >= 2 and p.requires_grad}
        own = {id(p) for p in decay["params"]}
        assert own <= matrices
        assert not matrices & {id(p) for p in rest["params"]} or case.name == "transformer"
    model = sharded(CASES["transformer"], layout="rows")
    with pytest.raises(NotImplementedError, match="orthogonalizes whole matrices"):
        Muon([p for p in model.parameters() if p.ndim == 2])
    with pytest.raises(ValueError, match="shape"):
        weight = model.head.weight
        weight.data = weight.data.flatten().clone()
        model(_batch(CASES["transformer"], 0))


def _everything(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    weights = get_model_state_dict(model, full=True)
    state = get_optimizer_state_dict(model, optimizer, full=True)["state"]
    return [weights, state]


def _assert_same(actual: list[Any], expected: list[Any], what: str) -> None:
    assert_same_parameters(actual[0], expected[0], what=what)
    assert actual[1].keys() == expected[1].keys()
    for name, state in expected[1].items():
        assert actual[1][name].keys() == state.keys()
        for key, value in state.items():
            assert_bitwise(actual[1][name][key], value, f"{what}: {key} of {name}")


def _made(case: Case, own: str, flat: bool) -> tuple[ZeRO3, Optimizer]:
    model = sharded(case, layout=own)
    kind = KINDS["AdamW" if flat else "torch's AdamW"]
    return model, kind(model.parameters())


def _cases() -> list[tuple[Case, bool]]:
    return [(case, index % 2 == 1) for index, case in enumerate(MODELS)]


def _save(folder: str) -> None:
    for case, flat in _cases():
        for own in LAYOUTS:
            model, optimizer = _made(case, own, flat)
            _train(model, case, optimizer)
            save(f"{folder}/{case.name} {own}", model, optimizer, step=1)
            theirs = copy.deepcopy(optimizer.state_dict())
            if not flat:
                state = {"model": model.state_dict(), "optimizer": _by_name(model, optimizer)}
                dcp.save(state, checkpoint_id=f"{folder}/{case.name} {own} dcp")
            full = _everything(model, optimizer)
            if dist.get_rank() == 0:
                torch.save(full, f"{folder}/{case.name}.pt")
            # Full state dicts into the next layout, and a rank's own ones into the same.
            wanted = LAYOUTS[(LAYOUTS.index(own) + 1) % 3]
            again, fresh = _made(case, wanted, flat)
            set_model_state_dict(again, full[0])
            groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
            set_optimizer_state_dict(again, fresh, {"state": full[1], "param_groups": groups})
            _assert_same(_everything(again, fresh), full, f"{case.name} {own} to {wanted}")
            again, fresh = _made(case, own, flat)
            again.load_state_dict(model.state_dict())
            fresh.load_state_dict(theirs)
            _assert_same(_everything(again, fresh), full, f"{case.name} {own}")
            before = [
                _train(each, case, its, 1) for each, its in ((model, optimizer), (again, fresh))
            ]
            assert_bitwise(before[0][0], before[1][0])
            _assert_same(_everything(again, fresh), _everything(model, optimizer), "a step later")


def _by_name(model: nn.Module, optimizer: Optimizer) -> Values:
    return {"state": get_optimizer_state_dict(model, optimizer)["state"]}


def _load(folder: str) -> None:
    """From each layout to each for two of three numbers of ranks, with the models in turns."""
    cases, world_size = _cases(), dist.get_world_size()
    for number, (saved, own) in enumerate(itertools.product(LAYOUTS, LAYOUTS)):
        if number % 3 == world_size % 3:
            continue
        case, flat = cases[(number + world_size) % len(cases)]
        expected = torch.load(f"{folder}/{case.name}.pt")
        what = f"{case.name} from {saved} to {own}"
        model, optimizer = _made(case, own, flat)
        load(f"{folder}/{case.name} {saved}", model, optimizer)
        _assert_same(_everything(model, optimizer), expected, what)
        if own != "elements":
            _check_shapes(model)
            for parameter, state in optimizer.state.items():
                assert state["exp_avg"].shape == parameter.shape
        if not flat:
            model, optimizer = _made(case, own, flat)
            state = {"model": model.state_dict(), "optimizer": _by_name(model, optimizer)}
            dcp.load(state, checkpoint_id=f"{folder}/{case.name} {saved} dcp")
            groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
            given = {**state["optimizer"], "param_groups": groups}
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, given)
            _assert_same(_everything(model, optimizer), expected, f"{what} by DCP")


def test_checkpoints_load_across_layouts_and_world_sizes(
    ranks: KeptRanks, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Into three ranks; with `--slow` into one and two as well."""
    ranks(2, _save, str(tmp_path), timeout=240)
    for world_size in (1, 2, 3) if pytestconfig.getoption("slow") else (3,):
        ranks(world_size, _load, str(tmp_path), timeout=240)


def _parameters_and_state(case: Case) -> tuple[ZeRO3, Values]:
    model, optimizer = _made(case, "rows", flat=False)
    _train(model, case, optimizer, 1)
    return model, {"model": dict(model.named_parameters()), "optimizer": optimizer.state_dict()}


def _state_of(model: ZeRO3, state: Values) -> dict[str, Tensor]:
    """Whole tensors of the parameters, and of the optimizer's state."""
    full = full_parameters(model)
    for number, values in state["optimizer"]["state"].items():
        for key, value in values.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            full[f"{number} {key}"] = whole
    return full


def _save_parameters(folder: str) -> None:
    for case in MODELS:
        model, state = _parameters_and_state(case)
        dcp.save(state, checkpoint_id=f"{folder}/{case.name}")
        full = _state_of(model, state)
        if dist.get_rank() == 0:
            torch.save(full, f"{folder}/{case.name}.pt")


def _load_parameters(folder: str) -> None:
    for case in MODELS:
        expected = torch.load(f"{folder}/{case.name}.pt")
        model, state = _parameters_and_state(case)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        dcp.load(state, checkpoint_id=f"{folder}/{case.name}")
        assert_same_parameters(_state_of(model, state), expected, what=case.name)
        # A program without shards reads the same files.
        whole = {
            name: torch.empty(p.layerzero.shape or (1,), dtype=p.dtype)
            for name, p in model.named_parameters()
        }
        dcp.load({"model": whole}, checkpoint_id=f"{folder}/{case.name}")
        for name, value in whole.items():
            assert_bitwise(value.view(expected[name].shape), expected[name], name)


@pytest.mark.since_torch("2.14")  # CheckpointableTensor
def test_dcp_saves_parameters_themselves(ranks: KeptRanks, tmp_path: Path) -> None:
    ranks(2, _save_parameters, str(tmp_path))
    ranks(3, _load_parameters, str(tmp_path))


@on_ranks(2)
def test_deltas_are_those_of_elements() -> None:
    case, found = CASES["transformer"], []
    for own in LAYOUTS:
        model = sharded(case, layout=own)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stream = DeltaStream(model, dtype=torch.bfloat16)
        _train(model, case, optimizer, 1)
        changed: dict[str, Tensor] = {}
        for patch in stream.changes():
            empty = torch.zeros(model.get_parameter(patch.name).layerzero.shape.numel())
            changed.setdefault(patch.name, empty)[patch.indices] = patch.values.float()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, changed)
        total: dict[str, Tensor] = {}
        for name in sorted({name for each in every for name in each}):
            parts = [each[name] for each in every if name in each]
            total[name] = torch.stack(parts).sum(0)
        found.append(total)
        assert_same_parameters(found[-1], found[0], what=own)


class Experts(nn.Module):
    """Long rows of two lengths whose common multiple is long."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(6, 7, 16) / 5)
        self.down = nn.Parameter(torch.randn(6, 16, 11) / 5)
        self.router = nn.Linear(7, 6)
        self.scale = nn.Parameter(torch.randn(6, 32))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.router(x).softmax(-1)
        hidden = torch.einsum("bi,eih->beh", x, self.up).tanh()
        out = torch.einsum("beh,ehi,be->bi", hidden, self.down, weight)
        return x + out[:, :7] * self.scale.square().mean()


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Experts(), Experts())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@on_ranks(2)
def test_rows_of_other_lengths_may_lie_in_buffers_of_their_own() -> None:
    case = Case("moe", Moe, (Experts,), lambda g: torch.randn(3, 7, generator=g))
    found = []
    for least in (None, 1):
        with pytest.MonkeyPatch.context() as patch:
            if least is not None:
                patch.setattr(rows, "_LEAST_SPARED", least)
            model = sharded(case, layout="elements" if least is None else "rows")
        counts = [len(unit.handles) for unit in inner_units(model)[1:]]
        assert counts == ([1, 1] if least is None else [3, 3])
        optimizer = KINDS["torch's AdamW"](model.parameters())
        _train(model, case, optimizer)
        if least is not None:
            assert _check_shapes(model)
        found.append(_everything(model, optimizer))
    _assert_same(found[1], found[0], "buffers of their own")
    assert len(units(model)) == 3


@on_ranks(2)
def test_arguments_are_checked_and_padding_is_logged() -> None:
    case = CASES["mlp"]
    for bad in ("row", "rows()", "rows(0)", "rows(2", "Rows", 2, None, True):
        with pytest.raises(ValueError, match="expected 'elements', 'rows', or 'rows\\(32\\)'"):
            sharded(case, layout=bad)
    with pytest.raises(ValueError, match="arguments differ between ranks"):
        sharded(case, layout=LAYOUTS[dist.get_rank()])
    with logged("layerzero") as texts:
        sharded(case)
        sharded(case, layout="rows")
    if dist.get_rank() > 0:
        assert texts == []
        return
    plain_text, of_rows = texts
    assert "padding" not in plain_text
    assert "borders between shards lie on rows: padding adds " in of_rows
    assert "a smaller zero3_size or layout='elements' pads less" in of_rows


def test_a_plan_counts_what_rows_pad() -> None:
    batch = torch.zeros(2, 5)
    found = [plan_memory(OddShapes(), world_size=4, batch=batch, layout=own) for own in LAYOUTS[:2]]
    assert found[0].padding_bytes <= found[1].padding_bytes
    assert str(found[1].padding_bytes) in str(found[1])
