"""Uninterrupted: has Ctrl-C wait until the state is whole."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Uninterrupted:
    """A context in which Python's handlers of SIGINT and SIGTERM do not run; at its end they do.

    They run on the main thread only, so on any other this does nothing. A second signal of a kind
    does not wait.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._caught: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._catch)
        except ValueError:
            self._before.clear()  # Not the main thread.

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if any(number == caught for caught, _ in self._caught):
            self._before[number](number, frame)
        self._caught.append((number, frame))

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for number, frame in self._caught:
            self._before[number](number, frame)
