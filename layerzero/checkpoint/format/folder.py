"""Manages the folder of a run's checkpoints: commits, replaces, removes, finds and locks them.

    root/step-00000040/            committed: complete and never changed again
    root/step-00000042/
    root/latest                    "step-00000042", the last committed one
    root/.writing-step-00000044/   being written, or left by a killed run; never read
    root/.replaced-step-00000042/  the old checkpoint of a step while a new one replaces it
    root/.removed-step-00000038/   being removed because of `keep`
    root/.lock                     held by the run that saves here

Note [One rename commits]
    A checkpoint is written in a folder of its own, fsynced, and then renamed. The rename is the
    commit: before it nothing refers to the new files, after it all of them are there. After each
    file operation here, `resolve` finds a complete checkpoint, if one was committed before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerzero.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST = "checkpoint.json"
LATEST = "latest"
FILE_MODE, FOLDER_MODE = 0o664, 0o775
"""From which the user's umask takes away; nobody else may write, even where it takes nothing."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_STEP = re.compile(r"step-([0-9]{8,18})")
_WRITING, _REPLACED, _REMOVED, _LOCK = ".writing-", ".replaced-", ".removed-", ".lock"


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def committed_steps(root: Path) -> dict[int, Path]:
    """The committed checkpoints under `root`, by ascending step."""
    if not root.is_dir():
        return {}
    found = {int(m[1]): path for path in root.iterdir() if (m := _STEP.fullmatch(path.name))}
    return dict(sorted(found.items()))


def prepare(root: Path, step: int | None) -> tuple[int, Path]:
    """Create the folder to write checkpoint `step` in (None: the highest step + 1).

    Removes what killed runs left, or restores an old checkpoint whose replacement never came.
    """
    make_durably(root)
    for path in sorted(root.glob(_REPLACED + "step-*")):
        final = root / path.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(path)
        else:
            os.rename(path, final)
    for prefix in (_WRITING, _REMOVED):
        for path in root.glob(prefix + "step-*"):
            shutil.rmtree(path)
    if step is None:
        step = max(committed_steps(root), default=-1) + 1
    partial = root / (_WRITING + step_name(step))
    partial.mkdir(FOLDER_MODE)
    return step, partial


def commit(partial: Path) -> Path:
    """Rename a written folder to the checkpoint of its step, and point `latest` to it.

    Its files must be on the disk already. See Note [One rename commits].
    """
    root, name = partial.parent, partial.name.removeprefix(_WRITING)
    final, replaced = root / name, root / (_REPLACED + name)
    sync_folder(partial)
    if final.exists():
        os.rename(final, replaced)
    os.rename(partial, final)
    sync_folder(root)
    temporary = root / f".{LATEST}"
    write_durably(temporary, f"{name}\n".encode())
    os.replace(temporary, root / LATEST)
    sync_folder(root)
    if replaced.exists():
        shutil.rmtree(replaced)
    return final


def prune(root: Path, keep: int, newest: Path) -> None:
    """Remove all checkpoints except `newest` and the `keep` - 1 others with the highest steps."""
    others = [path for path in committed_steps(root).values() if path != newest]
    for path in others[: len(others) - (keep - 1)]:
        # Renamed first, because a partly removed folder must not look like a checkpoint.
        doomed = root / (_REMOVED + path.name)
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def is_unfinished(path: Path) -> bool:
    """Whether it has the name of a folder that is being written, replaced or removed."""
    return path.name.startswith((_WRITING, _REPLACED, _REMOVED))


def resolve(path: Path) -> Path:
    """The folder of one checkpoint, or a file of weights.

    Args:
        path: a checkpoint's folder, a root (resolves to its latest checkpoint), or such a file.

    Raises:
        CheckpointError: there is no checkpoint; lists what was found.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    if (path / MANIFEST).exists() or any(path.glob("*.safetensors")):
        return path
    name, steps = _latest_name(path), committed_steps(path)
    if name is None and steps:
        # A run was killed after its first commit and before it wrote `latest`.
        return steps[max(steps)]
    for folder in (path / name, path / (_REPLACED + name)) if name else ():
        if folder.is_dir():
            return folder
    there = ", ".join(sorted(each.name for each in path.iterdir())[:8]) or "nothing"
    advice = f"; {LATEST} names {name}, which does not exist: pass another folder" if name else ""
    if name is None and (path / ".metadata").exists():
        advice = "; load that by torch.distributed.checkpoint.load"
    raise CheckpointError(
        f"{path}: expected a checkpoint (a folder with {MANIFEST} or *.safetensors) or a folder of "
        f"checkpoints (step-...), found {there}{advice}"
    )


def _latest_name(root: Path) -> str | None:
    try:
        name = read_small(root / LATEST).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    if not _STEP.fullmatch(name):
        raise CheckpointError(
            f"{root / LATEST}: expected a name such as step-00000042, got {name!r:.100}"
        )
    return name


def check_regular(path: Path, follow: bool = False) -> None:
    """Raise OSError or CheckpointError unless a name is a file's, and not that of a pipe, a device,
    a folder or a link. `follow`: accept links to files, as downloads of other projects keep them.
    """
    mode = os.stat(path, follow_symlinks=follow).st_mode
    if stat.S_ISLNK(mode):
        raise CheckpointError(
            f"{path}: a symbolic link, which is not followed inside a checkpoint; copy the files"
        )
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: damaged: it is no regular file")


def read_small(path: Path, follow: bool = False) -> bytes:
    """The contents of a manifest or index. Raises as `check_regular`."""
    check_regular(path, follow)
    return path.read_bytes()


def write_durably(path: Path, data: bytes, nbytes: int | None = None) -> None:
    """Write `data` to a new file and fsync it.

    Args:
        nbytes: extend the file to this size, reserving the blocks; None: only `data`.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        if nbytes is not None:
            _reserve(descriptor, nbytes)
            # It costs nothing, and the length is right whatever the file system did.
            os.ftruncate(descriptor, nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Give a new file its blocks on the disk, where the file system can reserve them.

    Ranks write ranges of one file at the same time, in any order. If the file system looks for
    blocks only then, it does so under a lock of the file, and scatters the file over the disk:
    slower to write, and to read later. And a disk that is too small shows before anything is
    written.
    """
    # Not os.posix_fallocate: where the file system cannot reserve blocks, it writes to each of
    # them, which takes as long as writing the file. The system call refuses.
    allocate = _fallocate()
    if allocate is not None and nbytes:
        failed = allocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))
        error = ctypes.get_errno()
        if failed and error in _FULL:
            raise OSError(error, os.strerror(error))


def _fallocate() -> Any:
    """fallocate(2) with 64-bit offsets; None: not Linux."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    # Where `off_t` has 32 bits, only the former takes these offsets.
    return getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)


def make_durably(path: Path) -> None:
    """Create a folder and its missing parents, and fsync their directory entries."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):  # Not `parents=True`, which would not pass the mode on.
        each.mkdir(FOLDER_MODE, exist_ok=True)
    path.mkdir(exist_ok=True)  # Raises if there is a file.
    for each in missing:
        with contextlib.suppress(PermissionError):  # A writable folder may not be readable.
            sync_folder(each.parent)


def sync_folder(path: Path) -> None:
    """fsync a folder, so that its directory entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the lock of a folder of checkpoints, as the first rank does during a save.

    Ranks may outlive a killed launcher and run beside the run that replaced it. Both would write
    `.writing-` folders of the same steps, and one would remove or commit what the other writes.

    It is an `flock` on a file, so it ends with the process; the file stays. Systems and file
    systems without such locks get no protection. Does not wait for it.

    Raises:
        CheckpointError: another process holds it; the message names the process.
        OSError: the folder cannot be created or written.
    """
    make_durably(root)
    descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, FILE_MODE)
    try:
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:  # Otherwise the file system has no locks.
                holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
                raise CheckpointError(
                    f"{root}: {holder} is saving here; two runs cannot save to one folder: "
                    "stop one of them, or let it save to another folder"
                ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        if fcntl is not None:
            # Closing is not enough: a process forked in the meantime has the file open as well.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
