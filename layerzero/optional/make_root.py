"""make_root: the root of a model's units, some of which a rank may skip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from layerzero.step.root import RootState
from layerzero.step.unit import Unit

if TYPE_CHECKING:
    from layerzero.build.regions import OptionalRegions
    from layerzero.optional.exchange import Exchange


def make_root(
    units: Sequence[Unit],
    *,
    regions: OptionalRegions | None,
    make: Callable[..., RootState] = RootState,
    make_exchange: Callable[[RootState], Exchange] | None = None,
    **arguments: Any,
) -> RootState:
    """The root of `units`; without `regions` (None) no unit is optional.

    Collective where the exchange makes new groups.

    Args:
        make: makes a root, from the units and `arguments`.
        make_exchange: makes what ranks agree over; None: `exchange_of`.
    """
    root = make(units, **arguments)
    if regions is not None:
        handles = [handle for index in regions.region_of for handle in units[index].handles]
        # Otherwise there is nothing to gather, or nobody to agree with.
        if any(handle.placement.num_ranks > 1 for handle in handles):
            from layerzero.optional.optional_units import OptionalUnits, exchange_of

            exchange = (make_exchange or exchange_of)(root)
            optional = OptionalUnits(root, regions, exchange)
            root.extensions.add(optional)
            optional.begin(root)
    return root
