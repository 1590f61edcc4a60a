"""Plain torch truth: the model unsharded, trained in one process on the batches of all ranks."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.harness.checks import Sum
from tests.harness.models import CASES, WIDTH, Case, Mlp, loss_of

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


def on_meta(build: Callable[..., nn.Module] = Mlp, **arguments: Any) -> Any:
    """A model without values."""
    with torch.device("meta"):
        return build(**arguments)


def plain(case: Case) -> nn.Module:
    """The case's model from seed 0, in one process: what the engine is compared with.

    Its parameters are dense, as the engine lays them out: strided ones round otherwise in BLAS.
    """
    model = seeded(case.build)
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)
    return model


def batches_of(case: Case, world_size: int, steps: int, seed: int = 0) -> list[list[Any]]:
    """Batches as [step][rank], the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [[case.batch(generator) for _ in range(world_size)] for _ in range(steps)]


def mlp_batches(steps: int = 2) -> list[list[Tensor]]:
    """[4, WIDTH] for each rank, as [step][rank]."""
    return batches_of(CASES["mlp"], dist.get_world_size(), steps)


def own_batch(number: int = 0, rows: int = 3) -> Tensor:
    """[rows, WIDTH], of this rank alone."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(rows, WIDTH, generator=generator)


def micro_batches_of(case: Case, world_size: int, steps: int, count: int) -> list[list[list[Any]]]:
    """Batches as [step][rank][micro-batch]."""
    each = batches_of(case, world_size * count, steps)
    return [[step[i : i + count] for i in range(0, len(step), count)] for step in each]


def forward_backward(model: nn.Module, batch: Any) -> Tensor:
    """One forward and backward; the loss."""
    loss = loss_of(model(batch))
    loss.backward()
    return loss.detach()


def after_an_evaluation(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        model(batch)
    return forward_backward(model, batch)


def in_turn(model: nn.Module, micro_batches: Sequence[Any]) -> Tensor:
    """Forward and backward of each micro-batch; the losses."""
    return torch.stack([forward_backward(model, batch) for batch in micro_batches])


def backward_of(loss_function: Callable[[nn.Module, Any], Tensor]) -> RunFn:
    """One forward and backward whose loss is `loss_function(model, batch)`."""

    def run(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_function(model, batch)
        loss.backward()
        return loss.detach()

    return run


class Terms:
    """What was added up in each gradient of a plain model: one term for each backward of each rank.

    The engine adds the same terms, maybe in another order. Several calls add up, as gradients do.
    """

    def __init__(self) -> None:
        self._magnitudes: dict[nn.Parameter, Tensor] = {}
        self._counts: dict[nn.Parameter, int] = {}

    @contextmanager
    def collected(self, parameters: Sequence[nn.Parameter], scale: float) -> Iterator[None]:
        """Of the backward passes inside, each to be multiplied by `scale`."""

        def add(parameter: nn.Parameter, gradient: Tensor) -> None:
            term = gradient.detach().abs() * scale
            self._magnitudes[parameter] = self._magnitudes.get(parameter, 0) + term
            self._counts[parameter] = self._counts.get(parameter, 0) + 1

        hooks = [
            parameter.register_hook(partial(add, parameter))
            for parameter in parameters
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def bounds(self, model: nn.Module) -> dict[str, Tensor | float]:
        """Of each gradient of the plain model, by name, however its terms are ordered."""
        return {
            name: 0.0
            if parameter.grad is None
            else Sum(parameter.grad, self._magnitudes[parameter], self._counts[parameter]).bound
            for name, parameter in model.named_parameters()
        }


def backward_of_all_ranks(
    model: nn.Module,
    batches: Sequence[Any],
    run: RunFn = forward_backward,
    reduction: str = "mean",
    terms: Terms | None = None,
) -> list[Tensor]:
    """Add to each `.grad` the mean (or sum) over the batches of the gradient of each.

    A parameter without a gradient in one batch counts as zero there; without one in any it is left
    alone, as an optimizer expects. Sums are in rank order, and a mean multiplies them by 1/N
    afterwards: so does the engine in one group of gloo ranks, bitwise.

    Args:
        model: a plain module.
        batches: one for each rank.
        run: forward and backward of one batch; may make several of either.
        reduction: "mean" or "sum".
        terms: collects what is added up, for a model that adds in another order.

    Returns:
        What `run` returned for each batch.
    """
    parameters, losses, gradients = list(model.parameters()), [], []
    before = [parameter.grad for parameter in parameters]
    scale = 1 / len(batches) if reduction == "mean" else 1.0
    with nullcontext() if terms is None else terms.collected(parameters, scale):
        for batch in batches:
            model.zero_grad(set_to_none=True)
            losses.append(run(model, batch))
            gradients.append([parameter.grad for parameter in parameters])
    for parameter, old, *each in zip(parameters, before, *gradients, strict=True):
        total = functools.reduce(added, each)
        parameter.grad = added(old, None if total is None else total * scale)
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
    """Copies of the full parameters by original name, DTensors whole. Collective where the model is
    sharded, over the meshes of DTensors, too."""
    with _full(model):
        return {name: _copy(parameter) for name, parameter in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the full gradients by original name. Collective where the model is sharded."""
    with _full(model, with_grads=True):
        return {name: _copy(parameter.grad) for name, parameter in model.named_parameters()}


def _full(model: nn.Module, with_grads: bool = False) -> AbstractContextManager[Any]:
    summon: Any = getattr(model, "summon_full_params", None)
    return nullcontext() if summon is None else summon(writeback=False, with_grads=with_grads)


def added(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return left if right is None else right
    return left + right


def _copy(tensor: Any) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
