"""Records the regions of optional units that models are given, and what their ranks exchange."""

from collections.abc import Iterator
from contextlib import contextmanager

from layerzero import zero3
from layerzero.optional.exchange import Exchange
from layerzero.step.root import RootState
from tests.harness.recording import observed

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
    with observed(zero3, "build", after=lambda root, *_: found.append(regions_of(root))):
        yield found


@contextmanager
def counted_exchanges() -> Iterator[list[int]]:
    """Bytes that this rank brings to each exchange inside."""
    sizes: list[int] = []
    with observed(Exchange, "_gather", lambda _, own, what: sizes.append(own.nbytes)):
        yield sizes
