"""Taps: methods of the engine's objects, replaced on the object and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Taps:
    """Replaced methods. Off, the engine has no trace of them: no branch, no call.

    A replacement survives a change of its object's class (`layerzero.join`), because it finds the
    method that it replaces at each call.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []

    def put(
        self, owner: object, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace `owner.name` by `around(the method)`."""
        attributes = vars(owner)
        before = attributes.get(name, _MISSING)
        if before is _MISSING:

            def method(*args: Any, **kwargs: Any) -> Any:
                return getattr(type(owner), name).__get__(owner)(*args, **kwargs)

            static = isinstance(_of_class(type(owner), name), staticmethod)
            before_method = getattr(type(owner), name) if static else method
        else:
            before_method = before
        self._replaced.append((attributes, name, before))
        attributes[name] = around(before_method)

    def remove(self) -> None:
        while self._replaced:
            attributes, name, before = self._replaced.pop()
            if before is _MISSING:
                del attributes[name]
            else:
                attributes[name] = before


def _of_class(cls: type, name: str) -> Any:
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
