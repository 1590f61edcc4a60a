"""A graph of the backward itself: gradient penalties."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from layerzero import ZeRO3
from tests.harness.compare import assert_same_gradients
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.recording import full_nbytes
from tests.harness.reference import backward_of_all_ranks


def penalised(model: nn.Module, x: torch.Tensor, other_first: bool) -> torch.Tensor:
    """A loss with a gradient penalty, as a WGAN has it."""
    x = x.clone().requires_grad_()
    loss = model(x.detach()).square().mean() if other_first else 0.0
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    return loss + penalty + (0.0 if other_first else model(x.detach()).square().mean())


def _penalty(other_first: bool) -> None:
    def run(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = penalised(model, batch, other_first)
        loss.backward()
        return loss.detach()

    torch.manual_seed(0)
    model = ZeRO3(Mlp(), auto_wrap_policy={Block})
    torch.manual_seed(0)
    plain = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        batches = [
            torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in range(dist.get_world_size())
        ]
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        run(model, batches[dist.get_rank()])
        backward_of_all_ranks(plain, batches, run)
        assert set(full_nbytes(model).values()) == {0}
        assert_same_gradients(model, plain)
        optimizer.step()
        plain_optimizer.step()


def _no_backward_follows() -> None:
    torch.manual_seed(0)
    model = ZeRO3(Mlp(), auto_wrap_policy={Block})
    x = torch.randn(4, WIDTH, requires_grad=True)
    before = model(x)
    torch.autograd.grad(before.sum(), x, create_graph=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(0.5)  # unseen by version counters
    torch.manual_seed(0)
    plain = Mlp()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    assert torch.equal(model(x), plain(x))


def test_parameters_that_stay_full_for_a_second_backward_are_never_stale() -> None:
    run_ranks(2, _no_backward_follows)


def test_a_gradient_penalty_trains_as_without_sharding() -> None:
    for other_first in (True, False):
        run_ranks(2, _penalty, other_first)
