"""Warns when autograd computes a gradient for a sharded parameter instead of the unsharded one.

A penalty on `model.parameters()` uses what the model shows between calls: sharded parameters. Its
gradient is right if it is a sum over elements, and wrong if it is a norm or needs whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from layerzero.core.parameter_hooks import accumulator_of, is_accumulating
from layerzero.core.parameter_info import get_info
from layerzero.notices import warn_once


def watch(sharded_params: Iterable[nn.Parameter], is_first: bool) -> dict[nn.Parameter, Any]:
    """Warn once if autograd computes a gradient of a sharded parameter. Costs nothing until then.

    Returns:
        For each of them an object to keep alive: autograd holds the hooked node only weakly.
    """
    return {sharded_param: _watch(sharded_param, is_first) for sharded_param in sharded_params}


def _watch(sharded_param: nn.Parameter, is_first: bool) -> Any:
    accumulator = accumulator_of(sharded_param)
    info = get_info(sharded_param)
    assert info is not None, "sharded parameters have ParameterInfo"
    fqn = info.fqn

    def warn(_: object) -> None:
        if is_accumulating():
            return  # The engine delivers a reduced gradient to a parameter with hooks.
        warn_once(
            "gradients of sharded parameters",
            f"{fqn!r} was used outside the forward of its unit, where it is this rank's shard, as "
            "in a penalty on model.parameters(): autograd computed a gradient of the shard itself, "
            "which is not reduced. This is right for sums over elements, such as an L2 penalty, "
            "and wrong for norms and anything else that needs the whole tensor: compute that "
            "inside the model's forward",
            is_first=is_first,
        )

    accumulator.register_prehook(warn)
    return accumulator
