"""Checksums of what reductions send, taken while their buffers are packed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from layerzero.ops import Segments, checked_pack_, pack_
from layerzero.step.unit import Unit
from layerzero.verify.wire import Checksums


class _Sending(NamedTuple):
    """How the buffer of a flat parameter's gradients is sent."""

    buffer_ref: weakref.ref[torch.Tensor]
    order: list[int]
    """The chunk that each rank of the group receives."""
    own: int
    """This rank's place among them."""


class Packed:
    """The checksums of gradient buffers that are packed and not sent yet."""

    def __init__(
        self, units: Callable[[], Sequence[Unit]], keep: Callable[[torch.Tensor], Checksums]
    ) -> None:
        """
        Args:
            units: returns those of the model. Neither function may keep it alive.
            keep: as `wire.kept`.
        """
        self._units = units
        self._keep = keep
        self._buffers: dict[int, _Sending] = {}
        """By id of the buffer."""
        self._checksums: dict[int, tuple[int, Checksums]] = {}
        """By id of the buffer: its version after packing, and [group_size] checksums."""

    def pack(self, out: torch.Tensor, srcs: Sequence[torch.Tensor], segs: Segments) -> None:
        """`pack_`; and if `out` is a gradient buffer, the checksums of what peers receive."""
        sending = self._buffers.get(id(out))
        if sending is None or sending.buffer_ref() is not out:
            sending = self._find(out)
        if sending is None:
            pack_(out, srcs, segs)
            return
        order, own = sending.order, sending.own
        sums = checked_pack_(out, srcs, segs, len(order), skip=order[own])
        in_order = order == sorted(order)
        self._checksums[id(out)] = out._version, self._keep(sums if in_order else sums[order])

    def take(self, buffer: torch.Tensor) -> Checksums | None:
        """The checksums of what each rank receives of `buffer`, 0 for this rank itself.

        None if `buffer` was not packed by `pack`, or has been written since.
        """
        version, sums = self._checksums.pop(id(buffer), (-1, []))
        return sums if version == buffer._version else None

    def clear(self) -> None:
        self._checksums.clear()

    def _find(self, out: torch.Tensor) -> _Sending | None:
        self._buffers.clear()
        for unit in self._units():
            for handle in unit.handles:
                placement, buffer = handle.placement, handle.gradients.buffer
                if placement.num_ranks > 1:
                    group = placement.reduce_groups[0]
                    order = range(group.size) if placement.world is None else placement.world_slices
                    sending = _Sending(weakref.ref(buffer), list(order), group.rank)
                    self._buffers[id(buffer)] = sending
        return self._buffers.get(id(out))
