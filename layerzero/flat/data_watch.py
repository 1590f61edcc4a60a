"""Notes that somebody takes `.data` or `.grad` of a parameter, or sets it.

Where an optimizer has written the cast weights itself, the next forward may leave its cast out, if
nothing else has written the weights since; where a gradient's norm was summed inside backward, a
clip may use it, if nothing has written the gradient since; and a step need not look where each
gradient and parameter is, if nobody has put another one there. Versions tell of writes, except of
those through `.data`, that of a gradient included; of another `.grad` nothing tells. So the
parameters concerned become instances of a subclass of their class, whose `data` or `grad` first
calls a function, and autograd's node that adds to `.grad` calls it too. What was taken may be kept
and written at any later time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layerzero.flat.parameter_hooks import accumulator_of

grad_of: Callable[[nn.Parameter], torch.Tensor | None] = vars(torch._C.TensorBase)["grad"].__get__
"""`parameter.grad`, for the engine's own use: nobody is told."""


class _Watch:
    """Of one attribute, which may have several names, in all parameters of this process."""

    def __init__(self, *names: str) -> None:
        self._names = names
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
            **{name: self._property(vars(torch._C.TensorBase)[name]) for name in self._names},
        }
        # The class of the class: isinstance() of nn.Parameter is torch's own.
        return type(cls)(cls.__name__, (cls,), own)

    def _property(self, plain: Any) -> property:
        def get(parameter: nn.Parameter) -> Any:
            value = plain.__get__(parameter)
            self.note(parameter, value)
            return value

        def set_(parameter: nn.Parameter, value: torch.Tensor | None) -> None:
            self.note(parameter, value)
            plain.__set__(parameter, value)

        def delete(parameter: nn.Parameter) -> None:
            self.note(parameter, None)
            plain.__delete__(parameter)

        return property(get, set_, delete)

    def note(self, parameter: nn.Parameter, value: Any) -> None:
        reference = self._notes.get(id(parameter))
        note = None if reference is None else reference()
        if note is not None:
            note(value)


_data, _grad = _Watch("data"), _Watch("grad", "_grad")


def watch_data(parameter: nn.Parameter, note: Callable[[Any], None]) -> None:
    """Call the bound method `note` at each access to `parameter.data`, with what it takes."""
    _data.begin(parameter, note)


def watch_grad(parameter: nn.Parameter, note: Callable[[Any], None]) -> None:
    """As `watch_data`, of `parameter.grad`; see `watch_autograd` for what is not seen by that."""
    _grad.begin(parameter, note)


def watch_autograd(parameter: nn.Parameter) -> Any:
    """Also call the function of `watch_grad`, with None, when autograd adds to `parameter.grad`.

    Args:
        parameter: requires grad.

    Returns:
        An object to keep alive: autograd holds the hooked node only weakly.
    """
    accumulator = accumulator_of(parameter)
    reference = weakref.ref(parameter)

    def note(_: object) -> None:
        added_to = reference()
        if added_to is not None:
            _grad.note(added_to, None)

    accumulator.register_prehook(note)
    return accumulator
