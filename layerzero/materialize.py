"""Give meta parameters and buffers storage and values, one module at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from layerzero.core.parameter_info import copy_attributes

InitFunction = Callable[[nn.Module], None]


class Materializer:
    """Initialises modules from the meta device, moves and casts their buffers.

    Call it in module order: random numbers are then drawn in the order in which the modules of an
    ordinary model are reset.
    """

    def __init__(
        self,
        device: torch.device,
        param_init_fn: InitFunction | None,
    ) -> None:
        self._device = device
        self._init = param_init_fn
        # By id: the original, so that the id stays its own, and what was made of it. Weakly: a
        # unit that was flattened meanwhile must not stay whole for our sake.
        self._made: dict[int, tuple[torch.Tensor, weakref.ref[torch.Tensor]]] = {}

    def __call__(
        self, fqn: str, module: nn.Module, buffer_dtype: torch.dtype | None, initialise: bool
    ) -> None:
        """Materialise what `module` itself has on meta; then move and cast its buffers.

        Args:
            buffer_dtype: of floating-point buffers; None: they keep their own.
            initialise: False leaves values undefined: they come from another rank.

        Raises:
            ValueError: it has meta tensors, but nothing says how to initialise them.
        """
        if _has_meta(module):
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and tensor.is_meta:
                        tensors[name] = self._allocate(tensor)  # type: ignore[assignment]
            if initialise:
                self._initialise_module(fqn, module)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = self._move(buffer, buffer_dtype)

    def _allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self._made_of(tensor)
        if made is None:  # A tied tensor is made once.
            made = torch.empty_like(tensor, device=self._device)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                copy_attributes(tensor, made)
            self._made[id(tensor)] = (tensor, weakref.ref(made))
        return made

    def _made_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._made[id(tensor)][1]() if id(tensor) in self._made else None

    def _initialise_module(self, fqn: str, module: nn.Module) -> None:
        if self._init is not None:
            self._init(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            with torch.no_grad():
                reset()
        else:
            raise ValueError(
                f"{fqn or 'the root module'} ({type(module).__name__}) has parameters or buffers "
                "on the meta device and no reset_parameters(): pass param_init_fn, which is "
                "called with each such module"
            )
        if _has_meta(module):
            raise ValueError(
                f"{fqn or 'the root module'} ({type(module).__name__}) still has meta tensors "
                "after its initialisation: param_init_fn must leave every tensor on "
                f"{self._device}"
            )

    def _move(self, buffer: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        moved = self._made_of(buffer)
        if moved is None:
            moved = buffer.to(
                device=self._device, dtype=dtype if buffer.is_floating_point() else None
            )
            self._made[id(buffer)] = (buffer, weakref.ref(moved))
            self._made[id(moved)] = (moved, weakref.ref(moved))
        return moved


def _has_meta(module: nn.Module) -> bool:
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in tensors)
