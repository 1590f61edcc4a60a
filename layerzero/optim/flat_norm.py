"""FlatNorm: tells flat states which gradients a backward pass has delivered, and takes their norm,
summed inside backward where it can be."""

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
from layerzero.step.chunk_squares import ChunkSquares
from layerzero.step.root import RootState
from layerzero.step.unit import Unit


class FlatNorm:
    """Sums squares inside backward passes from the first norm or overflow on."""

    def __init__(self) -> None:
        self._flats: list[FlatState] = []
        self._watched: RootState | None = None
        self._reduced: ChunkSquares | None = None
        self._clipped: tuple[list[Any], Clipped] | None = None

    def use(self, flats: list[FlatState]) -> None:
        """These are the optimizer's flat states from now on."""
        self._flats = flats

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
        norm = _norm(members, flats)
        self.watch(root, sums=True)
        return norm

    def overflow(self, root: RootState | None, flats: list[FlatState]) -> torch.Tensor:
        """Whether a gradient on this rank is infinite or NaN: a float32 scalar, 1 or 0."""
        found: list[torch.Tensor] = []
        for flat, squares in zip(flats, squares_of(flats), strict=True):
            if flat.home.main.dtype == torch.float64 and not squares.isfinite():
                squares = flat.largest()  # The square of a finite number may be infinite.
            found.append(squares)
        device = torch.device("cpu") if root is None else root.device
        self.watch(root, sums=True)
        if not found:
            return torch.zeros((), device=device)
        return 1.0 - torch.stack([each.to(device) for each in found]).isfinite().all().float()

    def watch(self, root: RootState | None, sums: bool) -> None:
        """From now on, tell the flat states what is delivered.

        Args:
            sums: also sum squares meanwhile.
        """
        if root is None or root.reducer.uses_up_gradients:
            return
        if self._watched is not root:
            root.reducer.watch_delivered(self._on_delivered)
            self._watched, self._reduced = root, None
            for flat in self._flats:
                flat.watch_gradients()
        if sums and self._reduced is None:
            self._reduced = root.context.chunk_squares()

    def _on_delivered(self, unit: Unit | None) -> None:
        if unit is None:
            if self._reduced is not None:
                self._reduced.clear()
            return
        assert self._watched is not None, "it delivers"
        is_used_up = self._watched.reducer.uses_up_gradients
        for flat in self._flats:
            if flat.home.unit is not unit:
                continue
            if is_used_up:
                flat.forget_gradients()
            else:
                flat.note_delivered(self._reduced)

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
