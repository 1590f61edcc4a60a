"""Makes the root of a model: the plain one, or one whose ranks may skip optional units."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from layerzero.build.regions import OptionalRegions
from layerzero.optional.root import OptionalRoot
from layerzero.step.root import RootState
from layerzero.step.unit import Unit


def make_root(
    units: Sequence[Unit],
    *,
    regions: OptionalRegions | None,
    plain: Callable[..., RootState] = RootState,
    optional: Callable[..., RootState] = OptionalRoot,
    **arguments: Any,
) -> RootState:
    """The root of `units`; without `regions` (None) no unit is optional. Not collective.

    Args:
        plain: makes a root without optional units.
        optional: makes one with them; takes `regions`, too.
        arguments: the others of `RootState`.
    """
    if regions is not None:
        handles = [handle for index in regions.region_of for handle in units[index].handles]
        # Otherwise there is nothing to gather, or nobody to agree with.
        if any(handle.placement.num_ranks > 1 for handle in handles):
            plain = functools.partial(optional, regions=regions)
    return plain(units, **arguments)
