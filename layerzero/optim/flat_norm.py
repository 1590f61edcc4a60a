"""FlatNorm: the norm of the gradients of flat states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch

from layerzero.flat.parameter_info import get_info
from layerzero.flat.placement import Placement
from layerzero.optim.clip import Clipped, clipped, grad_norm
from layerzero.optim.flat_state import FlatState, squares_of
from layerzero.optim.norm import Part, global_power
from layerzero.step.root import RootState


class FlatNorm:
    """Takes norms over all ranks, and remembers which parameters they are of."""

    def __init__(self) -> None:
        self._clipped: tuple[list[Any], Clipped] | None = None

    def of(
        self,
        root: RootState,
        groups: Sequence[Mapping[str, Any]],
        flats: list[FlatState],
        norm_type: float,
    ) -> torch.Tensor:
        """The norm of the gradients over all ranks, a scalar tensor.

        Collective over the groups that own shards. Does not block the host on a device with
        streams.

        Args:
            groups: parameter groups of the optimizer.
            flats: their flat states.
        """
        members = self._members_of(root, groups, flats)
        if norm_type != 2 or root.tensor_parallel_groups:
            return grad_norm(members, norm_type)
        return _norm(members, flats)

    def overflow(self, root: RootState | None, flats: list[FlatState]) -> torch.Tensor:
        """Whether a gradient on this rank is infinite or NaN: a float32 scalar, 1 or 0."""
        found: list[torch.Tensor] = []
        for flat, squares in zip(flats, squares_of(flats), strict=True):
            if flat.home.main.dtype == torch.float64 and not squares.isfinite():
                squares = flat.largest()  # The square of a finite number may be infinite.
            found.append(squares)
        device = torch.device("cpu") if root is None else root.device
        if not found:
            return torch.zeros((), device=device)
        return 1.0 - torch.stack([each.to(device) for each in found]).isfinite().all().float()

    def _members_of(
        self, root: RootState, groups: Sequence[Mapping[str, Any]], flats: list[FlatState]
    ) -> Clipped:
        """The parameters to clip, looked for again where flat states or units are others."""
        key = [flats, *(handle for unit in root.units for handle in unit.handles)]
        known = self._clipped
        if known is not None and len(known[0]) == len(key) and all(map(is_, known[0], key)):
            return known[1]
        members = [each for group in groups for each in group["params"]]
        whole = [each for each in members if get_info(each) is None]
        of = clipped(root, root.units, whole, only={id(each) for each in members})
        self._clipped = key, of
        return of


def _norm(of: Clipped, flats: Sequence[FlatState]) -> torch.Tensor:
    own: dict[int, list[FlatState]] = {}
    whole: list[FlatState] = []
    for flat in flats:
        handle = flat.home.handle
        (whole if handle is None else own.setdefault(id(handle.placement), [])).append(flat)
    sharded: list[tuple[Placement, list[Part]]] = [
        (placement, _parts(own.get(id(placement), ()))) for placement, _ in of.sharded
    ]
    given = of.root, sharded, _parts(whole), 2.0, torch.float64, "gradient norm"
    power = global_power(*given)
    is_wide = any(flat.home.main.dtype == torch.float64 for flat in flats)
    return power.sqrt() if is_wide else power.sqrt().float()


def _parts(flats: Sequence[FlatState]) -> list[Part]:
    """One tensor whose norm is that of all their gradients."""
    if not flats:
        return []
    squares = [each.to(flats[0].home.main.device) for each in squares_of(flats)]
    return [Part(flats[0].home.held[0].parameter, torch.stack(squares).sqrt())]
