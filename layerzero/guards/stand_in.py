"""StandIn: takes the place of a method on one instance; the class keeps its own."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

S = TypeVar("S", bound="StandIn")


class StandIn:
    """Is called instead of `method` of `module`, whose name in the model is `name`."""

    def __init__(self, module: nn.Module, method: str, name: str) -> None:
        self._module_ref = weakref.ref(module)
        self._method = method
        self._name = name

    @classmethod
    def put(cls, module: nn.Module, method: str, name: str) -> None:
        """Take the method's place, unless the instance has its own."""
        module.__dict__.setdefault(method, cls(module, method, name))

    @property
    def module(self) -> nn.Module:
        module = self._module_ref()
        assert module is not None, "it is called through the module, and copied with it"
        return module

    @property
    def own(self) -> Callable[..., Any]:
        """The method of the class, bound."""
        module = self.module
        return functools.partial(getattr(type(module), self._method), module)

    def __deepcopy__(self: S, memo: dict[int, Any]) -> S:
        return type(self)(memo.get(id(self.module), self.module), self._method, self._name)
