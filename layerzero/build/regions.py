"""OptionalRegions: which units of a model a rank may skip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layerzero.config import OptionalMean


@dataclass(frozen=True)
class OptionalRegions:
    """The optional units of one model, and how their gradients are averaged."""

    region_of: Mapping[int, str]
    """Index of each optional unit in the root's list, and the name of its region: the FQN of the
    innermost optional module around it, or its own (`find_regions` in optional.py)."""
    mean: OptionalMean
    is_reused: bool = False
    """Whether any of them is used at several places of the model (shared, or tied): passes do
    not record where it comes, so ranks exchange before every gather of a forward."""
