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

    It is an `flock` on a file, so it ends with the process. Systems and file systems without such
    locks get no protection.
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
        path = self._root / _NAME
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
            try:
                self._lock(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            # The former holder may have removed the file after it was opened here, and a third
            # process may have created and locked a new one. Then try again.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    break
            os.close(descriptor)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._descriptor = descriptor

    def _lock(self, descriptor: int) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _HELD:
                return  # The file system has no locks.
            holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
            raise CheckpointError(
                f"{self._root}: {holder} is saving here; two runs cannot save to one folder: stop "
                "one of them, or let it save to another folder"
            ) from error

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(self._root / _NAME)
        with contextlib.suppress(OSError):
            # Closing is not enough: a process forked in the meantime has the file open as well.
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
