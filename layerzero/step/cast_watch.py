"""CastWatch: finds casts of unsharded parameters among the tensors autograd saves under autocast.

It uses saved-tensor hooks, which change nothing else. Casts that it does not find keep their
memory, as in plain torch: those of frozen parameters (no graph leads to them), those inside a
compiled graph, and those that the user's own code made and holds.
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

from layerzero.step.autocast import outside_modes
from layerzero.step.saved_casts import SavedCast
from layerzero.step.unit import Unit

_logger = logging.getLogger(__name__)
_NOTHING: AbstractContextManager[object] = nullcontext()


class CastWatch:
    """Finds casts of a model's unsharded parameters among the tensors autograd saves in forward."""

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._units = units
        self._device = device
        self._owners: dict[int, tuple[nn.Parameter, Unit]] = {}
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
                "sent and the memory of full parameters (docs/howto/recipes.md)",
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
