"""Forwards that run while their results are consumed: generators, `map`, `filter`, `zip`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any


class _End:
    """The return value of a generator."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _advance(lazy: Any, sent: Any) -> Any:
    try:
        return next(lazy) if sent is None else lazy.send(sent)
    except StopIteration as stop:
        return _End(stop.value)


def step_by_step(call: Callable[..., Any], lazy: Any) -> Generator[Any, Any, Any]:
    """Run each step of `lazy` by `call`, which takes a function and its arguments."""
    sent = None
    while True:
        value = call(_advance, (lazy, sent))
        if isinstance(value, _End):
            return value.value
        sent = yield value
