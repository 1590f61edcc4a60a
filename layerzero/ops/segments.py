"""Segments: the int64 table that `pack_` reads, with the source of each element of its output.

    rows (source, source offset, destination offset, numel)     rows [S + 1, 3]
    (0, 0, 0, 5)                                                 0, 0,  0
                                                                -1, 0,  5    a gap: zeros
    (1, 4, 8, 12), of a buffer of 20                             1, 4,  8
                                                                -1, 0, 20    the sentinel

A row ends where the next one begins, so the destinations rise, have no gaps and end at the size of
the buffer. Offsets count elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

ZEROS = -1
"""Used as a source number: fill the row with zeros."""


@dataclass(frozen=True, eq=False)
class Segments:
    """A checked table, built once for a layout and copied once to each device that uses it."""

    table: torch.Tensor
    """[S + 1, 3] int64 on the CPU."""
    numel: int
    """Number of elements of the buffer."""
    _on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, rows: Iterable[Sequence[int]], numel: int) -> Segments:
        """Check rows (source, source offset, destination offset, numel) and fill the gaps.

        Args:
            rows: in rising order of destination; source `ZEROS` writes zeros. Rows without
                elements are dropped.
            numel: number of elements of the buffer; those that no row covers become zeros.

        Raises:
            ValueError: a number is negative, or rows overlap, do not rise, or end after `numel`.
        """
        table: list[tuple[int, int, int]] = []
        end = 0
        for number, (source, offset, start, count) in enumerate(rows):
            if source < ZEROS or min(offset, count) < 0 or start < end or start + count > numel:
                raise ValueError(
                    f"segments: row {number} {(source, offset, start, count)}: expected a source "
                    f">= {ZEROS} and destinations that rise from {end} to {numel} at most"
                )
            if not count:
                continue
            if start > end:
                table.append((ZEROS, 0, end))
            table.append((source, offset, start))
            end = start + count
        if end < numel:
            table.append((ZEROS, 0, end))
        table.append((ZEROS, 0, numel))
        return cls(torch.tensor(table, dtype=torch.int64, device="cpu"), numel)

    def on(self, device: torch.device) -> torch.Tensor:
        """A copy of the table on `device`; the first call for a device blocks the host."""
        found = self._on_device.get(device)
        if found is None:
            found = self._on_device[device] = self.table.to(device)
        return found
