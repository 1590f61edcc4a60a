"""ModuleWrapper: a module that forwards attributes, methods and items to the module it wraps.

The wrapper has only what it and its class define: hooks on calls, and the methods of `ZeRO3` and
its subclasses. Everything else that a user reads, sets, calls or overrides is the wrapped module's.

Note [A patched forward]
    `model.forward = f` replaces the forward that runs inside calls of the wrapped module, so that
    `f` sees unsharded parameters, and every way to call the module (such as `generate`) reaches it.
    A patch usually reads `model.forward` first and calls that from `f`. What it reads is the
    wrapper's own forward; called inside `f`, that runs the forward which `f` replaced, as
    `super().forward` would.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Dicts that the wrapper shares with the wrapped module. If it held the module as a child instead,
torch's traversal would put the child's name into every FQN; this way names stay original."""

_METHODS = (
    *("train", "eval", "requires_grad_", "zero_grad", "share_memory", "_apply", "type"),
    *("to", "to_empty", "cpu", "cuda", "xpu", "ipu", "mtia", "float", "double", "half", "bfloat16"),
    *("parameters", "named_parameters", "buffers", "named_buffers", "children", "named_children"),
    *("modules", "named_modules", "get_submodule", "set_submodule", "get_parameter", "get_buffer"),
    *("register_buffer", "register_parameter", "register_module", "add_module"),
    "load_state_dict",
)
"""Methods of nn.Module that are forwarded if the wrapped module's class or instance overrides
them."""

_EXTRA_STATE = ("get_extra_state", "set_extra_state")
"""torch checks on the class whether these are overridden, so a wrapper's class has them only if the
wrapped module's class does."""

_SPECIAL_METHODS = (
    *("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__next__"),
    *("__contains__", "__reversed__", "__bool__", "__enter__", "__exit__"),
    *("__add__", "__radd__", "__iadd__", "__mul__", "__rmul__", "__imul__", "__or__", "__ior__"),
)
"""Python looks these up on the type, so a wrapper's class gets those of the wrapped module's."""

W = TypeVar("W", bound="ModuleWrapper")


class ModuleWrapper(nn.Module):
    """Base of `ZeRO3`: forwards to the wrapped module; has no part in sharding."""

    def _become_wrapper_of(self, module: nn.Module) -> None:
        is_new = "_wrapped" not in self.__dict__  # False from `rewrap`.
        self.__dict__["_wrapped"] = module
        self._share_dicts()
        if is_new:
            self.__class__ = _class_for(type(self), type(module))

    def _share_dicts(self) -> None:
        for name in _SHARED:
            self.__dict__[name] = self.module.__dict__[name]

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self.__dict__["_wrapped"]

    @property
    def training(self) -> bool:
        wrapped = self.__dict__.get("_wrapped")
        return True if wrapped is None else wrapped.training

    @training.setter
    def training(self, mode: bool) -> None:
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is not None:
            wrapped.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module. Collective."""
        own = self.__dict__
        before = own.get("_forward_before_patch")
        if before is not None:
            return before(*args, **kwargs)
        module = own["_wrapped"]
        if own["_modules"] is not module.__dict__["_modules"]:
            self._share_dicts()  # Containers replace their dict when an item is deleted.
        return module(*args, **kwargs)

    def apply(self: W, fn: Callable[[nn.Module], None]) -> W:
        """Call `fn` on the wrapped module and on every module inside it, not on the wrapper."""
        self.module.apply(fn)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is None:
            return super().__getattr__(name)
        return getattr(wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is None or self._is_own(name):
            super().__setattr__(name, value)
        elif name == "forward":
            self._patch_forward(value)
        else:
            setattr(wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is None or name in self.__dict__:
            super().__delattr__(name)
        elif name == "forward" and "_forward_patches" in self.__dict__:
            self._restore_forward()
        else:
            delattr(wrapped, name)

    def __dir__(self) -> Iterable[str]:
        return sorted({*object.__dir__(self), *dir(self.__dict__.get("_wrapped"))})

    def _is_own(self, name: str) -> bool:
        """Whether setting `name` sets it on the wrapper: it begins with "__", or the instance or a
        class below nn.Module has it. Not `forward`; see Note [A patched forward]."""
        if name in self.__dict__ or name.startswith("__"):
            return True
        for cls in type(self).__mro__:
            if cls is nn.Module:
                return False
            if name in inspect.get_annotations(cls) or (name in vars(cls) and name != "forward"):
                return True
        return False

    def _patch_forward(self, function: Callable[..., Any]) -> None:
        """See Note [A patched forward]."""
        own, module = self.__dict__, self.module
        # Assigning the wrapper's own forward, as code does to undo a patch, restores the original.
        is_ours = getattr(function, "__func__", None) in _own(type(self), "forward")
        if is_ours and getattr(function, "__self__", None) is self:
            self._restore_forward()
            return
        before = module.__dict__["forward"]
        own.setdefault("_forward_patches", []).append((function, before))
        wrapper_ref = weakref.ref(self)

        @functools.wraps(function)
        def patched(*args: Any, **kwargs: Any) -> Any:
            wrapper = wrapper_ref()
            if wrapper is None:
                return function(*args, **kwargs)
            own = wrapper.__dict__
            # `ModuleWrapper.forward` reads this; a nested patch sets its own and restores ours.
            outside = own.get("_forward_before_patch")
            own["_forward_before_patch"] = before
            try:
                return function(*args, **kwargs)
            finally:
                own["_forward_before_patch"] = outside

        module.__dict__["forward"] = patched

    def _restore_forward(self) -> None:
        patches = self.__dict__.pop("_forward_patches", None)
        if patches:
            self.module.__dict__["forward"] = patches[0][1]

    @property
    def forward_patches(self) -> list[Callable[..., Any]]:
        """Functions that `model.forward` was set to, in order; each wraps the one before."""
        return [function for function, _ in self.__dict__.get("_forward_patches", ())]


def _delegating(name: str) -> Callable[..., Any]:
    inherited = getattr(nn.Module, name)

    @functools.wraps(inherited)
    def method(self: ModuleWrapper, *args: Any, **kwargs: Any) -> Any:
        wrapped = self.__dict__.get("_wrapped")
        is_plain = wrapped is None or (
            name not in wrapped.__dict__ and getattr(type(wrapped), name) is inherited
        )
        if is_plain:
            return inherited(self, *args, **kwargs)
        result = getattr(wrapped, name)(*args, **kwargs)
        return self if result is wrapped else result

    return method


for _name in _METHODS:
    setattr(ModuleWrapper, _name, _delegating(_name))


def _delegating_special(name: str) -> Callable[..., Any]:
    def method(self: ModuleWrapper, *args: Any) -> Any:
        wrapped = self.module
        result = getattr(type(wrapped), name)(wrapped, *args)
        self._share_dicts()  # As in `forward`: the method may have replaced a dict.
        return self if result is wrapped else result

    method.__name__ = name
    return method


def _own(cls: type, name: str) -> list[Any]:
    """Definitions of `name` in `cls` and its bases; `getattr` would also find its metaclass's."""
    return [vars(each)[name] for each in cls.__mro__ if name in vars(each)]


def _class_for(cls: type[W], wrapped: type[nn.Module]) -> type[W]:
    """Derive from `cls` the class of a wrapper of a `wrapped`.

    It adds the special methods of `wrapped`, and gives forward the signature that it has there.
    Returns `cls` itself if there is nothing to add.
    """
    members: dict[str, Any] = {
        name: _delegating_special(name)
        for name in _SPECIAL_METHODS
        if _own(wrapped, name) and not _own(cls, name)
    }
    for name in _EXTRA_STATE:
        if getattr(wrapped, name) is not getattr(nn.Module, name):
            members[name] = _delegating(name)
    if cls.forward is ModuleWrapper.forward:  # A subclass's own forward keeps its signature.

        def forward(self: ModuleWrapper, *args: Any, **kwargs: Any) -> Any:
            return ModuleWrapper.forward(self, *args, **kwargs)

        forward.__doc__ = ModuleWrapper.forward.__doc__
        with contextlib.suppress(ValueError, TypeError):
            forward.__signature__ = inspect.signature(wrapped.forward)  # type: ignore[attr-defined]
        members["forward"] = forward
    if not members:
        return cls
    names = {key: getattr(cls, key) for key in ("__doc__", "__module__", "__qualname__")}
    made: type[W] = type(cls)(cls.__name__, (cls,), names | members)  # type: ignore[misc]
    return made
