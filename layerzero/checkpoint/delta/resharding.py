"""Keeps what is known of receivers when a model's elements move to other chunks or ranks."""

from __future__ import annotations

from collections.abc import Iterable

from layerzero.checkpoint.delta.chunk import Chunk
from layerzero.checkpoint.delta.pieces import Piece


def carry_over(former: Iterable[Chunk], chunks: Iterable[Chunk]) -> None:
    """Copy the parts of snapshots that stay on this rank. What comes from other ranks is unknown,
    and so is sent again."""
    places: dict[str, list[tuple[Chunk, Piece]]] = {}
    for chunk in former:
        for piece in chunk.source.pieces:
            places.setdefault(piece.names[0], []).append((chunk, piece))
    for chunk in chunks:
        for piece in chunk.source.pieces:
            for old, was in places.get(piece.names[0], ()):
                if was.extent == piece.extent and old.dtype == chunk.dtype:
                    _copy(old, was, chunk, piece)


def _copy(old: Chunk, was: Piece, chunk: Chunk, piece: Piece) -> None:
    begin = max(was.start, piece.start)
    numel = min(was.start + was.numel, piece.start + piece.numel) - begin
    if numel <= 0:
        return
    source = slice(begin - was.start + was.offset, begin - was.start + was.offset + numel)
    target = slice(begin - piece.start + piece.offset, begin - piece.start + piece.offset + numel)
    chunk.take_from(target, old, source)
