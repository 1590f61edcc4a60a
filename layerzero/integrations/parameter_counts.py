"""Counts the parameters of a sharded model in full; frameworks would count this rank's shards."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn

from layerzero.integrations.engine import get_info


def numel_of(parameter: nn.Parameter) -> int:
    """Number of elements of a parameter; of a sharded one, those of the original parameter."""
    info = get_info(parameter)
    return parameter.numel() if info is None else math.prod(info.shape)


def is_sharded(module: nn.Module) -> bool:
    return any(get_info(parameter) is not None for parameter in module.parameters())


def count(parameters: Iterable[nn.Parameter], only_trainable: bool = False) -> int:
    return sum(numel_of(each) for each in parameters if each.requires_grad or not only_trainable)


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
