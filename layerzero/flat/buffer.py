"""Buffer: a flat tensor that has memory only while it is in use."""

from __future__ import annotations

from collections.abc import Callable

import torch


class BufferEvents:
    """Methods of extensions that buffers call, by event (step/extension.py)."""

    resized: tuple[Callable[[torch.UntypedStorage], object], ...] = ()

    def bind(self, resized: tuple[Callable[[torch.UntypedStorage], object], ...]) -> None:
        self.resized = resized


class Buffer:
    """A tensor whose storage is resized between zero bytes and its full size."""

    note: Callable[[bool], None] | None = None
    """Called when the host issues the gather that takes the buffer, with whether that is behind
    reductions; `allocate` may come later, on a thread. For memory of an arena (graphs/arena.py)."""

    def __init__(self, tensor: torch.Tensor, events: BufferEvents) -> None:
        self.tensor = tensor
        self.events = events
        self.storage = tensor.untyped_storage()
        self.nbytes = tensor.nbytes

    def follow(self) -> None:
        """The tensor lies in another storage."""
        self.storage = self.tensor.untyped_storage()

    def allocate(self) -> None:
        self.storage.resize_(self.nbytes)
        for resized in self.events.resized:
            resized(self.storage)

    def free(self) -> bool:
        """Free the memory; returns False where `numpy()` of a view has fixed the storage's size.
        May be called from another thread, and twice."""
        is_resizable = self.storage.resizable()
        if is_resizable:
            self.storage.resize_(0)
            for resized in self.events.resized:
                resized(self.storage)
        return is_resizable
