"""DeltaReader: follows a folder of patches (folder_names.py) from any process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from layerzero.checkpoint.delta.apply import apply_delta
from layerzero.checkpoint.delta.folder_file import read_contents, read_patches
from layerzero.checkpoint.delta.folder_names import (
    CHANGES,
    FULL,
    DeltaFile,
    complete_steps,
    current_stream,
    files_in,
)
from layerzero.checkpoint.delta.patch import DeltaError


class DeltaReader:
    """Applies what `DeltaWriter`s have written to a receiver's tensors, step by step."""

    step: int | None
    """The last step that was applied; None: none yet."""

    def __init__(self, root: str | Path) -> None:
        """`root`: the folder of the writers; it need not exist yet."""
        self._root = Path(root)
        self._stream: str | None = None
        self.step = None

    def apply(self, tensors: Mapping[str, torch.Tensor], *, from_full: bool = False) -> int | None:
        """Apply all steps that are complete and new, after all of their files were checked.

        Begins with the newest complete `write_full` of the stream, if there is one, and else with
        the first round, for tensors with the weights that the model had when the stream was made.
        Files of steps that some rank has not finished are left for later. Needs no process group.

        Args:
            tensors: as for `apply_delta`.
            from_full: begin again with the newest complete `write_full`.

        Returns:
            The step that the tensors are at now; None: there was nothing new.

        Raises:
            DeltaError: a file is damaged or a link, or its patches do not fit the tensors. If the
                files are in order, nothing was written.
        """
        folder = current_stream(self._root)
        if folder is None:
            return None
        files = files_in(folder)
        if not files:
            return None
        senders = read_contents(folder / files[0].name).senders
        is_new = from_full or self._stream != folder.name
        at = None if is_new else self.step
        chosen: list[DeltaFile] = []
        if at is None:
            full = complete_steps(files, FULL, senders)
            if full:
                at = full[-1]
                chosen += _of_steps(files, FULL, at, at)
            elif from_full:
                raise DeltaError(f"{folder}: no full() of all ranks {list(senders)} is complete")
        begin = -1 if at is None else at
        rounds = [s for s in complete_steps(files, CHANGES, senders) if s > begin]
        if rounds:
            at = rounds[-1]
            chosen += _of_steps(files, CHANGES, begin + 1, at)
        if not chosen:
            return None
        self._check(folder, chosen, senders)
        for file in chosen:
            for patch in read_patches(folder / file.name):
                apply_delta(tensors, patch)
        self._stream, self.step = folder.name, at
        return at

    def _check(self, folder: Path, files: Sequence[DeltaFile], senders: Sequence[int]) -> None:
        """Read all files once, so that a damaged one is found before anything is written."""
        for file in files:
            path = folder / file.name
            contents = read_contents(path)
            if list(contents.senders) != list(senders):
                raise DeltaError(
                    f"{path}: written by ranks {list(contents.senders)}, other files of the stream "
                    f"by {list(senders)}"
                )
            chain = contents.chain
            if chain is not None and (chain.stream, chain.sender) != (folder.name, file.sender):
                raise DeltaError(
                    f"{path}: has patches of rank {chain.sender}, stream {chain.stream}"
                )
            for _ in read_patches(path):
                pass


def _of_steps(files: Sequence[DeltaFile], kind: str, first: int, last: int) -> list[DeltaFile]:
    """Files of steps in [first, last] that their sender has finished.

    Raises:
        DeltaError: one of them is missing.
    """
    parts: dict[tuple[int, int], list[DeltaFile]] = {}
    for file in files:
        if file.kind == kind and first <= file.step <= last:
            parts.setdefault((file.step, file.sender), []).append(file)
    found: list[DeltaFile] = []
    for (step, sender), own in sorted(parts.items()):
        if not any(file.is_last for file in own):
            continue  # A round that failed, or is being written.
        if [file.part for file in own] != list(range(len(own))):
            raise DeltaError(
                f"{kind} of step {step}, rank {sender}: has parts {[f.part for f in own]}; a file "
                "is missing"
            )
        found += own
    return found
