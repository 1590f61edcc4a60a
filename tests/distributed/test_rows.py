"""`layout="rows"`: sharded parameters keep their shape; all else is as with "elements"."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from layerzero import MixedPrecision, ZeRO3, checkpoint, units
from layerzero.flat import flatten
from layerzero.optim import AdamW
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.compare import sharded
from tests.harness.internals import inner_units
from tests.harness.models import CASES, Case, loss_of
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.reference import full_gradients, full_parameters

Values = dict[str, Any]
LAYOUTS = ("elements", "rows", "rows(2)")
MODELS = [CASES[name] for name in ("transformer", "odd_shapes")]
HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS: dict[str, Any] = {
    "torch's AdamW": lambda of: torch.optim.AdamW(of, lr=0.01, foreach=True),
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


def _trained(case: Case, own: str, kind: str, **arguments: Any) -> list[Values]:
    """Losses and parameters, and gradients of one pass more, which the optimizer has not taken."""
    model = sharded(case, layout=own, **arguments)
    optimizer = KINDS[kind](model.parameters())
    losses = _train(model, case, optimizer)
    assert all(state["exp_avg"].shape == p.shape for p, state in optimizer.state.items())
    loss_of(model(_batch(case, 7))).backward()
    if own != "elements":
        is_cut = _check_shapes(model, 2 if own == "rows(2)" else 1)
        assert is_cut or case.name != "transformer"
    return [{"losses": torch.stack(losses)}, full_parameters(model), full_gradients(model)]


@on_ranks(2)
def test_training_has_the_bits_of_elements() -> None:
    torchs, half = "torch's AdamW", {"mixed_precision": HALF}
    for name, layouts, kind, arguments in (
        ("transformer", ("rows", "rows(2)"), "AdamW of bfloat16", half),
        ("mlp", ("rows(2)",), torchs, {}),
        *((name, ("rows",), torchs, {}) for name in ("odd_shapes", "frozen_parts", "mixed_dtypes")),
    ):
        expected = _trained(CASES[name], "elements", kind, **arguments)
        for own in layouts:
            found = _trained(CASES[name], own, kind, **arguments)
            for values, others in zip(found, expected, strict=True):
                assert_same_parameters(values, others, what=f"{name}, {own}:")


@on_ranks(2)
def test_what_is_no_shard_of_rows_is_refused() -> None:
    model = sharded(CASES["transformer"], layout="rows")
    with pytest.raises(NotImplementedError, match="orthogonalizes whole matrices"):
        Muon([p for p in model.parameters() if p.ndim == 2])
    with pytest.raises(ValueError, match="shape"):
        weight = model.head.weight
        weight.data = weight.data.flatten().clone()
        model(_batch(CASES["transformer"], 0))


def _everything(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    weights = checkpoint.get_model_state_dict(model, full=True)
    state = checkpoint.get_optimizer_state_dict(model, optimizer, full=True)["state"]
    return [weights, state]


def _assert_same(actual: list[Any], expected: list[Any], what: str) -> None:
    assert_same_parameters(actual[0], expected[0], what=what)
    assert actual[1].keys() == expected[1].keys()
    for name, state in expected[1].items():
        assert actual[1][name].keys() == state.keys()
        for key, value in state.items():
            assert_bitwise(actual[1][name][key], value, f"{what}: {key} of {name}")


def _made(case: Case, own: str) -> tuple[ZeRO3, Optimizer]:
    model = sharded(case, layout=own)
    return model, KINDS["torch's AdamW"](model.parameters())


def _parameters_and_state(case: Case) -> tuple[ZeRO3, Values]:
    model, optimizer = _made(case, "rows")
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


def _two_experts() -> nn.Module:
    return nn.Sequential(Experts(), Experts())


@on_ranks(2)
def test_rows_of_other_lengths_may_lie_in_buffers_of_their_own() -> None:
    case = Case("moe", _two_experts, (Experts,), lambda g: torch.randn(3, 7, generator=g))
    found = []
    for least in (None, 1):
        with pytest.MonkeyPatch.context() as patch:
            if least is not None:
                patch.setattr(flatten, "_LEAST_SPARED", least)
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
def test_arguments_are_checked() -> None:
    case = CASES["mlp"]
    for bad in ("row", "rows()", "rows(0)", "rows(2", "Rows", 2, None, True):
        with pytest.raises(ValueError, match="expected 'elements', 'rows', or 'rows\\(32\\)'"):
            sharded(case, layout=bad)

    with pytest.raises(ValueError, match="arguments differ between ranks"):
        sharded(case, layout=LAYOUTS[dist.get_rank()])
