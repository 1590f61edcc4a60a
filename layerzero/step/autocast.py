"""Tracks which forwards share the casts that torch.autocast caches, and clears stale ones.

Autocast casts a float32 parameter once and caches the cast until its outermost context ends. All
later uses join the graph at that one cast, including those of other calls and other passes.

Note [Casts are older than their uses]
    Autograd runs nodes in reverse order of creation, so the node of a cast runs after everything
    that was created after the cast. If an earlier call made the cast, even one under `no_grad`, the
    gradient reaches the parameter only after the nodes of the call that used it, and a unit reduced
    right after those would miss it. So for backward, the calls of a unit in one forward count from
    the first one under autocast. A forward that finds casts of an earlier one either shares them or
    drops them. It shares them if an earlier forward has yet to run backward: one backward may go
    through both, which sums their gradients in the low precision, as in plain torch, and its units
    are reduced when backward ends. Otherwise it drops them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes


def in_autocast() -> bool:
    """Whether the caller is inside an autocast context; a disabled one, too, keeps the cache."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0 or torch._C._is_any_autocast_enabled()


def outside_modes() -> AbstractContextManager[object]:
    """Context that hides operations from dispatch modes, such as checkpoints that count them."""
    modes: AbstractContextManager[object] = nullcontext()
    if torch._C._len_torch_dispatch_stack():
        modes = _disable_current_modes()
    return modes


class CastCache:
    """Finds out whether autocast's cache was cleared; torch offers no way to inspect it."""

    def __init__(self, device: torch.device) -> None:
        self._device_type = device.type
        with torch.inference_mode(False):
            self._probe = torch.zeros(0, 0, device=device).requires_grad_()
            self._factor = torch.zeros(0, 0, device=device)
        self._cast: torch.autograd.graph.Node | None = None
        self._since = 0

    def shared_by(self, start: int, newest_open: int | None) -> bool:
        """Whether a forward will use casts of earlier ones. Clears the cache if none has to share.

        Args:
            start: of the forward, by the root's clock.
            newest_open: start of the newest call whose backward has not begun; None if there is
                none.
        """
        if not self._is_cleared():
            if newest_open is not None and newest_open >= self._since:
                return True
            torch.clear_autocast_cache()
            self._is_cleared()
        self._since = start
        return False

    def drop(self) -> None:
        """Clear the cache when a unit is freed in a forward without autograd.

        Otherwise the casts of all units would add up to a copy of the model.
        """
        torch.clear_autocast_cache()
        self._is_cleared()

    def _is_cleared(self) -> bool:
        """Whether the cache was cleared since the last call."""
        cast = self._cast_of_probe()
        is_cleared = cast is not self._cast
        self._cast = cast
        return is_cleared

    def _cast_of_probe(self) -> torch.autograd.graph.Node:
        """The autograd node of the cached cast of our own leaf; makes the cast if there is none.

        The product has no elements, is hidden from dispatch modes (selective checkpointing counts
        operations) and saves nothing for backward (checkpoints count saved tensors).
        """
        dtype = torch.get_autocast_dtype(self._device_type)
        with (
            outside_modes(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(self._device_type, dtype, cache_enabled=True),
        ):
            product = torch.addmm(self._probe, self._factor, self._factor)
        assert product.grad_fn is not None
        node = product.grad_fn.next_functions[0][0]
        assert node is not None, "the unsharded parameter requires grad"
        return node
