"""Locks a folder of checkpoints, so that only one run at a time saves to it.

Ranks may outlive a killed launcher and run beside the run that replaced it. Both would write
`.writing-` folders of the same steps, and one would remove or commit what the other writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from layerzero.checkpoint.format.folder import FILE_MODE, make_durably
from layerzero.state_dict.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NAME = ".lock"
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class RootLock:
    """A lock that the first rank holds from the start of a save to its end.

    It is an `flock` on a file, so it ends with the process; the file stays. Systems and file
    systems without such locks get no protection.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock; does not wait for it.

        Raises:
            CheckpointError: another process holds it; the message names the process.
            OSError: the folder cannot be created or written.
        """
        make_durably(self._root)
        descriptor = os.open(self._root / _NAME, os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:  # Otherwise the file system has no locks.
                holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
                os.close(descriptor)
                raise CheckpointError(
                    f"{self._root}: {holder} is saving here; two runs cannot save to one folder: "
                    "stop one of them, or let it save to another folder"
                ) from error
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if fcntl is not None:
            # Closing is not enough: a process forked in the meantime has the file open as well.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
