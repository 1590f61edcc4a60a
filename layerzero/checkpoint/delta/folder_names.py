"""Names in a folder of patches, which any number of readers follow.

    root/current                                          the name of the stream written now
    root/3f0c.../0000000040-full-r00000-0000.last.safetensors     full() of rank 0 after step 40
    root/3f0c.../0000000041-changes-r00000-0000.safetensors       its changes of step 41, in two
    root/3f0c.../0000000041-changes-r00000-0001.last.safetensors  files; the second is the last one
    root/3f0c.../.writing-...                             half-written; never read

Each rank writes its own files and waits for no other one. A step is there for readers once every
rank has written its last file of it, so that no reader mixes steps.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from layerzero.checkpoint.delta.patch import DeltaError
from layerzero.checkpoint.format.folder import read_small, sync_folder, write_durably
from layerzero.state_dict.errors import CheckpointError

CHANGES, FULL = "changes", "full"
MAX_STEP = 10**10 - 1
_CURRENT = "current"
_STREAM = re.compile(r"[0-9a-f]{4,64}")
_FILE = re.compile(r"(\d{10})-(changes|full)-r(\d{5,})-(\d{4,})(\.last)?\.safetensors")


class DeltaFile(NamedTuple):
    """A file by its name. Sorts by step."""

    step: int
    kind: str
    """CHANGES or FULL."""
    sender: int
    part: int
    is_last: bool

    @property
    def name(self) -> str:
        last = ".last" if self.is_last else ""
        return f"{self.step:010d}-{self.kind}-r{self.sender:05d}-{self.part:04d}{last}.safetensors"


def files_in(folder: Path) -> list[DeltaFile]:
    """The complete files of a stream, by step.

    Raises:
        DeltaError: the folder is a symbolic link.
    """
    if folder.is_symlink():
        raise DeltaError(f"{folder}: a symbolic link, which is not followed")
    if not folder.is_dir():
        return []
    found = (_FILE.fullmatch(name) for name in os.listdir(folder))
    return sorted(
        DeltaFile(int(m[1]), m[2], int(m[3]), int(m[4]), m[5] is not None) for m in found if m
    )


def complete_steps(files: Iterable[DeltaFile], kind: str, senders: Sequence[int]) -> list[int]:
    """Steps of which every sender has written its last file, rising."""
    done: dict[int, set[int]] = {}
    for file in files:
        if file.kind == kind and file.is_last:
            done.setdefault(file.step, set()).add(file.sender)
    return sorted(step for step, found in done.items() if found >= set(senders))


def set_current(root: Path, stream: str, sender: int) -> None:
    """Name the stream that readers follow from now on."""
    path = root / _CURRENT
    if not path.is_symlink() and path.is_file() and path.read_text().strip() == stream:
        return
    hidden = root / f".{_CURRENT}-r{sender:05d}"
    write_durably(hidden, f"{stream}\n".encode())
    os.replace(hidden, path)
    sync_folder(root)


def current_stream(root: Path) -> Path | None:
    """The folder of the stream that is written now; None: nothing was written yet.

    Raises:
        DeltaError: the file that names it is damaged, or no regular file.
    """
    path = root / _CURRENT
    try:
        name = read_small(path).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except CheckpointError as error:
        raise DeltaError(str(error)) from error
    if not _STREAM.fullmatch(name):
        raise DeltaError(f"{path}: expected the name of a stream, got {name!r:.100}")
    return root / name
