"""Plain torch truth: the model unsharded, trained in one process on the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.harness.models import Case, loss_of

RunFn = Callable[[nn.Module, Any], Tensor]

# Momentum shows a wrong scale of the gradients, which Adam hides; Adam shows state of the wrong
# element. Its eps bounds how much it magnifies a rounding.
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-4),
}


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a model from `seed`: the same on every call and on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def batches_of(case: Case, world_size: int, steps: int, seed: int = 0) -> list[list[Any]]:
    """Batches as [step][rank], the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [[case.batch(generator) for _ in range(world_size)] for _ in range(steps)]


def forward_backward(model: nn.Module, batch: Any) -> Tensor:
    """One forward and backward; the loss."""
    loss = loss_of(model(batch))
    loss.backward()
    return loss.detach()


def backward_of_all_ranks(
    model: nn.Module,
    batches: Sequence[Any],
    run: RunFn = forward_backward,
    reduction: str = "mean",
) -> list[Tensor]:
    """Add to each `.grad` the mean (or sum) over the batches of the gradient of each.

    A parameter without a gradient in one batch counts as zero there; without one in any it is left
    alone, as an optimizer expects.

    Args:
        model: a plain module.
        batches: one for each rank.
        run: forward and backward of one batch; may make several of either.
        reduction: "mean" or "sum".

    Returns:
        What `run` returned for each batch.
    """
    parameters = list(model.parameters())
    before = [parameter.grad for parameter in parameters]
    sums: list[Tensor | None] = [None] * len(parameters)
    losses = []
    for batch in batches:
        model.zero_grad(set_to_none=True)
        losses.append(run(model, batch))
        for index, parameter in enumerate(parameters):
            sums[index] = _add(sums[index], parameter.grad)
    divisor = len(batches) if reduction == "mean" else 1
    for parameter, old, total in zip(parameters, before, sums, strict=True):
        parameter.grad = _add(old, None if total is None else total / divisor)
    return losses


def train_unsharded(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Sequence[Any]],
    run: RunFn = forward_backward,
) -> list[list[Tensor]]:
    """Train a plain module on `batches` [step][rank]; the losses [step][rank]."""
    losses = []
    for step in batches:
        optimizer.zero_grad(set_to_none=True)
        losses.append(backward_of_all_ranks(model, step, run))
        optimizer.step()
    return losses


def train_rank(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Sequence[Any]],
    rank: int,
    run: RunFn = forward_backward,
) -> list[Tensor]:
    """Train a data-parallel model on this rank's part of `batches`; the losses [step]."""
    losses = []
    for step in batches:
        optimizer.zero_grad(set_to_none=True)
        losses.append(run(model, step[rank]))
        optimizer.step()
    return losses


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the full parameters by original name. Collective where the model is sharded."""
    with _full(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the full gradients by original name. Collective where the model is sharded."""
    with _full(model, with_grads=True):
        return {name: _copy(parameter.grad) for name, parameter in model.named_parameters()}


def _full(model: nn.Module, with_grads: bool = False) -> AbstractContextManager[Any]:
    summon: Any = getattr(model, "summon_full_params", None)
    return nullcontext() if summon is None else summon(writeback=False, with_grads=with_grads)


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return left if right is None else right
    return left + right


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
