"""MeshSizes: how the world is divided into axes. Integers only, no torch.

Eight ranks, pp 1, dp 2, cp 2, tp 2; ranks along the last axis are neighbours:

    rank             0  1  2  3  4  5  6  7
    dp               0  0  0  0  1  1  1  1
    cp               0  0  1  1  0  0  1  1
    tp               0  1  0  1  0  1  0  1
    dp_cp = (dp, cp) 0  0  1  1  2  2  3  3      one group: ranks 0, 2, 4, 6
    edp, with ep 2   0  0  0  0  1  1  1  1      (edp, ep) = divmod(dp_cp, 2)
    ep               0  0  1  1  0  0  1  1      one group: ranks 0, 2
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AXES = ("pp", "dp", "cp", "tp")
"""Axes of the mesh, from the slowest links to the fastest."""
EXPERT_AXES = ("edp", "ep")
DATA_AXIS = "dp_cp"


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Number of ranks along each axis. The product without `ep` is the world size."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int

    @classmethod
    def infer(
        cls,
        world_size: int,
        *,
        dp_size: int | None,
        tp_size: int | None,
        cp_size: int | None,
        ep_size: int | None,
        pp_size: int | None,
        zero3_size: int | None,
    ) -> MeshSizes:
        """Complete the sizes so that they fill the world.

        Args:
            dp_size: None, 0 or less: the world divided by the other sizes.
            tp_size, cp_size, ep_size, pp_size: None and 0 mean 1.

        Raises:
            TypeError, ValueError: a size is not a number of ranks, or the sizes do not fit.
        """
        pp_size, cp_size = _one_if_unsaid("pp_size", pp_size), _one_if_unsaid("cp_size", cp_size)
        tp_size, ep_size = _one_if_unsaid("tp_size", tp_size), _one_if_unsaid("ep_size", ep_size)
        if zero3_size is not None:
            _check_size("zero3_size", zero3_size, least=1)
        if dp_size is not None:
            _check_integer("dp_size", dp_size)
            dp_size = dp_size if dp_size > 0 else None
        others = pp_size * cp_size * tp_size
        product = f"pp_size={pp_size} x cp_size={cp_size} x tp_size={tp_size} = {others}"
        if dp_size is None:
            if world_size % others:
                raise ValueError(
                    f"ParallelManager: {product} ranks do not divide the world of {world_size}; "
                    f"choose sizes whose product divides {world_size}, or start another number of "
                    "ranks"
                )
            dp_size = world_size // others
        elif dp_size * others != world_size:
            raise ValueError(
                f"ParallelManager: dp_size={dp_size} x {product} makes {dp_size * others} ranks, "
                f"but the world has {world_size}; leave out dp_size to have it inferred, or start "
                f"{dp_size * others} ranks"
            )
        sizes = cls(pp=pp_size, dp=dp_size, cp=cp_size, tp=tp_size, ep=ep_size)
        for name, size in (("ep_size", ep_size), ("zero3_size", zero3_size or 1)):
            if sizes.data % size:
                raise ValueError(
                    f"ParallelManager: {name}={size} does not divide the {sizes.data} "
                    f"data-parallel ranks (dp_size={dp_size} x cp_size={cp_size}); choose a "
                    f"divisor of {sizes.data}"
                )
        return sizes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the mesh, in the order of `AXES`."""
        return self.pp, self.dp, self.cp, self.tp

    @property
    def world(self) -> int:
        return math.prod(self.shape)

    @property
    def data(self) -> int:
        """Number of ranks whose gradients are reduced together."""
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """Number of ranks that have the same experts."""
        return self.data // self.ep


def _one_if_unsaid(name: str, size: int | None) -> int:
    """`size`, or 1 for None and 0, which recipes write for an axis that they do not use."""
    if size is None:
        return 1
    _check_size(name, size, least=0)
    return size or 1


def _check_size(name: str, size: int, least: int) -> None:
    _check_integer(name, size)
    if size < least:
        raise ValueError(f"ParallelManager: {name}: expected at least {least}, got {size}")


def _check_integer(name: str, size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"ParallelManager: {name}: expected a number of ranks, got {size!r}")
