"""Records the regions of optional units that models are given, and what their ranks exchange."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from layerzero import zero3
from layerzero.optional import arguments
from layerzero.optional.exchange import Exchange
from layerzero.step.root import RootState

Recorded = list[tuple[dict[str, str], str] | None]
"""For each model: the region of each optional unit by FQN, and the mean; None: no regions."""


@contextmanager
def recorded_regions() -> Iterator[Recorded]:
    """Inside, the regions of each model that is wrapped are added to the list that this yields.

    The models themselves skip nothing.
    """
    found: Recorded = []
    build, find = zero3.build, arguments.find_regions

    def record(*given: Any) -> RootState:
        found.append(None)
        return build(*given)

    def note(units: Any, optional: Any) -> None:
        regions = find(units, optional)
        if regions is not None:
            by_fqn = {units[index].fqn: name for index, name in regions.region_of.items()}
            found[-1] = by_fqn, regions.mean

    with (
        mock.patch.object(zero3, "build", record),
        mock.patch.object(arguments, "find_regions", note),
    ):
        yield found


@contextmanager
def counted_exchanges() -> Iterator[list[int]]:
    """Numbers of integers that this rank brings to each exchange inside."""
    sizes: list[int] = []
    original = Exchange.__call__

    def counting(exchange: Exchange, row: Sequence[int]) -> Any:
        sizes.append(len(row))
        return original(exchange, row)

    with mock.patch.object(Exchange, "__call__", counting):
        yield sizes
