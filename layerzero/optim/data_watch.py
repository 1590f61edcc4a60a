"""Calls a function whenever a program gets or sets `.data` or `.grad` of a parameter.

Two shortcuts of this package's optimizers need this: a clip uses the norm that was summed inside
backward if nothing has written a gradient since, and a step does not check where each gradient is
if none was replaced. And `verify` tells writes from flipped bits. Version counters show writes, but
not those through `.data` (of a gradient either), and not that `.grad` is another tensor. So these
parameters become instances of a subclass of their class, whose `data` or `grad` first calls a
function; autograd's node that adds to `.grad` calls it too. A tensor that a program got may be
written at any later time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layerzero.flat.parameter_hooks import accumulator_of


class _Watch:
    """Watches one attribute, which may have several names, of all parameters of this process."""

    def __init__(self, *names: str) -> None:
        self._names = names
        # By `id` of the parameter, not as its attribute, which copies and pickles would take along.
        self._notes: dict[int, weakref.WeakMethod[Callable[[Any], None]]] = {}
        self._classes: dict[type, type] = {}

    def begin(self, parameter: nn.Parameter, note: Callable[[Any], None]) -> None:
        """Call the bound method `note` with the value of each access from now on."""
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
    """Call the bound method `note` at each access to `parameter.data`, with the value."""
    _data.begin(parameter, note)


def watch_grad(parameter: nn.Parameter, note: Callable[[Any], None]) -> None:
    """Do the same for `parameter.grad`; it misses what autograd adds (`watch_autograd`)."""
    _grad.begin(parameter, note)


def watch_autograd(parameter: nn.Parameter) -> Any:
    """Call the function of `watch_grad`, with None, also when autograd adds to `parameter.grad`.

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
