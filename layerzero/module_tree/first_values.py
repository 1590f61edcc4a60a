"""First values after `to_empty`: until the model is used, its modules show whole parameters.

Programs shard a model on the meta device, call `to_empty`, and then draw its values, with one seed
on all ranks. So these are drawn as in one process, bitwise: decision 0055, which also says what
ends this. A whole parameter gets memory with its first operation. Once the whole parameters that
have memory exceed the largest unit's bytes, the oldest is freed: this rank's part of it is kept.
One that is used again after that is gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from layerzero.flat import unset_values
from layerzero.flat.parameter_hooks import kind_of_hooks
from layerzero.flat.parameter_info import copy_attributes, info_of, set_info, set_sharded_param
from layerzero.flat.tensor_parallel import local_of
from layerzero.state_dict.summon import gather_flat
from layerzero.step.handle import FlatParamHandle
from layerzero.step.root import RootState, root_of
from layerzero.step.unit import Unit

_detach, _view = torch.ops.aten.detach.default, torch.ops.aten.view.default


def begin(unit: Unit, module: nn.Module, emptied: Container[object]) -> None:
    """Show whole parameters of `unit`, without values, in `module`. Not collective.

    Args:
        emptied: all modules that the same `to_empty` has emptied; their buffers have no values.
    """
    root = root_of(unit)
    for _, module_ref, key in chain.from_iterable(each.awaited_buffers for each in root.units):
        part = module_ref()
        buffer = part._buffers.get(key) if part is not None and part in emptied else None
        if buffer is not None:
            unset_values.fill(buffer)
    root.structure.first_values = root.structure.first_values or FirstValues(root)
    root.structure.first_values.add(unit, {own for _, own in unit.views.inside(module)})
    root.check_next_forward()


class _Whole:
    """A parameter of which the modules show the whole."""

    def __init__(self, values: FirstValues, unit: Unit, handle: FlatParamHandle, index: int):
        self.values, self.unit, self.handle, self.index = values, unit, handle, index
        self.sharded = handle.sharded_params[index]
        self.full: torch.Tensor | None = None
        self.was_freed = False
        self.shape = handle.shapes[index]
        self.nbytes = prod(self.shape) * self.sharded.element_size()
        self.split = split = handle.splits[index]
        made: Any = WholeParameter(self, is_parameter=split is None)
        if split is not None:
            # DTensors draw for whole parameters themselves; `made` is the part before them.
            made = nn.Parameter(split.wrap(made), self.sharded.requires_grad)
        self.parameter = made
        copy_attributes(handle.unsharded_params[index], made)
        set_info(made, info_of(self.sharded))
        set_sharded_param(made, self.sharded, values.end_all)
        self.names = {*made.__dict__}

    def check(self) -> None:
        if self.values.has_ended:
            raise RuntimeError(
                f"{info_of(self.sharded).fqn!r} was taken before its model was used for the first "
                "time, when it was the whole parameter; read it from its module, or from "
                "parameters(), again"
            )

    def take(self, full: torch.Tensor) -> None:
        """Keep this rank's part."""
        start, stop = info_of(self.sharded).range
        part = local_of(full).reshape(-1)[start:stop].view(self.sharded.shape)
        with torch.inference_mode(False), torch.no_grad():
            self.sharded.copy_(part)

    def free(self) -> bool:
        """Keep this rank's part alone. Returns False if a view that the program has (`w[0]`) keeps
        the memory; then the whole stays, and so does what is written into the view."""
        if self.full is None:
            return True
        self.take(self.full)
        storage_ref = weakref.ref(self.full.untyped_storage())
        self.full, self.was_freed = None, True
        if (storage := storage_ref()) is None:
            return True
        self.full = self.sharded.new_empty(0).set_(storage).view(self.shape)
        return False

    def end(self) -> None:
        self.free()
        own, shown = self.parameter, self.unit.views.shown_for(self.sharded)
        self.sharded.requires_grad_(own.requires_grad)
        name = info_of(self.sharded).fqn
        if kind := kind_of_hooks(own):
            raise RuntimeError(
                f"{name!r}: {kind} before the model's first use has no effect on a DTensor; call "
                "it after an optimizer was made, or after the first forward"
            )
        for key in own.__dict__.keys() - self.names:
            setattr(self.sharded, key, own.__dict__[key])
        for other in shown:
            if other is own:
                continue
            if other is None or isinstance(other, WholeParameter) or other.shape != own.shape:
                raise RuntimeError(
                    f"{name!r} was replaced or removed after to_empty: copy values of its shape "
                    "into it, and tie or change parameters before sharding"
                )
            self.take(other)
        del self.parameter, self.unit, self.handle  # What a program keeps keeps no model alive.


class FirstValues:
    """The whole parameters of one model."""

    def __init__(self, root: RootState) -> None:
        self._root_ref = weakref.ref(root)
        self._of_unit: dict[Unit, dict[nn.Parameter, _Whole]] = {}
        self._live: dict[_Whole, None] = {}
        """Those with memory, the one used last at the end."""
        self._limit = 0
        self.has_ended = False

    def add(self, unit: Unit, emptied: set[nn.Parameter]) -> None:
        """Show whole parameters, without values, for these sharded ones of the unit."""
        unit.reshard()
        unit.awaits_values = True
        wholes = self._of_unit.setdefault(unit, {})
        for handle in unit.handles:
            handle.reset_sharded_params(unit.label)
            for index, sharded in enumerate(handle.sharded_params):
                if sharded not in emptied:
                    continue
                unset_values.fill(sharded.detach())
                whole = wholes[sharded] = wholes.get(sharded) or _Whole(self, unit, handle, index)
                whole.full, whole.was_freed = None, False
                self._live.pop(whole, None)
        self._limit = max(self._limit, sum(whole.nbytes for whole in wholes.values()))
        unit.views.show({sharded: whole.parameter for sharded, whole in wholes.items()})

    def full_of(self, whole: _Whole) -> torch.Tensor:
        """Its memory. Collective if it was freed."""
        whole.check()
        self._live.pop(whole, None)
        self._live[whole] = None
        if whole.full is None:
            with torch.inference_mode(False), torch.no_grad():
                whole.full = self._gathered(whole) if whole.was_freed else self._empty(whole)
        return whole.full

    def free_oldest(self, num_kept: int) -> None:
        """Free what exceeds the limit, but not the last `num_kept` that were used."""
        nbytes = sum(each.nbytes for each in self._live)
        for oldest in [*self._live][:-num_kept]:
            if nbytes > self._limit and oldest.free():
                nbytes -= oldest.nbytes
                del self._live[oldest]

    def _empty(self, whole: _Whole) -> torch.Tensor:
        full = torch.empty(whole.shape, dtype=whole.sharded.dtype, device=whole.sharded.device)
        unset_values.fill(full)
        return full

    def _gathered(self, whole: _Whole) -> torch.Tensor:
        root = self._root_ref()
        assert root is not None, "its parameters are in use"
        flat = gather_flat(root, whole.unit, whole.handle, whole.handle.main_shard.detach())
        view = local_of(whole.handle.view_of(flat, whole.index))
        return view.to(whole.sharded.device, copy=True)

    def settle(self) -> None:
        """Keep this rank's parts, which a state dict is about to show, and which a load may write.
        Whole parameters that are used after that are gathered."""
        self._live.clear()
        for whole in chain.from_iterable(each.values() for each in self._of_unit.values()):
            whole.free()
            whole.full, whole.was_freed = None, True

    def end_all(self) -> None:
        """End this as the first use of the model does."""
        root = self._root_ref()
        if root is not None and root.structure.first_values is self:
            root.structure.end_first_values()

    def end(self) -> None:
        """Keep this rank's parts, and show sharded parameters."""
        self.has_ended = True
        of_unit, self._of_unit = self._of_unit, {}
        try:
            for whole in chain.from_iterable(each.values() for each in of_unit.values()):
                whole.end()
        finally:
            for unit in of_unit:
                unit.views.show({})


class WholeParameter(torch.Tensor):
    """A whole parameter, whose memory is its model's `FirstValues`'."""

    _whole: _Whole
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, whole: _Whole, is_parameter: bool = True) -> WholeParameter:
        sharded = whole.sharded
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            whole.shape,
            dtype=sharded.dtype,
            device=sharded.device,
            requires_grad=is_parameter and sharded.requires_grad,
        )
        # The second is what `isinstance(made, nn.Parameter)` asks for.
        made.__dict__.update(_whole=whole, _is_param=is_parameter)
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """As torch's, without arguments."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        whole = args[0]._whole if args and isinstance(args[0], WholeParameter) else None
        if whole and (func is _detach or (func is _view and tuple(args[1]) == whole.shape)):
            whole.check()
            return cls(whole, False)
        taken: dict[int, Any] = {}

        def unwrapped(each: Any) -> Any:
            if not isinstance(each, WholeParameter):
                return each
            full = each._whole.values.full_of(each._whole)
            taken[id(full)] = each
            return full

        result = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        for each in taken.values():
            each._whole.values.free_oldest(num_kept=len(taken))
        # What an operation in place returns is its input.
        return tree_map(lambda each: taken.get(id(each), each), result)

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """None; once the model was used, raises: gradients go to the sharded parameter."""
        self._whole.check()
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        self._whole.check()
        if name != "grad":
            super().__setattr__(name, value)
        elif value is not None:  # A first use: the sharded parameter gets this rank's part.
            sharded, flat = self._whole.sharded, value.reshape(self.shape).flatten()
            part = flat[slice(*info_of(sharded).range)].view(sharded.shape).clone()
            self._whole.values.end_all()
            sharded.grad = part

    def requires_grad_(self, requires_grad: bool = True) -> WholeParameter:
        self._whole.check()
        super().requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register it on the sharded parameter."""
        return self._whole.sharded.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register it on the sharded parameter."""
        return self._whole.sharded.register_post_accumulate_grad_hook(hook)
