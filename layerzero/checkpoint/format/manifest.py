"""checkpoint.json: everything in a checkpoint besides tensors, and the checksums of all files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerzero.checkpoint.format.crc import crc32
from layerzero.errors import CheckpointError

FORMAT = "layerzero-checkpoint"
VERSION = 2
"""Version 2 has optimizers or schedulers by name. Checkpoints without such names are of version 1,
which earlier programs read."""
_SEAL = b',"crc32":"%08x"}'
"""The end of the file: the checksum of all bytes before."""
OF_OPTIMIZER = "optimizer"
"""Key of a saved group's optimizer, if it has a name."""


@dataclass(frozen=True)
class FileRecord:
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint that is not a tensor, as JSON values."""

    step: int
    world_size: int
    """Number of ranks that wrote it; for people."""
    files: dict[str, FileRecord]
    """Size and CRC-32 of every other file."""
    tensors: dict[str, dict[str, int]]
    """CRC-32 of the bytes of each tensor, by kind and name."""
    optimizer_groups: list[dict[str, Any]] | None = None
    """Groups of all optimizers; None: saved without an optimizer. With several, each has a name
    under "optimizer"."""
    optimizer_scalars: list[str] = field(default_factory=list)
    """Keys of state tensors that are scalars and not shaped like the parameter; with several
    optimizers "name/key"."""
    optimizer_values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Optimizer state that is not a tensor, by parameter."""
    scheduler: Any = None
    scheduler_names: list[str] | None = None
    """Of several schedulers, whose states `scheduler` has by name; None: a single one."""
    extras: list[Any] = field(default_factory=list)
    """`extra` of each rank, or a single one if all are equal."""
    extra_states: dict[str, Any] = field(default_factory=dict)
    """Extra state of each module, by module name."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Maps other names of parameters and buffers to the name they are saved under."""

    def groups_of_optimizers(self) -> dict[str, list[dict[str, Any]]]:
        """The groups of each optimizer; the name of a single one is ""."""
        found: dict[str, list[dict[str, Any]]] = {}
        for group in self.optimizer_groups or ():
            found.setdefault(group.get(OF_OPTIMIZER, ""), []).append(group)
        return found

    def crc_of(self, name: str) -> int | None:
        """The CRC-32 of a tensor's bytes; None if there is no such tensor."""
        return next((each[name] for each in self.tensors.values() if name in each), None)

    def to_bytes(self) -> bytes:
        # Not `asdict`, which copies every value.
        files = {name: vars(record) for name, record in self.files.items()}
        fields = {**vars(self), "files": files}
        if self.scheduler_names is None:
            del fields["scheduler_names"]
        is_named = any(self.groups_of_optimizers()) or self.scheduler_names is not None
        body = {"format": FORMAT, "version": VERSION if is_named else 1, **fields}
        text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        text = text.removesuffix(b"}")
        return text + _SEAL % crc32(text)

    @classmethod
    def from_bytes(cls, text: bytes, where: object) -> Manifest:
        """Verify the checksum and parse; CheckpointError if it is damaged, or of another version.
        `where`: path of the file, for error messages."""
        seal_nbytes = len(_SEAL % 0)
        body, seal = text[:-seal_nbytes], text[-seal_nbytes:]
        if seal != _SEAL % crc32(body):
            raise CheckpointError(
                f"{where}: damaged: it ends with {seal[:40]!r} instead of the checksum of its "
                f"contents, {crc32(body):08x}"
            )
        values = json.loads(body + b"}")
        version = values.pop("version")
        if values.pop("format") != FORMAT or version not in range(1, VERSION + 1):
            raise CheckpointError(
                f"{where}: expected {FORMAT} of version 1 to {VERSION}, got version {version}"
            )
        files = {name: FileRecord(**record) for name, record in values.pop("files").items()}
        return cls(**values, files=files)


def check_file_name(name: str, where: Path) -> str:
    """Return a file name found in a manifest or index, which must be that of a .safetensors or
    .json file in the same folder."""
    if (
        not isinstance(name, str)
        or "\0" in name
        or Path(name).name != name
        or not name.endswith((".safetensors", ".json"))
    ):
        raise CheckpointError(
            f"{where}: names a file {name!r:.100}; expected a .safetensors or .json file beside it"
        )
    return name


def index_of(text: bytes, where: Path) -> Mapping[str, str]:
    """The file that each tensor is in, from an index in the format of transformers."""
    try:
        weight_map = json.loads(text)["weight_map"]
        return {str(name): check_file_name(file, where) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: damaged index: {error!r}") from error
