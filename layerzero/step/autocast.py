"""Casts of parameters that torch.autocast made: shared by passes, freed and remade with their unit.

Autocast casts a float32 parameter once and caches the cast until its outermost context ends. All
later uses join the graph at that one cast, including those of other calls and other passes.
`CastCache` tracks which forwards share such casts, and clears stale ones.

A matrix product saves the cast of its weight until backward. By the end of a forward, the casts of
all units would add up to a copy of the model. So `SavedCast` frees the storage of a cast with its
unit, and fills it with the same bits when the unit is gathered again. The tensors over it stay in
autocast's cache and in the graph, as unsharded parameters do (Note [Views outlive storage]): the
cast itself, or what a checkpoint detached from it. `CastWatch` finds them.

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

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

_logger = logging.getLogger(__name__)
_NOTHING: AbstractContextManager[object] = nullcontext()


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


def free_casts(casts: dict[int, SavedCast]) -> None:
    """Free the memory of casts when their unit is freed."""
    for cast in casts.values():
        cast.free()


def fill_casts(casts: dict[int, SavedCast]) -> None:
    """Make casts again once their unit is unsharded, and remove those that are gone."""
    for key in [key for key, cast in casts.items() if not cast.fill()]:
        del casts[key]


class CastWatch:
    """Finds casts of a model's unsharded parameters among the tensors autograd saves in forward.

    It uses saved-tensor hooks, which change nothing else. Casts that it does not find keep their
    memory, as in plain torch: those of frozen parameters (no graph leads to them), those inside a
    compiled graph, and those that the user's own code made and holds.
    """

    def __init__(self, units: Sequence[Any], device: torch.device) -> None:
        """`units`: each a `Unit`, which lies above this file."""
        self._units = units
        self._device = device
        self._owners: dict[int, tuple[nn.Parameter, Any]] = {}
        self._fresh: dict[bool, int] = {}
        """References to a cast with no other user, by whether a view of it was saved."""
        self._is_counting = False

    def watching(self) -> AbstractContextManager[object]:
        """Context around a forward call under autocast."""
        are_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        if not torch.is_grad_enabled() or not are_allowed:
            return _NOTHING
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is not None and isinstance(outer[0], _Pack) and outer[0].watch is self:
            return _NOTHING
        if not self._fresh:
            self._prepare()
        return saved_tensors_hooks(
            _Pack(self, None if outer is None else outer[0]),
            _unpack if outer is None else outer[1],
        )

    def _prepare(self) -> None:
        handles = [(unit, handle) for unit in self._units for handle in unit.handles]
        self._owners = {
            id(unsharded): (unsharded, unit)
            for unit, handle in handles
            if not handle.is_whole and handle.full.dtype == torch.float32
            for unsharded, split in zip(handle.unsharded_params, handle.splits, strict=True)
            if split is None
        }
        self._count_own_references()
        if handles and all(handle.placement.is_first for _, handle in handles):
            frozen = sum(
                sum(handle.layout.numels)
                for _, handle in handles
                if not handle.gradients.layout.trainable
            )
            _logger.info(
                "torch.autocast: parameters are gathered and gradients reduced in float32%s; "
                "MixedPrecision(param_dtype=torch.bfloat16) instead of autocast halves the bytes "
                "sent and the memory of full parameters (docs/howto/mixed_precision.md)",
                f", and casts of {frozen} frozen parameters stay until backward" if frozen else "",
            )

    def _count_own_references(self) -> None:
        """Measure `_fresh`, by products that save a cast with no other user, and a view."""
        device = self._device
        self._is_counting = True
        with outside_modes(), torch.inference_mode(False), torch.enable_grad():
            factor = torch.zeros(1, 1, 1, device=device, requires_grad=True)
            unsharded_params = [
                nn.Parameter(torch.zeros([1] * ndim, device=device)) for ndim in (2, 3)
            ]
            self._owners |= {
                id(unsharded): (unsharded, self._units[0]) for unsharded in unsharded_params
            }
            dtype = torch.get_autocast_dtype(device.type)
            hooks = saved_tensors_hooks(_Pack(self, None), _unpack)
            with hooks, torch.autocast(device.type, dtype, cache_enabled=False):
                torch.nn.functional.linear(factor, unsharded_params[0])
                torch.bmm(factor, unsharded_params[1])
        for unsharded in unsharded_params:
            del self._owners[id(unsharded)]
        self._is_counting = False

    def note(self, saved: torch.Tensor) -> bool:
        """Autograd saves a low-precision tensor; register it if it is, or views, a cast of ours.

        Returns:
            Whether it is, or views, a cast of a parameter.
        """
        is_view = saved._is_view()
        cast = saved._base if is_view else saved
        node = None if cast is None else cast.grad_fn
        if cast is None or node is None or node.name() != "ToCopyBackward0":
            return False
        owner = self._owners.get(id(getattr(node.next_functions[0][0], "variable", None)))
        if owner is None:
            return False
        if self._is_counting:
            self._fresh[is_view] = sys.getrefcount(cast)
            return True
        unsharded, unit = owner
        key = cast.untyped_storage()._cdata
        known = unit.saved_casts.get(key)
        if known is not None and known.is_alive():
            return True
        if sys.getrefcount(cast) <= self._fresh.get(is_view, 0):
            # Otherwise the user's code holds it, and may read it while the unit is sharded.
            unit.saved_casts[key] = SavedCast(cast, unsharded)
        return True


class _Pack:
    """Pack hook: notes the tensor, then applies the outer pack hook, if any."""

    def __init__(self, watch: CastWatch, outer: Callable[[torch.Tensor], Any] | None) -> None:
        self.watch = watch
        self._outer = outer

    def __call__(self, saved: torch.Tensor) -> Any:
        is_low = saved.dtype is torch.bfloat16 or saved.dtype is torch.float16
        is_cast = is_low and self.watch.note(saved)
        if self._outer is not None:
            return self._outer(saved)
        if saved.grad_fn is not None and not is_cast:
            # A node may save its own output, which leads to the node: no garbage collector finds
            # that circle, so a graph without a backward would stay forever. A cast, which has to
            # stay the object that `SavedCast` holds, is no output of the node that saves it.
            saved = saved.detach()
        return saved, saved._version


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    # Saved-tensor hooks disable autograd's own version check.
    saved, version = packed
    if saved._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {saved.dtype} {tuple(saved.shape)} is at version {saved._version}; "
            f"expected version {version}"
        )
    return saved
