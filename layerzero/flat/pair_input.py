"""PairInput: the input of a reduction between two ranks, with the own chunk apart.

Note [Two ranks keep the own chunk apart]
    A reduction on gloo between two ranks sends one half of its input of U bytes and adds what
    arrives to the other half. In one buffer, whose storage is freed as a whole, that takes 1.5 U:
    the buffer, and memory for what arrives, where the sum stays. So the halves are packed apart:

        own     [own chunk]                                      the sum is written here, and stays
        memory  [        | first half sent | second half sent]
                [first half arrives | second half arrives]       once the first half has been sent

    which takes 1.25 U. The price is a second message each way, and a second call to pack. Between
    the two calls, gradients that lie in the own chunk alone are dropped: what they held can hold
    the memory that is allocated next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from layerzero.flat.buffer import Buffer, Lease, prefer_huge_pages
from layerzero.flat.layout import GradientLayout
from layerzero.ops import Segments, pack_

LEAST_NBYTES = 4 << 20
"""Bytes of the smallest chunk that is kept apart: of a smaller one, the second message would cost
more time than the memory is worth."""
_PACKED = torch.empty(0)
"""Stands for a gradient that is packed and dropped."""


class Chunks(NamedTuple):
    """The input of a reduction between two ranks, [chunk_numel] each."""

    own: torch.Tensor
    received: torch.Tensor
    """Its second half lies where the first half of `sent` does."""
    sent: torch.Tensor


class PairInput:
    """The chunks of one flat parameter's gradients; memory is allocated only while in use."""

    def __init__(
        self,
        layout: GradientLayout,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        sources: Mapping[int, int],
        make_lease: Callable[[int], Lease | None] | None = None,
    ) -> None:
        """
        Args:
            layout: of two chunks of an even number of elements.
            rank: which of the two chunks is this rank's own.
            sources: place in the list of gradients, by index of the parameter.
            make_lease: see `GradientBuffer`.
        """
        numel = layout.chunk_numel
        self.memory = torch.empty(numel // 2 + numel, dtype=dtype, device=device)
        nbytes = self.memory.untyped_storage().nbytes()
        self._buffer = Buffer(self.memory, None if make_lease is None else make_lease(nbytes))
        self._received, self._sent = self.memory[:numel], self.memory[numel // 2 :]
        self._own: torch.Tensor | None = None
        self.tables = [_table(layout, chunk, sources) for chunk in (rank, 1 - rank)]
        """Tables by which `pack_` fills the own chunk, and the peer's."""
        own, peers = (
            {sources[owned.param] for owned in layout.chunk(chunk) if owned.numel}
            for chunk in (rank, 1 - rank)
        )
        self._own_only = own - peers
        self.free()

    def fill(self, gradients: list[torch.Tensor]) -> None:
        """Allocate the memory and pack the gradients; drop those that only the own chunk holds."""
        own_table, peers_table = self.tables
        # Not views of anything that is freed by itself: `.grad` is made of it.
        self._own = torch.empty_like(self._sent)
        prefer_huge_pages(self._own, collapse=False)
        pack_(self._own, gradients, own_table)
        for source in self._own_only:
            gradients[source] = _PACKED
        self._buffer.allocate()
        pack_(self._sent, gradients, peers_table)

    def take(self) -> Chunks | None:
        """Hand the filled chunks to a reduction, which then holds the own one; None if empty."""
        own, self._own = self._own, None
        return None if own is None else Chunks(own, self._received, self._sent)

    def free(self) -> None:
        """Free all but the own chunk of a reduction. May be called from another thread, and
        twice."""
        self._buffer.free()

    def drop(self) -> None:
        """Free what no reduction has taken, too."""
        self._own = None
        self.free()


def _table(layout: GradientLayout, chunk: int, sources: Mapping[int, int]) -> Segments:
    owned = sorted(layout.chunk(chunk), key=lambda owned: owned.offset)
    rows = ((sources[o.param], o.start, o.offset, o.numel) for o in owned if o.numel)
    return Segments.build(rows, layout.chunk_numel)
