"""Records the regions of optional units that models are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from layerzero import zero3
from layerzero.build.regions import OptionalRegions
from layerzero.step.root import RootState

Recorded = list[tuple[dict[str, str], str] | None]
"""For each model: the region of each optional unit by FQN, and the mean; None: no regions."""


@contextmanager
def recorded_regions() -> Iterator[Recorded]:
    """Inside, the regions of each model that is wrapped are added to the list that this yields.

    The models themselves skip nothing.
    """
    found: Recorded = []
    make_root = zero3.make_root

    def record(units: Any, *args: Any, regions: OptionalRegions | None, **kwargs: Any) -> RootState:
        by_fqn = {} if regions is None else {units[i].fqn: r for i, r in regions.region_of.items()}
        found.append(None if regions is None else (by_fqn, regions.mean))
        return make_root(units, *args, regions=None, **kwargs)

    with mock.patch.object(zero3, "make_root", record):
        yield found
