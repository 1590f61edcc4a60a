"""checkpoint.json: what a checkpoint holds beside tensors, and the checksums of everything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from layerzero.checkpoint.format.crc import crc32
from layerzero.state_dict.errors import CheckpointError

FORMAT = "layerzero-checkpoint"
VERSION = 1
_SEAL = b',"crc32":"%08x"}'
"""The end of the file: the checksum of all bytes before it."""


@dataclass(frozen=True)
class FileRecord:
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint that is no tensor, as JSON values."""

    step: int
    world_size: int
    """Ranks that wrote it; for people, and to know whose `extras` are whose."""
    files: dict[str, FileRecord]
    """Every other file."""
    tensors: dict[str, dict[str, int]]
    """By kind and name, the CRC-32 of the tensor's bytes."""
    optimizer_groups: list[dict[str, Any]] | None = None
    """None: it was saved without an optimizer."""
    optimizer_scalars: list[str] = field(default_factory=list)
    """Keys of state that is one number for each parameter, and not shaped like it."""
    optimizer_values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By parameter, its state that is no tensor."""
    scheduler: Any = None
    extras: list[Any] = field(default_factory=list)
    """What each rank gave, or one for all."""
    extra_states: dict[str, Any] = field(default_factory=dict)
    """By module."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of parameters and buffers, and under which name they are saved."""

    def to_bytes(self) -> bytes:
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        text = text.removesuffix(b"}")
        return text + _SEAL % crc32(text)

    @classmethod
    def from_bytes(cls, text: bytes, where: object) -> Manifest:
        """Verify and read; `where` it was found, for messages.

        Raises:
            CheckpointError: it is damaged, or of a later version.
        """
        seal_nbytes = len(_SEAL % 0)
        body, seal = text[:-seal_nbytes], text[-seal_nbytes:]
        if seal != _SEAL % crc32(body):
            raise CheckpointError(
                f"{where}: damaged: it ends with {seal[:40]!r} instead of the checksum of what is "
                f"before, {crc32(body):08x}"
            )
        values: dict[str, Any] = json.loads(body + b"}")
        version = values.pop("version", None)
        if values.pop("format", None) != FORMAT or version != VERSION:
            raise CheckpointError(
                f"{where}: expected {FORMAT} of version {VERSION}, got version {version!r}"
            )
        files = {name: FileRecord(**record) for name, record in values.pop("files").items()}
        return cls(**values, files=files)


def check_file_name(name: str, where: Path) -> str:
    """A name that a checkpoint gives for a file of its own folder.

    Raises:
        CheckpointError: it leads elsewhere, or is not of a kind that is ever opened.
    """
    if Path(name).name != name or not name.endswith((".safetensors", ".json")):
        raise CheckpointError(
            f"{where}: names a file {name!r}; expected a .safetensors or .json file beside it"
        )
    return name


def index_of(text: bytes, where: Path) -> Mapping[str, str]:
    """Which file each tensor is in, from an index as transformers writes it.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        weight_map = json.loads(text)["weight_map"]
        return {str(name): check_file_name(file, where) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}: damaged index: {error!r}") from error
