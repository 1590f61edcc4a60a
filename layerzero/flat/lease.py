"""Lease: what a buffer that lies in an arena calls instead of resizing its storage."""

from __future__ import annotations

from typing import Protocol

import torch


class Lease(Protocol):
    """Memory for one buffer; `layerzero/arena.py` hands it out."""

    def note(self, is_behind: bool) -> None:
        """The host issues the gather that takes the buffer, perhaps behind reductions; `take` may
        come later, on a thread."""

    def take(self, storage: torch.UntypedStorage) -> bool:
        """Give an empty storage memory of the arena. Returns False where that has none free."""

    def give_back(self, storage: torch.UntypedStorage) -> bool:
        """Empty the storage. Returns False where it has no memory of the arena. May be called
        from another thread, and twice."""
