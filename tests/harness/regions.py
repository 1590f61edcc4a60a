"""Records the regions of optional units that models are given, and what their ranks exchange."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from layerzero import zero3
from layerzero.optional.exchange import Exchange
from layerzero.step.root import RootState

Regions = tuple[dict[str, str], str] | None
"""The region of each optional unit by FQN, and the mean; None: no rank may skip any."""


def regions_of(root: RootState) -> Regions:
    optional = root.optional
    if optional is None:
        return None
    by_fqn = {root.units[index].fqn: name for index, name in optional.region_of.items()}
    return by_fqn, optional.mean


@contextmanager
def recorded_regions() -> Iterator[list[Regions]]:
    """Inside, the regions of each model that is wrapped are added to the list that this yields."""
    found: list[Regions] = []
    build = zero3.build

    def record(*given: Any) -> RootState:
        root = build(*given)
        found.append(regions_of(root))
        return root

    with mock.patch.object(zero3, "build", record):
        yield found


@contextmanager
def counted_exchanges() -> Iterator[list[int]]:
    """Bytes that this rank brings to each exchange inside."""
    sizes: list[int] = []
    original = Exchange._gather

    def counting(exchange: Exchange, own: Tensor, what: str) -> Tensor:
        sizes.append(own.nbytes)
        return original(exchange, own, what)

    with mock.patch.object(Exchange, "_gather", counting):
        yield sizes
