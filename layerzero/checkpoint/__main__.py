"""python -m layerzero.checkpoint: inspects and verifies checkpoints in one process.

Exit status: 0 for success; 1 if something is damaged or there is no checkpoint; 2 for a bad
command.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from layerzero.checkpoint.format.folder import MANIFEST, read_small, resolve
from layerzero.checkpoint.format.manifest import Manifest, check_file_name
from layerzero.checkpoint.source import check_file, open_source
from layerzero.errors import CheckpointError
from layerzero.state_dict.dtype_names import dtype_name
from layerzero.state_dict.optimizers import map_values

_MOST_CHARS = 300
"""Longer texts, such as encoded tensors, are cut."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m layerzero.checkpoint")
    parser.add_argument(
        "command",
        choices=("inspect", "verify"),
        help="inspect: print what is in it, as one JSON object; verify: read every byte and "
        "compare it with the checksums",
    )
    parser.add_argument(
        "path", type=Path, help="a checkpoint's folder, or a folder of them: the latest one"
    )
    options = parser.parse_args(arguments)
    try:
        path = resolve(options.path)
        return _inspect(path) if options.command == "inspect" else _verify(path)
    except (CheckpointError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1


def _inspect(path: Path) -> int:
    """Print what the manifest and the headers say; values in the manifest stay encoded."""
    source = open_source(path)
    manifest = source.manifest
    found: dict[str, Any] = {"path": str(path), "aliases": manifest.aliases}
    if manifest.files:
        found |= {**vars(manifest), "files": {k: r.nbytes for k, r in manifest.files.items()}}
    found["tensors"] = {
        kind: {n: f"{dtype_name(e.dtype, n)} {list(e.shape)}" for n, e in entries.items()}
        for kind, entries in source.tensors.items()
    }
    print(json.dumps(map_values(found, _cut), indent=1))
    return 0


def _cut(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > _MOST_CHARS
    return value[: _MOST_CHARS - 3] + "..." if is_long else value


def _verify(path: Path) -> int:
    # Each file as soon as it is verified, because terabytes take long.
    print(path)
    is_bad = False
    for file, damage in verify(path):
        is_bad |= bool(damage)
        text = damage and f"  DAMAGED  {damage}"
        print(text or f"  OK       {file.name}  {file.stat().st_size} bytes", flush=True)
    return int(is_bad)


def verify(path: Path) -> Iterator[tuple[Path, str]]:
    """Read every byte of a checkpoint; yields each file, with its damage or "".

    `load` raises at the first damaged file; this lists all of them.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    listing = path / MANIFEST
    try:
        manifest = Manifest.from_bytes(read_small(listing), listing)
    except OSError as error:
        raise CheckpointError(f"{listing}: {error.strerror}; nothing else has checksums") from error
    yield listing, ""
    for name, record in manifest.files.items():
        file, damage = path / check_file_name(name, listing), ""
        try:
            check_file(file, record)
        except (CheckpointError, OSError) as error:
            damage = str(error)
        yield file, damage


if __name__ == "__main__":
    sys.exit(main())
