"""DeltaWriter: writes the rounds of a stream into a folder (folder_names.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch.distributed as dist

from layerzero.checkpoint.delta.folder_file import write_file
from layerzero.checkpoint.delta.folder_names import (
    CHANGES,
    FULL,
    MAX_STEP,
    DeltaFile,
    files_in,
    set_current,
)
from layerzero.checkpoint.delta.packing import Chain, Row, chain_of, pack
from layerzero.checkpoint.delta.patch import DeltaError, Patch
from layerzero.checkpoint.delta.stream import DeltaStream
from layerzero.checkpoint.format.folder import make_durably
from layerzero.config import parse_nbytes


class DeltaWriter:
    """Writes rounds of a `DeltaStream` into a folder that `DeltaReader`s in any processes follow.

    Every rank has one for its own stream and writes the same steps. Not collective.
    """

    def __init__(
        self,
        root: str | Path,
        stream: DeltaStream,
        *,
        senders: Sequence[int] | None = None,
        file_bytes: int | str = "256MB",
    ) -> None:
        """
        Args:
            root: a folder on a file system that readers see; created if it is missing.
            senders: global ranks that write every step; None: all of the default group.
            file_bytes: size at which a file is closed and another one begun, an int or a string
                such as "1GB"; so much is kept in host memory.

        Raises:
            ValueError: this rank is not among the senders, or a bad argument.
        """
        if senders is None:
            senders = range(dist.get_world_size() if dist.is_initialized() else 1)
        if stream.sender not in senders:
            raise ValueError(
                f"DeltaWriter: rank {stream.sender} is not among the senders {list(senders)}"
            )
        self._root = Path(root)
        self._stream = stream
        self._senders = sorted(senders)
        self._file_nbytes = parse_nbytes(file_bytes, "file_bytes")
        self._folder = self._root / stream.name

    def write(self, step: int) -> int:
        """Write what changed on this rank since the last round; returns the bytes of the files.

        Blocks the host until they are on the disk. Readers apply the step once all ranks have
        written it. If writing fails, the next round sends every element again.

        Args:
            step: greater than that of earlier rounds, the same on all ranks.

        Raises:
            DeltaError: this rank has written this step or a later one.
            OSError: a file cannot be written.
        """
        return self._write(self._stream.changes(), step, CHANGES)

    def write_full(self, step: int) -> int:
        """Write all of this rank's values as they are now, for readers that begin here.

        Args:
            step: that of the last round, or any number below the first one.

        Raises: as `write`.
        """
        return self._write(self._stream.full(), step, FULL)

    def prune(self, before: int) -> None:
        """Remove this rank's files of steps before `before`, often that of a `write_full`.

        A reader that has not applied one of them begins again at a `write_full`.
        """
        for file in self._own_files():
            if file.step < before:
                (self._folder / file.name).unlink(missing_ok=True)

    def _own_files(self) -> list[DeltaFile]:
        return [file for file in files_in(self._folder) if file.sender == self._stream.sender]

    def _write(self, patches: Iterable[Patch], step: int, kind: str) -> int:
        self._prepare(step, kind)
        first: int | None = None
        nbytes = part = size = 0
        packed: list[tuple[Row, bytes]] = []
        chain: Chain | None = None
        try:
            for patch in patches:
                if first is None:
                    first, chain = patch.link.after, chain_of(patch)
                packed.append(pack(patch))
                size += len(packed[-1][1])
                if size >= self._file_nbytes:
                    nbytes += self._close(step, kind, part, False, packed, chain)
                    packed, size, part = [], 0, part + 1
            return nbytes + self._close(step, kind, part, True, packed, chain)
        except BaseException:
            if first is not None and kind == CHANGES:
                self._stream.resend(first)
            raise

    def _prepare(self, step: int, kind: str) -> None:
        """Check the step, and remove what a failed attempt left of it."""
        make_durably(self._folder)
        there = [file for file in self._own_files() if file.kind == kind]
        newest = max((file.step for file in there if file.is_last), default=-1)
        if not newest < step <= MAX_STEP:
            raise DeltaError(
                f"{self._folder}: rank {self._stream.sender} has written {kind} of step {newest}, "
                f"and was to write step {step}; steps rise"
            )
        for file in there:
            if file.step > newest:
                (self._folder / file.name).unlink()
        set_current(self._root, self._stream.name, self._stream.sender)

    def _close(
        self,
        step: int,
        kind: str,
        part: int,
        is_last: bool,
        packed: Sequence[tuple[Row, bytes]],
        chain: Chain | None,
    ) -> int:
        file = DeltaFile(step, kind, self._stream.sender, part, is_last)
        return write_file(self._folder / file.name, packed, chain, self._senders)
