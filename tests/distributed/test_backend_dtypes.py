"""Dtypes that a backend does not have travel as bytes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import ZeRO3
from layerzero.checkpoint import get_model_state_dict
from layerzero.comm import collectives
from tests.harness.models import WIDTH
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import run_ranks

NCCL = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool}
NCCL |= {torch.uint8, torch.int8, torch.int32, torch.int64}
RARE = (torch.int16, torch.uint16, torch.complex64, torch.float8_e4m3fn)


class _Rare(nn.Module):
    """A layer beside frozen tables of dtypes that NCCL does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        bits = torch.arange(56, dtype=torch.uint8) + dist.get_rank()
        self.tables = nn.ParameterList(
            nn.Parameter(bits.clone().view(dtype), requires_grad=False) for dtype in RARE
        )
        self.register_buffer("counts", bits.view(torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        for table in self.tables:
            assert torch.equal(table.view(torch.uint8), torch.arange(56, dtype=torch.uint8))
        return self.layer(x)


def _refusing(verb: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        for given in args:
            assert not isinstance(given, Tensor) or given.dtype in NCCL, given.dtype
        return verb(*args, **kwargs)

    return checked


def _trains() -> None:
    gather = collectives._ALL_GATHER
    original = getattr(dist.ProcessGroup, gather)
    with (
        mock.patch.object(dist.ProcessGroup, gather, _refusing(original)),
        mock.patch.object(dist, "broadcast", _refusing(dist.broadcast)),
    ):
        group = make_plain_group(timedelta(seconds=30))
        model = ZeRO3(_Rare(), group, sync_module_states=True)
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
        with model.summon_full_params(rank0_only=True):
            pass
        full = get_model_state_dict(model, full=True)
    if dist.get_rank() == 0:
        for index, dtype in enumerate(RARE):
            table = full[f"tables.{index}"]
            assert table.dtype is dtype and table.view(torch.uint8).tolist() == list(range(56))
    assert model.counts.view(torch.uint8).tolist() == list(range(56))


def test_what_a_backend_cannot_send_is_sent_as_bytes() -> None:
    run_ranks(2, _trains)
