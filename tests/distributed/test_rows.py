"""`layout="rows"`: sharded parameters keep their shape; all else is as with "elements"."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Muon

from layerzero import ZeRO3, units
from layerzero.optim import AdamW
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.compare import assert_trains_alike, sharded, zero3
from tests.harness.internals import flatten, inner_units
from tests.harness.models import CASES, Case
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.reference import batches_of, full_parameters, plain, train_rank
from tests.harness.saved_models import assert_same, everything

Values = dict[str, Any]
LAYOUTS = {"rows": 1, "rows(2)": 2}
"""And the rows between two borders."""
MODELS = [CASES[name] for name in ("transformer", "odd_shapes")]


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


@on_ranks(2)
def test_training_is_bitwise_that_of_one_process_and_pieces_have_whole_rows() -> None:
    names = ("transformer", "mlp", "odd_shapes", "frozen_parts", "mixed_dtypes")
    for name, (layout, multiple) in itertools.product(names, LAYOUTS.items()):
        case = CASES[name]
        model = sharded(case, layout=layout)
        assert_trains_alike(model, plain(case), batches_of(case, 2, steps=2), "adamw")
        assert _check_shapes(model, multiple) or name != "transformer"


@on_ranks(2)
def test_what_is_no_shard_of_rows_is_refused() -> None:
    model = sharded(CASES["transformer"], layout="rows")
    with pytest.raises(NotImplementedError, match="orthogonalizes whole matrices"):
        Muon([p for p in model.parameters() if p.ndim == 2])
    with pytest.raises(ValueError, match="shape"):
        weight = model.head.weight
        weight.data = weight.data.flatten().clone()
        model(torch.zeros(1, 2, dtype=torch.long))


def _parameters_and_state(case: Case) -> tuple[ZeRO3, Values]:
    model = sharded(case, layout="rows")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    batches = batches_of(case, dist.get_world_size(), steps=1)
    train_rank(model, optimizer, batches, dist.get_rank())
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
    """With states that are rounded by the place of an element in its parameter."""
    batches = [[torch.randn(3, 7)] * 2 for _ in range(2)]
    found = []
    for least in (None, 1):
        with pytest.MonkeyPatch.context() as patch:
            if least is not None:
                patch.setattr(flatten, "_LEAST_SPARED", least)
            model = zero3(_two_experts, Experts, layout="elements" if least is None else "rows")
        counts = [len(unit.handles) for unit in inner_units(model)[1:]]
        assert counts == ([1, 1] if least is None else [3, 3])
        optimizer = AdamW(model.parameters(), lr=0.01, state="bfloat16")
        train_rank(model, optimizer, batches, dist.get_rank())
        assert all(state["exp_avg"].shape == p.shape for p, state in optimizer.state.items())
        assert least is None or _check_shapes(model)
        found.append(everything(model, optimizer))
    assert_same(found[1], found[0], "buffers of their own")
    assert len(units(model)) == 3


@on_ranks(2)
def test_arguments_are_checked() -> None:
    case = CASES["mlp"]
    for bad in ("row", "rows()", "rows(0)", "rows(2", "Rows", 2, None, True):
        with pytest.raises(ValueError, match="expected 'elements', 'rows', or 'rows\\(32\\)'"):
            sharded(case, layout=bad)

    with pytest.raises(ValueError, match="arguments differ between ranks"):
        sharded(case, layout=["elements", "rows"][dist.get_rank()])
