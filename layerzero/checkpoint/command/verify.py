"""Reads every byte of a checkpoint, verifies checksums and collects all damage.

`load` raises at the first damage. This lists all of it, and which files are intact.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from layerzero.checkpoint.command.verified_read import read_verified
from layerzero.checkpoint.format.folder import MANIFEST, read_small
from layerzero.checkpoint.format.manifest import FileRecord, Manifest, check_file_name
from layerzero.checkpoint.source import (
    Location,
    check_head,
    check_index,
    check_size,
    foreign_files,
    read_head,
)
from layerzero.state_dict.errors import CheckpointError


class Finding(NamedTuple):
    """The result for one file."""

    path: Path
    nbytes: int
    """Bytes read."""
    num_tensors: int
    damages: list[str]
    """Every damage, with file and tensor; empty if the file is intact."""


def verify(path: Path) -> Iterator[Finding]:
    """Verify what `folder.resolve` returned, file by file, in the memory of one chunk.

    Weights from another source have no checksums: headers are compared with file sizes, and every
    byte is read.
    """
    if path.is_file():
        yield _tensors(path, None)
    elif (path / MANIFEST).exists():
        yield from _checkpoint(path)
    else:
        yield from _foreign(path)


def strangers(folder: Path) -> list[str]:
    """Names in a checkpoint's folder that are not part of it and are never opened."""
    manifest = Manifest.from_bytes(read_small(folder / MANIFEST), folder / MANIFEST)
    known = {MANIFEST, *manifest.files}
    return sorted(path.name for path in folder.iterdir() if path.name not in known)


def _checkpoint(folder: Path) -> Iterator[Finding]:
    path = folder / MANIFEST
    try:
        text = read_small(path)
        manifest = Manifest.from_bytes(text, path)
    except (CheckpointError, OSError) as error:
        yield Finding(path, 0, 0, [f"{error}; without it nothing else can be checked"])
        return
    yield Finding(path, len(text), 0, [])
    for name, record in manifest.files.items():
        try:
            file = folder / check_file_name(name, path)
        except CheckpointError as error:
            yield Finding(path, 0, 0, [str(error)])
            continue
        yield _tensors(file, manifest) if name.endswith(".safetensors") else _index(file, record)


def _foreign(folder: Path) -> Iterator[Finding]:
    try:
        names = foreign_files(folder)
    except (CheckpointError, OSError) as error:
        yield Finding(folder, 0, 0, [str(error)])
        return
    for name in names:
        yield _tensors(folder / name, None)


def _index(path: Path, record: FileRecord) -> Finding:
    try:
        check_index(path, record)
    except (CheckpointError, OSError) as error:
        return Finding(path, 0, 0, [str(error)])
    return Finding(path, record.nbytes, 0, [])


def _tensors(path: Path, manifest: Manifest | None) -> Finding:
    try:
        if manifest is not None:
            check_size(path, manifest.files[path.name])
        head, found = read_head(path, is_ours=manifest is not None)
        if manifest is not None:
            check_head(path, head, found, manifest)
    except (CheckpointError, OSError) as error:
        return Finding(path, 0, 0, [str(error)])
    crcs: dict[str, int] = {}
    for each in manifest.tensors.values() if manifest is not None else ():
        crcs |= each
    nbytes, damages = len(head), []
    for name, entry in found.items():
        try:
            location = Location(path.name, entry, crcs.get(name))
            for chunk in read_verified(path.parent, name, location):
                nbytes += len(chunk)
        except (CheckpointError, OSError) as error:
            damages.append(str(error))
    return Finding(path, nbytes, len(found), damages)
