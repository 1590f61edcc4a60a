"""Gives meta parameters and buffers storage and values, one module at a time.

Note [Two kinds of functions]
    A `param_init_fn` either writes into existing memory, or follows FSDP's convention: test
    `is_meta`, call `to_empty`, then `reset_parameters`. It is first called with memory allocated.
    Tensors that it did not write are then put back on meta, and it is called again. The random
    generators are restored before the second call, so both kinds of functions draw the same
    numbers.

Note [Nothing is garbage]
    Fresh memory is filled with a marker (flat/unset_values.py), including what a function allocates
    by `to_empty` or `torch.empty`. So a tensor that was never written is detected, never trained.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from layerzero.flat import unset_values
from layerzero.flat.parameter_info import copy_attributes
from layerzero.flat.tensor_parallel import local_of
from layerzero.flat.unset_values import AwaitedBuffer

InitFunction = Callable[[nn.Module], None]
Later = Literal["later"]


@dataclass(eq=False)
class Place:
    """The dict and key under which a module holds a parameter or buffer of its own."""

    tensors: dict[str, Any]
    name: str

    @property
    def tensor(self) -> torch.Tensor | None:
        # The dicts of a scripted module have no `get`.
        return self.tensors[self.name] if self.name in self.tensors else None  # noqa: SIM401


class Materializer:
    """Initialises modules from the meta device, moves and casts their buffers.

    Call it in module order: random numbers are then drawn in the order in which the modules of an
    ordinary model are reset.
    """

    failure: Exception | None
    """The first error of a module that got no values. Later modules are then not initialised; the
    rank goes on, and raises when all ranks exchange their errors (`settle`)."""
    waits: bool
    """Whether meta tensors were left without values (`param_init_fn="later"`)."""

    is_initialising = False
    """Whether one of them runs an initialiser now."""

    def __init__(self, device: torch.device, param_init_fn: InitFunction | Later | None) -> None:
        self.failure = None
        self.waits = False
        self.awaited: list[AwaitedBuffer] = []
        self._device = device
        self._init = param_init_fn
        # Keyed by id(original). The value keeps the original alive, so that its id stays unique.
        # The new tensor is referenced weakly, or the full values of flattened units would stay.
        self._made: dict[int, tuple[torch.Tensor, weakref.ref[torch.Tensor]]] = {}

    def __call__(
        self, fqn: str, module: nn.Module, buffer_dtype: torch.dtype | None, initialise: bool
    ) -> None:
        """Materialise the meta tensors of `module` itself; then move and cast its buffers.

        An error is kept in `failure` and not raised; the values are then undefined.

        Args:
            buffer_dtype: dtype for floating-point buffers; None: they keep theirs.
            initialise: False leaves the values undefined, because another rank broadcasts them.
        """
        metas = {place: tensor for place, tensor in _places(module) if tensor.is_meta}
        waiting = {place.name for place in metas if self._init == "later"}
        self.waits |= bool(waiting)
        if metas and initialise and not waiting and self.failure is None:
            try:
                self._initialise(fqn or "the root module", module, metas)
            except Exception as error:
                self.failure = error
        for place in metas:
            if (left := place.tensor) is not None and left.is_meta:
                self._allocate(place, left)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved = self._move(buffer, buffer_dtype)
                if name in waiting:
                    unset_values.fill(moved)  # A cast does not keep the marker's bits.
                    full = f"{fqn}.{name}" if fqn else name
                    self.awaited.append(AwaitedBuffer(full, weakref.ref(module), name))

    def _allocate(self, place: Place, tensor: torch.Tensor) -> bool:
        """Replace a meta tensor by marked memory; False if it is tied and was allocated before."""
        made = self._made_of(tensor)
        is_fresh = made is None
        if made is None:
            made = torch.empty_like(tensor, device=self._device)
            unset_values.fill(made)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            copy_attributes(tensor, made)
            self._made[id(tensor)] = (tensor, weakref.ref(made))
        place.tensors[place.name] = made
        return is_fresh

    def _made_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._made[id(tensor)][1]() if id(tensor) in self._made else None

    def _initialise(
        self, label: str, module: nn.Module, metas: Mapping[Place, torch.Tensor]
    ) -> None:
        """See Note [Two kinds of functions].

        Raises:
            ValueError: `module` has meta tensors and no initialiser, or the initialiser left some
                unwritten.
            Exception: what the initialiser raised.
        """
        own = getattr(module, "reset_parameters", None)
        if self._init is None and not callable(own):
            raise ValueError(
                f"{label} ({type(module).__name__}) has parameters or buffers "
                "on the meta device and no reset_parameters(): pass param_init_fn, which is "
                'called with each such module, or param_init_fn="later" if a load provides values'
            )
        fresh = [place for place, meta in metas.items() if self._allocate(place, meta)]
        generators = _kept_generators(self._device)
        error = self._run(module)
        left = [place for place in metas if _is_unwritten(place.tensor)]
        again = None
        if left and self._init is not None and (error is None or left == fresh):
            for place in left:
                place.tensors[place.name] = metas[place]
            for restore in generators:
                restore()
            again = self._run(module)
            left = [place for place in left if _is_unwritten(place.tensor)]
            error = error if left else again
        self._keep(metas)
        if error is not None:
            raise error
        if left:
            names = ", ".join(repr(place.name) for place in left)
            who = "param_init_fn" if self._init is not None else "its reset_parameters()"
            raise ValueError(
                f"{label} ({type(module).__name__}): {who} left {names} without a value: pass a "
                "param_init_fn that writes every parameter and buffer of a module on the meta "
                f'device and leaves them on {self._device}; or param_init_fn="later" if a load '
                "provides the values"
            ) from again

    def _run(self, module: nn.Module) -> Exception | None:
        before = [(p, t, t.data) for part in module.modules() for p, t in _places(part)]
        before_it, Materializer.is_initialising = Materializer.is_initialising, True
        try:
            with _MarksFreshMemory():
                if callable(self._init):
                    self._init(module)
                else:
                    with torch.no_grad():
                        module.reset_parameters()  # type: ignore[operator]
        except Exception as error:
            return error
        finally:
            Materializer.is_initialising = before_it
            _restore_wiped(before)
        return None

    def _keep(self, metas: Mapping[Place, torch.Tensor]) -> None:
        """Record tensors that the function put in place itself as the new parameters or buffers."""
        for place, meta in metas.items():
            made = place.tensor
            if made is None or made.is_meta or self._made_of(meta) is made:
                continue
            copy_attributes(meta, made)
            self._made[id(meta)] = (meta, weakref.ref(made))

    def _move(self, buffer: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        moved = self._made_of(buffer)
        if moved is None:
            moved = buffer.to(
                device=self._device, dtype=dtype if buffer.is_floating_point() else None
            )
            self._made[id(buffer)] = (buffer, weakref.ref(moved))
            self._made[id(moved)] = (moved, weakref.ref(moved))
        return moved


def _places(module: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield Place(tensors, name), tensor


def _is_unwritten(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and (tensor.is_meta or unset_values.is_left(tensor))


def _kept_generators(device: torch.device) -> list[Callable[[], None]]:
    """Functions that put torch's default random generators back into the state they have now."""
    kept: list[Callable[[], None]] = [partial(torch.set_rng_state, torch.get_rng_state())]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        # With its name: the current device may be another one.
        kept.append(partial(module.set_rng_state, module.get_rng_state(device), device))
    return kept


_FRESH = (
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.empty_permuted,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
)


class _MarksFreshMemory(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FRESH and isinstance(result, torch.Tensor):
            unset_values.fill(result)
        return result


def _restore_wiped(before: list[tuple[Place, torch.Tensor, torch.Tensor]]) -> None:
    """Put back each tensor that unwritten memory replaced: `to_empty()` recurses."""
    for place, tensor, data in before:
        now = place.tensor
        if now is None or now.is_meta:
            continue
        if now is tensor and local_of(now).data_ptr() == local_of(data).data_ptr():
            continue
        if unset_values.is_left(now):
            place.tensors[place.name] = tensor
            if not tensor.is_meta:
                tensor.data = data
