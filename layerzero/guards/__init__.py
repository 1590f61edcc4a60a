"""Guards: refusals and warnings about programs that sharding would change in silence.

Each is an `Extension` of the model, or stands on a public hook of torch; the engine imports none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from layerzero.flat.parameter_hooks import accumulator_of, is_accumulating
from layerzero.flat.parameter_info import info_of
from layerzero.guards.each_forward import EachForward
from layerzero.guards.first_forward import FirstForward
from layerzero.notices import warn_once
from layerzero.step.extension import Extension
from layerzero.step.root import RootState
from layerzero.step.unit import Unit


def install(root: RootState) -> None:
    """Guard a model that has just been built. Not collective."""
    extensions = root.extensions
    extensions.add(StrayGradients(root.units))
    first = FirstForward(extensions, root.units)
    extensions.add(EachForward(root.context, root.units, first))
    extensions.add(first)


class StrayGradients(Extension):
    """Warns once where autograd computes a gradient of a shard, as for a penalty on
    `model.parameters()`. Costs nothing until it does."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._accumulators: dict[nn.Parameter, object] = {}
        """Autograd holds a hooked node only weakly."""
        for unit in units:
            self.trainable_changed(unit)

    def trainable_changed(self, unit: Unit) -> None:
        for handle in unit.handles:
            placement = handle.placement
            for sharded_param in handle.sharded_params if placement.num_ranks > 1 else ():
                if sharded_param.requires_grad and sharded_param not in self._accumulators:
                    self._accumulators[sharded_param] = _watch(sharded_param, placement.is_first)


def _watch(sharded_param: nn.Parameter, is_first: bool) -> Any:
    accumulator = accumulator_of(sharded_param)
    fqn = info_of(sharded_param).fqn

    def warn(_: object) -> None:
        if is_accumulating():
            return  # The engine delivers a reduced gradient to a parameter with hooks.
        warn_once(
            f"{fqn!r} was used outside the forward of its unit, where it is this rank's shard, as "
            "in a penalty on model.parameters(): autograd computed a gradient of the shard itself, "
            "which is not reduced. This is right for sums over elements, such as an L2 penalty, "
            "and wrong for norms and anything else that needs the whole tensor: compute that of "
            "parameter.full_tensor(), alike on all ranks, or inside the forward of that unit",
            "gradients of sharded parameters",
            is_first=is_first,
        )

    accumulator.register_prehook(warn)
    return accumulator
