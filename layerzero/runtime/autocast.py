"""Casts that torch.autocast keeps: which passes share them, and what follows for their gradients.

Autocast casts a float32 leaf once and keeps the cast until its outermost context ends. All later
uses join the graph at that one cast: those of other calls of the unit, and of other passes.

Note [Casts are older than their uses]
    Autograd runs nodes in falling order of creation, so the node of a cast runs when everything
    that was created after it has run. A cast of an earlier call, even of one under `no_grad`, hands
    its gradient to the leaf after the nodes of the call that used it, and a unit that was reduced
    as soon as those had run would miss it. So the calls of a unit in one forward begin, for
    backward, with the first under autocast. A forward that finds casts of an earlier one either
    shares them (a backward may go through both, and adds their gradients up in the low precision,
    as in plain torch; its units are reduced when backward ends) or, where no earlier forward is
    still to come back, has them dropped.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes


def in_autocast() -> bool:
    """Whether an autocast is entered here; a disabled one too, inside which the cache lives on."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0 or torch._C._is_any_autocast_enabled()


def outside_modes() -> AbstractContextManager[object]:
    """Around operations that nobody's dispatch mode is to see; checkpoints count them."""
    modes: AbstractContextManager[object] = nullcontext()
    if torch._C._len_torch_dispatch_stack():
        modes = _disable_current_modes()
    return modes


class CastCache:
    """What a model knows of autocast's cache, which torch does not let anybody look into."""

    def __init__(self, device: torch.device) -> None:
        self._device_type = device.type
        with torch.inference_mode(False):
            self._leaf = torch.zeros(0, 0, device=device).requires_grad_()
            self._factor = torch.zeros(0, 0, device=device)
        self._cast: torch.autograd.graph.Node | None = None
        self._since = 0

    def shared_by(self, start: int, newest_open: int | None) -> bool:
        """Whether a forward will use casts of earlier ones. Drops them where none needs to share.

        Args:
            start: of the forward, in the root's time.
            newest_open: start of the newest call whose backward has not begun; None: there is none.
        """
        if not self._is_cleared():
            if newest_open is not None and newest_open >= self._since:
                return True
            torch.clear_autocast_cache()
            self._is_cleared()
        self._since = start
        return False

    def drop(self) -> None:
        """A unit is freed in a forward without autograd: its casts would add up to a model."""
        torch.clear_autocast_cache()
        self._is_cleared()

    def _is_cleared(self) -> bool:
        """Whether the cache was emptied since the last time this was asked."""
        cast = self._cast_of_leaf()
        is_cleared = cast is not self._cast
        self._cast = cast
        return is_cleared

    def _cast_of_leaf(self) -> torch.autograd.graph.Node:
        """The node of the cast that the cache has of a leaf of our own, or gets now.

        The product has no element, is seen by nobody's dispatch mode (selective checkpointing
        counts operations) and saves nothing for backward (checkpoints count that).
        """
        dtype = torch.get_autocast_dtype(self._device_type)
        with (
            outside_modes(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(self._device_type, dtype, cache_enabled=True),
        ):
            product = torch.addmm(self._leaf, self._factor, self._factor)
        assert product.grad_fn is not None
        node = product.grad_fn.next_functions[0][0]
        assert node is not None, "the leaf requires grad"
        return node
