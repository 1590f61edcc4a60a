"""One run at a time saves to a folder of checkpoints.

Ranks may outlive a launcher that was killed, beside the run that was started in its place. Both
would write `.writing-` folders of the same steps: one removes what the other writes, or commits it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from layerzero.checkpoint.format.folder import make_durably
from layerzero.state_dict.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NAME = ".lock"
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class RootLock:
    """Held by the first rank from the start of a save to its end.

    A lock of the system on a file: it goes with the process, however that ends. Where a system or
    a file system has no such locks, two runs are not kept apart.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Does not wait.

        Raises:
            CheckpointError: another save holds it; says which process.
            OSError: the folder cannot be made or written.
        """
        make_durably(self._root)
        path = self._root / _NAME
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._lock(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            # Who held it may have removed it after it was opened here; a third may have a new one.
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
                return  # no locks here
            holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
            raise CheckpointError(
                f"{self._root}: {holder} is saving here; two runs cannot save to one folder: end "
                "one, or give it a folder of its own"
            ) from error

    def release(self) -> None:
        """Nothing where it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(self._root / _NAME)
        with contextlib.suppress(OSError):
            # Closing is not enough: a process forked meanwhile has the file open too.
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
