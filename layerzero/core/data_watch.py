"""Notes that somebody takes `.data` of a parameter: writes through it change no version counter.

Where an optimizer has written the cast weights itself, the next forward may leave its cast out, if
nothing else has written the weights since. Versions tell, except for `.data`. So the parameters
concerned become instances of a subclass of their class, whose `data` first calls a function. It may
be kept and written at any later time; one access is enough never to leave a cast out again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_data: Any = vars(torch._C.TensorBase)["data"]
_notes: dict[int, weakref.WeakMethod[Callable[[], None]]] = {}
"""By `id` of the parameter, not as its attribute, which copies and pickles would take along."""
_classes: dict[type, type] = {}


def watch_data(parameter: nn.Parameter, note: Callable[[], None]) -> None:
    """Call the bound method `note` before each access to `parameter.data`."""
    if id(parameter) not in _notes:
        weakref.finalize(parameter, _notes.pop, id(parameter), None)
    _notes[id(parameter)] = weakref.WeakMethod(note)
    cls = type(parameter)
    if cls not in _classes.values():
        parameter.__class__ = _classes.setdefault(cls, _make_class(cls))


def _make_class(cls: type) -> type:
    own = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "data": property(_get, _set),
    }
    # The class of the class: isinstance() of nn.Parameter is torch's own.
    return type(cls)(cls.__name__, (cls,), own)


def _repr(parameter: nn.Parameter) -> str:
    plain = parameter.detach().requires_grad_(parameter.requires_grad)
    return f"Parameter containing:\n{plain!r}"


def _get(parameter: nn.Parameter) -> Any:
    _note(parameter)
    return _data.__get__(parameter)


def _set(parameter: nn.Parameter, value: torch.Tensor) -> None:
    _note(parameter)
    _data.__set__(parameter, value)


def _note(parameter: nn.Parameter) -> None:
    reference = _notes.get(id(parameter))
    note = None if reference is None else reference()
    if note is not None:
        note()
