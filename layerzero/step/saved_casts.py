"""SavedCast: frees autocast's casts that autograd saved, and remakes them, with their unit.

A matrix product under torch.autocast saves the low-precision cast of its weight until backward.
By the end of a forward, the casts of all units would add up to a copy of the model. So the storage
of a cast is freed with its unit, and filled with the same bits when the unit is gathered again. The
tensors over it stay in autocast's cache and in the graph, as unsharded parameters do (Note [Views
outlive storage]): the cast itself, or what a checkpoint detached from it. cast_watch.py finds them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef


class SavedCast:
    """A cast of one unsharded parameter; refers to its storage weakly."""

    def __init__(self, cast: torch.Tensor, source: nn.Parameter) -> None:
        self._ref = StorageWeakRef(cast.untyped_storage())
        self._source = source
        self._nbytes = cast.untyped_storage().nbytes()
        self._view = cast.dtype, cast.size(), cast.stride()

    @property
    def _storage(self) -> Any:
        """None if it is gone."""
        return torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)

    def is_alive(self) -> bool:
        return not self._ref.expired()

    def free(self) -> None:
        storage = self._storage
        if storage is not None:
            storage.resize_(0)

    def fill(self) -> bool:
        """Make the cast again from the unsharded parameter. False: the cast is gone."""
        storage = self._storage
        if storage is None:
            return False
        if not storage.nbytes():
            storage.resize_(self._nbytes)
            dtype, size, stride = self._view
            # Another tensor: otherwise autograd would count it as a change of a saved one.
            with torch.no_grad(), torch.inference_mode(False):
                over = torch.empty(0, dtype=dtype, device=storage.device)
                over.set_(storage, 0, size, stride).copy_(self._source)
        return True


def free(casts: dict[int, SavedCast]) -> None:
    """Free the memory of casts when their unit is freed."""
    for cast in casts.values():
        cast.free()


def fill(casts: dict[int, SavedCast]) -> None:
    """Make casts again once their unit is unsharded, and remove those that are gone."""
    for key in [key for key, cast in casts.items() if not cast.fill()]:
        del casts[key]
