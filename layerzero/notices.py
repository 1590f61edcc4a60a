"""What users are told beside errors: each thing once, by one rank."""

from __future__ import annotations

import os
import sys
import warnings

import torch.distributed as dist

_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")

_told: set[str] = set()
"""Keys of warnings that this process has given, or has left to the first rank."""


def is_first_rank() -> bool:
    """Whether this process speaks for all: rank 0 of the default group, or no group at all."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def warn_once(key: str, message: str, *, is_first: bool | None = None, stacklevel: int = 2) -> None:
    """Warn on one rank, and only the first time in this process.

    Args:
        key: what makes two warnings the same one.
        is_first: whether this rank speaks, of a model the first of its group; None: the first rank
            of all.
        stacklevel: as for `warnings.warn`: 1 is the caller.
    """
    if key in _told:
        return
    _told.add(key)
    if is_first_rank() if is_first is None else is_first:
        warnings.warn(message, stacklevel=stacklevel + 1)


def outside() -> int:
    """The `stacklevel` for which `warn_once`, called where this is, shows the user's line: the
    first one outside the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
