"""What several adapters do: an action of one rank, one or several objects for a checkpoint, and
counts of parameters in full, where frameworks would count this rank's shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from layerzero.integrations.engine import get_info


def on_first_rank(action: Callable[[], Any], what: str) -> Any:
    """Run `action` on rank 0; all ranks return its result, or raise RuntimeError if it raised an
    error of any class, whose message begins with `what`. Collective over all ranks."""
    outcome: list[Any] = [None, None]
    error = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as caught:
            error = caught
            name = "" if isinstance(caught, RuntimeError) else f"{type(caught).__name__}: "
            outcome[1] = f"{what}: {name}{caught}"
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise RuntimeError(outcome[1]) from error
    return outcome[0]


def by_number(objects: Sequence[Any]) -> Any:
    """One object; several by their numbers, as `layerzero.checkpoint` takes them; None for none."""
    if len(objects) < 2:
        return next(iter(objects), None)
    return {str(number): each for number, each in enumerate(objects)}


def is_sharded(module: nn.Module) -> bool:
    return any(get_info(parameter) is not None for parameter in module.parameters())


def count(parameters: Iterable[nn.Parameter], only_trainable: bool = False) -> int:
    """Number of their elements; of a sharded one, those of the original parameter."""
    chosen = [each for each in parameters if each.requires_grad or not only_trainable]
    return sum(math.prod((get_info(each) or each).shape) for each in chosen)


def num_parameters(
    module: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Like transformers' method of this name."""
    left_out: set[str] = set()
    if exclude_embeddings:
        left_out = {f"{n}.weight" for n, m in module.named_modules() if isinstance(m, nn.Embedding)}
    counted = (each for name, each in module.named_parameters() if name not in left_out)
    return count(counted, only_trainable)


def trainable_and_all(module: nn.Module) -> tuple[int, int]:
    """Like peft's `get_nb_trainable_parameters`."""
    return count(module.parameters(), only_trainable=True), count(module.parameters())
