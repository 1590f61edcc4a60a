"""Warnings to the user: each is given once, by one rank; and how messages list names."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable

import torch.distributed as dist

_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")

_issued: set[str] = set()
"""Keys of warnings that this process has given, or left to the first rank."""


def some(names: Iterable[str]) -> str:
    """The first eight names, and the number of the others, for a message."""
    listed = list(names)
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return (", ".join(listed[:8]) or "nothing") + more


def is_first_rank() -> bool:
    """Whether this process is rank 0 of the default group, or there is no default group."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def warn_once(key: str, message: str, *, is_first: bool | None = None, stacklevel: int = 2) -> None:
    """Warn on one rank, and only the first time in this process.

    Args:
        key: identifies the warning; it is given once for each key.
        is_first: whether this rank warns, such as the first of a model's ranks; None: rank 0 of
            the default group does.
        stacklevel: as in `warnings.warn`: 1 is the caller of this function.
    """
    if key in _issued:
        return
    _issued.add(key)
    if is_first_rank() if is_first is None else is_first:
        warnings.warn(message, stacklevel=stacklevel + 1)


def outside() -> int:
    """The `stacklevel` with which a `warn_once` in the calling function shows the user's line: the
    first one outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
