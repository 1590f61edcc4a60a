"""SavedCast: frees autocast's casts that autograd saved, and remakes them, with their unit.

A matrix product under torch.autocast saves the low-precision cast of its weight until backward.
By the end of a forward, the casts of all units would add up to a copy of the model. So the storage
of a cast is freed with its unit, and filled with the same bits when the unit is gathered again. The
tensor object stays in autocast's cache and in the graph, as unsharded parameters do (Note
[Views outlive storage]). cast_watch.py finds the casts.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef


class SavedCast:
    """A cast of one unsharded parameter, referenced weakly."""

    def __init__(self, cast: torch.Tensor, source: nn.Parameter) -> None:
        self._ref = TensorWeakRef(cast)
        self._source = source
        self._nbytes = cast.untyped_storage().nbytes()

    def is_of(self, cast: torch.Tensor) -> bool:
        return self._ref() is cast

    def free(self) -> None:
        cast = self._ref()
        if cast is not None:
            cast.untyped_storage().resize_(0)

    def fill(self) -> bool:
        """Make the cast again from the unsharded parameter. False: the cast is gone."""
        cast = self._ref()
        if cast is None:
            return False
        if not cast.untyped_storage().nbytes():
            cast.untyped_storage().resize_(self._nbytes)
            # Through `.data`: otherwise autograd would count it as a change of a saved tensor.
            with torch.no_grad(), torch.inference_mode(False):
                cast.data.copy_(self._source)
        return True


def free(casts: dict[int, SavedCast]) -> None:
    """Free the memory of casts when their unit is freed."""
    for cast in casts.values():
        cast.free()


def fill(casts: dict[int, SavedCast]) -> None:
    """Make casts again once their unit is unsharded, and remove those that are gone."""
    for key in [key for key, cast in casts.items() if not cast.fill()]:
        del casts[key]
