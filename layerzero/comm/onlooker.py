"""A thread that checks an object periodically, as long as the object lives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def look_on(owner: _T, look: Callable[[_T], bool], pause_s: float, name: str) -> threading.Thread:
    """Start a thread that calls `look(owner)` after each pause.

    It ends when `look` returns False, when the owner is deleted, and at exit.

    Args:
        look: must hold no reference to the owner itself.
    """
    stop = threading.Event()
    # A daemon that holds its owner weakly: it must keep neither process nor model alive. The
    # finalizer also runs at exit, before the interpreter is torn down under the thread.
    weakref.finalize(owner, stop.set)
    thread = threading.Thread(
        target=_run, args=(weakref.ref(owner), look, pause_s, stop), name=name, daemon=True
    )
    thread.start()
    return thread


def _run(
    owner_ref: weakref.ref[_T], look: Callable[[_T], bool], pause_s: float, stop: threading.Event
) -> None:
    while not stop.wait(pause_s):
        owner = owner_ref()
        if owner is None or not look(owner):
            return
        del owner
