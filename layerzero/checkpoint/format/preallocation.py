"""Gives a new file its full length, with blocks on the disk where the file system can reserve them.

Ranks write ranges of one file at the same time, in any order. Where blocks are found only then, the
file system looks for some at each write, under a lock of the file, and scatters the file over the
disk: slower to write, and to read later. And a disk that is too small shows before anything is
written.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def set_length(descriptor: int, nbytes: int) -> None:
    """Extend a file to `nbytes`; what is new reads as zeros.

    Raises:
        OSError: the disk or the quota is full, or a file may not be as large.
    """
    # Not os.posix_fallocate: where the file system cannot reserve blocks, it writes to each of
    # them, which takes as long as writing the file. The system call refuses.
    allocate = _fallocate()
    if allocate is not None and nbytes:
        done = allocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))
        error = ctypes.get_errno()
        if done == -1 and error in _FULL:
            raise OSError(error, os.strerror(error))
    # Also after that: it costs nothing, and the length is right whatever the file system did.
    os.ftruncate(descriptor, nbytes)


def _fallocate() -> Any:
    """fallocate(2) with 64-bit offsets; None: not Linux."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    # Where `off_t` has 32 bits, only the former takes these offsets.
    return getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
