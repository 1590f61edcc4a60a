"""Chunk: a flat tensor of this rank beside a snapshot of what receivers have of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from layerzero.checkpoint.delta.patch import DeltaError
from layerzero.checkpoint.delta.pieces import Piece, Source
from layerzero.ops.delta import UNKNOWN, bits_of, cast, differs, find_changed, infinity_bits

_BLOCK = 1 << 20
"""Elements handled at once where intermediate results take memory."""


class Found(NamedTuple):
    """Elements to send: their places in the chunk, and their values there."""

    places: torch.Tensor
    """[n] int64, rising."""
    values: torch.Tensor
    """[n] in the chunk's dtype."""
    stop: int
    """Everything before it, from where the search began, was compared."""
    is_settled: bool
    """Whether the snapshot has the values already."""


class Chunk:
    """One source and its snapshot.

    Note [Unknown to receivers]
        Where it is uncertain what a receiver has, an element must be sent again, whatever its value
        becomes. Floating-point snapshots then hold bits that equal no value (Note [One NaN]). The
        other dtypes have no such bits, and get a mask.
    """

    source: Source
    dtype: torch.dtype
    """Of the snapshot and of the values sent."""
    numel: int
    snapshot: torch.Tensor
    """[numel] in `dtype`, beside the source."""
    unknown: torch.Tensor | None
    """[numel] bool, beside the snapshot; None: not needed."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        """Make a snapshot of which everything is unknown; see Note [Unknown to receivers]."""
        main = source.read()
        self.source = source
        self.dtype = dtype
        self.numel = main.numel()
        self.snapshot = torch.empty(self.numel, dtype=self.dtype, device=main.device)
        self.unknown = None
        self.forget(slice(0, self.numel))

    def take_snapshot(self) -> None:
        """From now on receivers have the values of now."""
        main = self.source.read()
        for begin in range(0, self.numel, _BLOCK):
            block = slice(begin, begin + _BLOCK)
            self.snapshot[block] = self._cast(main, begin, min(begin + _BLOCK, self.numel))
        self.unknown = None

    def forget(self, places: torch.Tensor | slice) -> None:
        """Treat these elements as unknown to receivers."""
        if self.dtype.is_floating_point:
            bits_of(self.snapshot)[places] = UNKNOWN
            return
        if self.unknown is None:
            self.unknown = torch.zeros(self.numel, dtype=torch.bool, device=self.snapshot.device)
        self.unknown[places] = True

    def settle(self, places: torch.Tensor, values: torch.Tensor) -> None:
        """From now on receivers have these values."""
        if self.snapshot.dtype == torch.complex128:
            self.snapshot[places] = values
        else:  # The fastest of torch's ways to write elements.
            bits_of(self.snapshot).scatter_(0, places, bits_of(values))
        if self.unknown is not None:
            self.unknown[places] = False

    def changed(self, start: int, room: int, settles: bool) -> Found:
        """At most `room` elements from `start` on that receivers do not have.

        Args:
            settles: treat what is found as sent, if that costs no further pass.

        Raises:
            DeltaError: a finite value is infinite in the stream's dtype.
        """
        main = self.source.read()
        room = max(1, min(room, self.numel - start))
        if self.unknown is not None:
            return self._changed_or_unknown(main, start, room)
        indices = torch.empty(room, dtype=torch.int64, device=main.device)
        values = torch.empty(room, dtype=self.dtype, device=main.device)
        count, end = find_changed(main, self.snapshot, start, indices, values, settles)
        found = Found(indices[:count], values[:count], end, settles)
        try:
            self._check_finite(main, found.places, found.values)
        except DeltaError:
            self.forget(found.places)
            raise
        return found

    def _changed_or_unknown(self, main: torch.Tensor, start: int, room: int) -> Found:
        assert self.unknown is not None
        stop = min(self.numel, start + room)
        block = slice(start, stop)
        new = cast(main[block], self.dtype)
        found = differs(new, self.snapshot[block])
        places = (found | self.unknown[block]).nonzero().view(-1)
        return Found(places + start, new[places], stop, False)

    def current(self, begin: int, end: int) -> torch.Tensor:
        """The values now of elements [begin, end). Some receiver may get them: those that differ
        from the snapshot become unknown."""
        new = self._cast(self.source.read(), begin, end)
        found = differs(new, self.snapshot[begin:end])
        self.forget(found.nonzero().view(-1) + begin)
        return new

    def known_bytes(self, places: torch.Tensor) -> torch.Tensor | None:
        """What receivers have at `places`: values; None where some of it is unknown."""
        values = self.snapshot[places]
        if self.dtype.is_floating_point:
            return None if (bits_of(values) == UNKNOWN).any() else values
        return values if self.unknown is None else None

    def cut(self, found: Found) -> Iterator[tuple[Piece, int, int]]:
        """(piece, begin, end) of each piece that has elements [begin, end) of those found."""
        if not found.places.numel():
            return
        pieces = self.source.pieces
        ends = [end for p in pieces for end in (p.offset, p.offset + p.numel)]
        borders = torch.searchsorted(found.places, found.places.new_tensor(ends)).tolist()
        for number, piece in enumerate(pieces):
            begin, end = borders[2 * number], borders[2 * number + 1]
            if begin < end:
                yield piece, begin, end

    def _cast(self, main: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        new = cast(main[begin:end], self.dtype)
        self._check_finite(main, None, new, begin)
        return new

    def _check_finite(
        self, main: torch.Tensor, places: torch.Tensor | None, values: torch.Tensor, begin: int = 0
    ) -> None:
        """Raise if the cast made a finite value infinite. `places` of `values`; None: from `begin`
        on."""
        if main.dtype == self.dtype or not self.dtype.is_floating_point or not values.numel():
            return
        if bits_of(values.abs()).amax() < infinity_bits(self.dtype):
            return  # By far the fastest test, and true of almost all weights.
        infinite = values.isinf().nonzero().view(-1)
        if not infinite.numel():
            return
        infinite = infinite + begin if places is None else places[infinite]
        lost = infinite[main[infinite].double().isfinite()]
        if not lost.numel():
            return
        place = int(lost[0])
        pieces = self.source.pieces
        piece = next((p for p in pieces if 0 <= place - p.offset < p.numel), pieces[0])
        raise DeltaError(
            f"{piece.names[0]!r}: {self.dtype} cannot hold {main[place].item():.6g} (element "
            f"{int(piece.in_whole(lost[:1]))}); use a DeltaStream of another dtype"
        )
