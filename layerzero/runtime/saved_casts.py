"""Casts of leaves that autograd saved: freed, and made again, with the full parameters.

A matrix product under torch.autocast saves the low-precision cast of its weight until backward.
Left alone, the casts of all units would add up to a copy of the model by the end of a forward. So
the memory of a cast goes when its unit is freed, and comes back, with the same bits, when the unit
is gathered again; the tensor stays, in autocast's cache and in the graph, as leaves do (Note
[Views outlive storage]). How they are found: cast_watch.py.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef


class SavedCast:
    """A cast of one leaf, while anybody holds it."""

    def __init__(self, cast: torch.Tensor, leaf: nn.Parameter) -> None:
        self._ref = TensorWeakRef(cast)
        self._leaf = leaf
        self._nbytes = cast.untyped_storage().nbytes()

    def is_of(self, cast: torch.Tensor) -> bool:
        return self._ref() is cast

    def free(self) -> None:
        cast = self._ref()
        if cast is not None:
            cast.untyped_storage().resize_(0)

    def fill(self) -> bool:
        """Cast the leaf again, which is full. False: nobody holds the cast any more."""
        cast = self._ref()
        if cast is None:
            return False
        if not cast.untyped_storage().nbytes():
            cast.untyped_storage().resize_(self._nbytes)
            # Not through the cast: autograd would take it for a change of what it saved.
            with torch.no_grad(), torch.inference_mode(False):
                cast.data.copy_(self._leaf)
        return True


def free(casts: dict[int, SavedCast]) -> None:
    """Free the memory of casts whose leaves are freed."""
    for cast in casts.values():
        cast.free()


def fill(casts: dict[int, SavedCast]) -> None:
    """Make casts anew whose leaves are full again, and forget those that nobody holds."""
    for key in [key for key, cast in casts.items() if not cast.fill()]:
        del casts[key]
