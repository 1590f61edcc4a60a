"""WholeTensorOptimizer: any torch optimizer on whole tensors, equal to one process."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Muon

from layerzero import ZeRO3
from layerzero.optim import WholeTensorOptimizer
from tests.harness.models import Transformer, TransformerBlock
from tests.harness.ranks import run_ranks


def _model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(tied=False, layers=2)


def _tokens(step: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, 31, (2, 9), generator=draw)


def _wrapped(**arguments: Any) -> ZeRO3:
    return ZeRO3(_model(), auto_wrap_policy={TransformerBlock}, **arguments)


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    def shape(parameter: nn.Parameter) -> torch.Size:
        return parameter.layerzero.shape if hasattr(parameter, "layerzero") else parameter.shape

    return [p for p in model.parameters() if len(shape(p)) == 2]


def _copy_gradients(model: ZeRO3, plain: nn.Module) -> None:
    """The averaged gradients, bit for bit, as those of an unsharded model."""
    with model.summon_full_params(with_grads=True):
        for full, own in zip(model.parameters(), plain.parameters(), strict=True):
            own.grad = None if full.grad is None else full.grad.clone()


def _differing(model: ZeRO3, plain: nn.Module) -> list[str]:
    with model.summon_full_params(writeback=False):
        return [
            name
            for (name, full), own in zip(model.named_parameters(), plain.parameters(), strict=True)
            if not torch.equal(full, own)
        ]


CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], bool]] = {
    "Muon": (Muon, {"lr": 0.02}, True),
    "Adafactor": (Adafactor, {"lr": 0.01}, False),
    "AdamW": (AdamW, {"lr": 0.01}, False),
}


def _train_beside_one_process(arguments: dict[str, Any], num_steps: int) -> None:
    for name, (cls, options, of_matrices) in CLASSES.items():
        model, plain = _wrapped(**arguments), _model()
        chosen = [_matrices(m) if of_matrices else list(m.parameters()) for m in (model, plain)]
        optimizer = WholeTensorOptimizer(chosen[0], cls, bucket_bytes=20_000, **options)
        expected = cls(chosen[1], **options)
        for step in range(num_steps):
            model(_tokens(step)).backward()
            _copy_gradients(model, plain)
            optimizer.step()
            expected.step()
            optimizer.zero_grad()
        assert _differing(model, plain) == [], name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_numbers_are_those_of_one_process(world_size: int) -> None:
    run_ranks(world_size, _train_beside_one_process, {}, 4)


def _resume(_: None = None) -> None:
    model = _wrapped()
    optimizer = WholeTensorOptimizer(model.parameters(), AdamW, lr=0.01)
    for step in range(2):
        model(_tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.inner is not None
    for parameter, state in optimizer.state.items():
        assert optimizer.owner_of(parameter) == dist.get_rank()
        assert state["exp_avg"].shape == parameter.layerzero.shape
        assert optimizer.owned[parameter.layerzero.fqn].shape == parameter.layerzero.shape
    assert len(optimizer.state) == len(optimizer.owned)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    model(_tokens(2)).backward()
    optimizer.step()
    expected = [p.detach().clone() for p in model.parameters()]

    del optimizer
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    again = WholeTensorOptimizer(model.parameters(), AdamW, lr=0.5)
    model.load_state_dict(weights)
    again.load_state_dict(state)
    again.zero_grad()
    model(_tokens(2)).backward()
    again.step()
    assert all(map(torch.equal, model.parameters(), expected))
    other = {**state, "whole_tensors": {**state["whole_tensors"], "rank": 7}}
    with pytest.raises(ValueError, match=r"rank 7 of 2.*checkpoint"):
        again.load_state_dict(other)


def test_a_state_dict_resumes_on_the_same_rank_alone() -> None:
    run_ranks(2, _resume)
