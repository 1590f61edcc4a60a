"""Makes the root of a model: the plain one, or one whose ranks may skip optional units."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from layerzero.build.regions import OptionalRegions
from layerzero.config import BackwardPrefetch, GatherBudget, ReductionPolicy
from layerzero.flat.groups import ShardGroup
from layerzero.optional.root import OptionalRoot
from layerzero.step.context import RuntimeContext
from layerzero.step.root import RootState
from layerzero.step.structure import Ignored
from layerzero.step.unit import Unit


def make_root(
    units: Sequence[Unit],
    device: torch.device,
    forward_depth: int,
    backward_prefetch: BackwardPrefetch | None,
    budget: GatherBudget,
    budget_is_default: bool,
    reduction: ReductionPolicy,
    tensor_parallel_groups: tuple[ShardGroup, ...],
    ignored: Ignored,
    regions: OptionalRegions | None,
    make_context: Callable[..., RuntimeContext],
    plain: Callable[..., RootState] = RootState,
    optional: Callable[..., RootState] = OptionalRoot,
) -> RootState:
    """The root of `units`; without `regions` (None) no unit is optional. Not collective.

    `plain` makes a root without optional units, `optional` one with them.
    """
    make = plain
    if regions is not None:
        handles = [handle for index in regions.region_of for handle in units[index].handles]
        # Otherwise there is nothing to gather, or nobody to agree with.
        if any(handle.placement.num_ranks > 1 for handle in handles):
            make = functools.partial(optional, regions=regions)
    return make(
        units,
        device,
        forward_depth,
        backward_prefetch,
        budget,
        budget_is_default,
        reduction=reduction,
        tensor_parallel_groups=tensor_parallel_groups,
        ignored=ignored,
        make_context=make_context,
    )
