"""Notes that somebody takes `.data` or `.grad` of a parameter: writes through `.data`, that of a
gradient included, change no version counter.

Where an optimizer has written the cast weights itself, the next forward may leave its cast out, if
nothing else has written the weights since; where a gradient's norm was summed inside backward, a
clip may use it, if nothing has written the gradient since. Versions tell, except for `.data`. So
the parameters concerned become instances of a subclass of their class, whose `data` or `grad` first
calls a function. What was taken may be kept and written at any later time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

grad_of: Callable[[nn.Parameter], torch.Tensor | None] = vars(torch._C.TensorBase)["grad"].__get__
"""`parameter.grad`, for the engine's own use: nobody is told."""


class _Watch:
    """Of one attribute, in all parameters of this process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._plain: Any = vars(torch._C.TensorBase)[name]
        # By `id` of the parameter, not as its attribute, which copies and pickles would take along.
        self._notes: dict[int, weakref.WeakMethod[Callable[[Any], None]]] = {}
        self._classes: dict[type, type] = {}

    def begin(self, parameter: nn.Parameter, note: Callable[[Any], None]) -> None:
        """Call the bound method `note` with what each access takes from now on."""
        if id(parameter) not in self._notes:
            weakref.finalize(parameter, self._notes.pop, id(parameter), None)
        self._notes[id(parameter)] = weakref.WeakMethod(note)
        cls = type(parameter)
        if not issubclass(cls, tuple(self._classes.values())):
            if cls not in self._classes:
                self._classes[cls] = self._make_class(cls)
            parameter.__class__ = self._classes[cls]

    def _make_class(self, cls: type) -> type:
        own = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            self._name: property(self._get, self._set, self._plain.__delete__),
        }
        # The class of the class: isinstance() of nn.Parameter is torch's own.
        return type(cls)(cls.__name__, (cls,), own)

    def _get(self, parameter: nn.Parameter) -> Any:
        value = self._plain.__get__(parameter)
        self._note(parameter, value)
        return value

    def _set(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        self._note(parameter, value)
        self._plain.__set__(parameter, value)

    def _note(self, parameter: nn.Parameter, value: Any) -> None:
        reference = self._notes.get(id(parameter))
        note = None if reference is None else reference()
        if note is not None:
            note(value)


_data, _grad = _Watch("data"), _Watch("grad")


def watch_data(parameter: nn.Parameter, note: Callable[[Any], None]) -> None:
    """Call the bound method `note` at each access to `parameter.data`, with what it takes."""
    _data.begin(parameter, note)


def watch_grad(parameter: nn.Parameter, note: Callable[[Any], None]) -> None:
    """As `watch_data`, of `parameter.grad`; autograd and other C++ do not count."""
    _grad.begin(parameter, note)
