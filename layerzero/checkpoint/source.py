"""Opens something to load: one of our checkpoints, a folder of safetensors, or one such file.

Only one rank opens it, and sends the result to the others as bytes: many ranks reading the same
small files is slow, and two ranks must not see different files. Only `.safetensors` and `.json`
files are ever opened, and nothing in them is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerzero.checkpoint.format.crc import combine, crc32
from layerzero.checkpoint.format.file_plan import index_name
from layerzero.checkpoint.format.folder import (
    MANIFEST,
    check_regular,
    is_unfinished,
    read_small,
    resolve,
)
from layerzero.checkpoint.format.inventory import MODEL, OPTIMIZER
from layerzero.checkpoint.format.manifest import FileRecord, Manifest, check_file_name, index_of
from layerzero.checkpoint.format.safetensors_file import TensorEntry, head_nbytes, parse_head
from layerzero.errors import CheckpointError
from layerzero.state_dict.dtype_names import DTYPES, dtype_name

_CHUNK_NBYTES = 8 << 20
"""Bytes of a file held in memory at a time."""


@dataclass(frozen=True)
class Source:
    """The tensors of a checkpoint, by kind and name, and its manifest."""

    folder: Path
    tensors: dict[str, dict[str, TensorEntry]]
    manifest: Manifest
    """Of weights from another source, one that lists no files."""

    def find(self, names: Sequence[str]) -> tuple[str, TensorEntry] | None:
        """Find a weight under any of `names`, or under a name that one was tied to when saved."""
        tensors, aliases = self.tensors[MODEL], self.manifest.aliases
        for name in (*names, *(aliases.get(name, name) for name in names)):
            if name in tensors:
                return name, tensors[name]
        return None

    def renamed(self, rename: Callable[[str], str | None]) -> Source:
        """The same weights under other names; `rename` returns None to leave a tensor out.

        Raises:
            CheckpointError: two tensors would get the same name.
        """
        places: dict[str, TensorEntry] = {}
        for old, place in self.tensors[MODEL].items():
            new = rename(old)
            if new is None:
                continue
            if new in places:
                raise CheckpointError(
                    f"{self.folder}: rename maps {old!r} to {new!r}, which is taken already"
                )
            places[new] = place
        pairs = [(rename(alias), rename(name)) for alias, name in self.manifest.aliases.items()]
        aliases = {alias: name for alias, name in pairs if alias and name}
        manifest = replace(self.manifest, aliases=aliases)
        return Source(self.folder, {**self.tensors, MODEL: places}, manifest)

    def to_json(self) -> list[Any]:
        places = {
            kind: {name: (dtype_name(e.dtype, name), *e[1:]) for name, e in entries.items()}
            for kind, entries in self.tensors.items()
        }
        return [str(self.folder), places, self.manifest.to_bytes().decode()]

    @classmethod
    def from_json(cls, values: list[Any]) -> Source:
        folder, tensors, manifest = values
        found = {
            kind: {
                name: TensorEntry(DTYPES[dtype], tuple(shape), *rest)
                for name, (dtype, shape, *rest) in places.items()
            }
            for kind, places in tensors.items()
        }
        return cls(Path(folder), found, Manifest.from_bytes(manifest.encode(), folder))


def open_source(path: Path, with_optimizer: bool = True) -> Source:
    """Read and check everything except the tensors' bytes. Not collective.

    Raises:
        CheckpointError: there is no checkpoint, or one of its files is missing or damaged.
    """
    path = resolve(path)
    if not (path / MANIFEST).exists():
        folder = path.parent if path.is_file() else path
        foreign = Manifest(step=0, world_size=0, files={}, tensors={})
        tensors, aliases = _tensors_of(folder, _foreign_files(path), foreign)
        return Source(folder, {MODEL: tensors}, replace(foreign, aliases=aliases))
    manifest = Manifest.from_bytes(read_small(path / MANIFEST), path / MANIFEST)
    by_kind: dict[str, dict[str, TensorEntry]] = {MODEL: {}}
    kinds = [kind for kind in manifest.tensors if kind != OPTIMIZER or with_optimizer]
    for kind in kinds:
        names = [check_file_name(name, path / MANIFEST) for name in manifest.files]
        if index_name(kind) in names:
            check_file(path / index_name(kind), manifest.files[index_name(kind)])
        own = [n for n in names if n.startswith(kind) and n.endswith(".safetensors")]
        by_kind[kind], _ = _tensors_of(path, own, manifest)
    return Source(path, by_kind, manifest)


def _foreign_files(folder: Path) -> list[str]:
    """Names of the safetensors files with the weights: `folder` from another source, or a file."""
    if folder.is_file():
        return [check_file_name(folder.name, folder)]
    if is_unfinished(folder):
        raise CheckpointError(
            f"{folder}: has no {MANIFEST}: its save or removal was interrupted; load another "
            "checkpoint"
        )
    index = folder / index_name(MODEL)
    if index.exists():
        return sorted(set(index_of(read_small(index, follow=True), index).values()))
    if (folder / f"{MODEL}.safetensors").exists():
        return [f"{MODEL}.safetensors"]
    return sorted(path.name for path in folder.glob("*.safetensors"))


def check_file(path: Path, record: FileRecord) -> None:
    """Read a file; raise CheckpointError if its size or checksum is not what was written."""
    _size_of(path, record)
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_NBYTES):
            crc = crc32(chunk, crc)
    check_crc(path, crc, record.crc32)


def check_crc(where: object, crc: int, written: int | None) -> None:
    """Raise CheckpointError if a CRC differs from `written`; None: unknown, so nothing to check."""
    if written is not None and crc != written:
        raise CheckpointError(
            f"{where}: damaged: the CRC-32 of its bytes is {crc:08x}, but {written:08x} when it "
            "was written"
        )


def _size_of(path: Path, record: FileRecord | None) -> int:
    """The size of a file, which must be that in `record`; None: one from another source."""
    try:
        check_regular(path, follow=record is None)
        nbytes = path.stat().st_size
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    if record is not None and nbytes != record.nbytes:
        raise CheckpointError(
            f"{path}: damaged: it has {nbytes} bytes, but {record.nbytes} were written"
        )
    return nbytes


def _tensors_of(
    folder: Path, names: Sequence[str], manifest: Manifest
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    for name in names:
        found, own_metadata = _read_head(folder / name, manifest)
        for tensor, entry in found.items():
            if tensor in tensors:
                raise CheckpointError(
                    f"{folder / name}: contains {tensor!r}, which {tensors[tensor].file} contains "
                    "too"
                )
            tensors[tensor] = entry._replace(file=name, crc=manifest.crc_of(tensor))
        metadata |= own_metadata
    # When the safetensors library drops a duplicate tensor, it stores dropped name -> kept name in
    # the metadata.
    aliases = {k: v for k, v in metadata.items() if v in tensors and k not in tensors}
    return tensors, aliases


def _read_head(path: Path, manifest: Manifest) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata. `manifest`: of the checkpoint that it is
    part of, to compare it with, if that lists it."""
    record = manifest.files.get(path.name)
    nbytes = _size_of(path, record)
    try:
        with path.open("rb") as file:
            start = file.read(8)
            head = start + file.read(head_nbytes(start, nbytes) - len(start))
        found, metadata = parse_head(head, nbytes)
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged, or of another format: {error}") from error
    if record is not None:
        # The head has no checksum of its own: the CRCs of head and tensors must combine to the
        # file's.
        crcs = [crc for name in found if (crc := manifest.crc_of(name)) is not None]
        sizes = [len(head), *(entry.nbytes for entry in found.values())]
        if len(crcs) < len(found) or combine([crc32(head), *crcs], sizes) != record.crc32:
            raise CheckpointError(f"{path}: damaged: its header differs from what was written")
    return found, metadata
