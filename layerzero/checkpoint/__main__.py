"""python -m layerzero.checkpoint: inspects and verifies checkpoints in one process.

Exit status: 0 for success; 1 if something is damaged; 2 for a bad command or if there is no
checkpoint; 130 if interrupted. An error is one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from layerzero.checkpoint.format.crc import crc32
from layerzero.checkpoint.format.folder import (
    MANIFEST,
    committed_steps,
    leftovers,
    read_small,
    resolve,
)
from layerzero.checkpoint.format.manifest import Manifest, check_file_name
from layerzero.checkpoint.format.safetensors_file import TensorEntry
from layerzero.checkpoint.source import (
    Location,
    check_crc,
    check_index,
    foreign_files,
    open_source,
    read_head,
)
from layerzero.state_dict.errors import CheckpointError
from layerzero.state_dict.optimizers import map_values

_CHUNK_NBYTES = 8 << 20
"""Bytes of a tensor held in memory at a time."""
_PROGRAM = "python -m layerzero.checkpoint"
_MOST_CHARS = 300
"""Longer texts, such as encoded tensors, are cut without `--json`."""


class _Refused(Exception):
    """The command cannot run on the given paths or options (exit status 2)."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        status = _inspect(options) if options.command == "inspect" else _verify(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Without this, Python's flush at exit would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        status, reason = 130, "interrupted"
    except _Refused as error:
        status, reason = 2, str(error)
    except (CheckpointError, OSError) as error:
        status, reason = 1, str(error)
    print(f"{_PROGRAM}: error: {reason}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Inspect and verify checkpoints of layerzero, and folders or files of "
        "safetensors from elsewhere. Needs no ranks and no model.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="inspect|verify")
    verified = "read every byte and compare it with the checksums; status 1 if any is damaged"
    for name, text, flags in (
        (
            "inspect",
            "show the contents, as one JSON object",
            {"--tensors": "also list every tensor", "--json": "cut no long text, for programs"},
        ),
        ("verify", verified, {"--all": "verify every checkpoint in the folder"}),
    ):
        one = commands.add_parser(name, help=text, allow_abbrev=False)
        one.add_argument(
            "path",
            type=Path,
            metavar="PATH",
            help="a checkpoint's folder, a folder of checkpoints (means the latest one), a folder "
            "of safetensors, or one such file",
        )
        for flag, meaning in flags.items():
            one.add_argument(flag, action="store_true", help=meaning)
    return parser


def _resolve(path: Path) -> Path:
    try:
        return resolve(path)
    except CheckpointError as error:
        raise _Refused(str(error)) from error


def _inspect(options: argparse.Namespace) -> int:
    """Print the checkpoint or weights at a path; of a folder of checkpoints, the latest.

    Reads only the manifest and file headers. Values in the manifest stay encoded. In a folder,
    whose other members may be intact, damage is part of the description.
    """
    path, chosen = options.path, _resolve(options.path)
    found: dict[str, Any] = {"path": str(path)}
    if chosen == path:
        found["checkpoint"] = _describe(path, options.tensors)
    else:
        found["checkpoints"] = [
            {"name": step.name, "latest": step == chosen, **_summary(step)}
            for step in committed_steps(path).values()
        ]
        left = [{"name": each.name, "nbytes": _nbytes_of(each)} for each in leftovers(path)]
        found["leftovers"] = left
        try:
            found["checkpoint"] = _describe(chosen, options.tensors)
        except (CheckpointError, OSError) as error:
            found["checkpoint"] = {"path": str(chosen), "error": str(error)}
    print(json.dumps(found if options.json else map_values(found, _cut), indent=1))
    return 1 if "error" in found["checkpoint"] else 0


def _cut(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > _MOST_CHARS
    return value[: _MOST_CHARS - 3] + "..." if is_long else value


def _summary(folder: Path) -> dict[str, Any]:
    try:
        path = folder / MANIFEST
        manifest = Manifest.from_bytes(read_small(path), path)
        return {
            "step": manifest.step,
            "nbytes": _nbytes_of(folder),
            "world_size": manifest.world_size,
            "written": datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).isoformat(),
        }
    except (CheckpointError, OSError) as error:
        return {"error": str(error)}


def _describe(path: Path, with_tensors: bool) -> dict[str, Any]:
    source = open_source(path)
    manifest = source.manifest
    files = sorted({p.file for places in source.tensors.values() for p in places.values()})
    found: dict[str, Any] = {
        "path": str(source.folder),
        "checksums": manifest is not None,
        "files": {name: (source.folder / name).stat().st_size for name in files},
        **{kind: _totals(places.values()) for kind, places in source.tensors.items()},
        "aliases": dict(source.aliases),
    }
    if manifest is not None:
        groups = [{**g, "params": len(g["params"])} for g in manifest.optimizer_groups or ()]
        found |= {
            "step": manifest.step,
            "world_size": manifest.world_size,
            "optimizer_groups": groups,
            "scheduler": manifest.scheduler,
            "extra": manifest.extras,
            "extra_states": sorted(manifest.extra_states),
        }
    if with_tensors:
        found["tensors"] = [
            {
                "kind": kind,
                "name": name,
                "dtype": place.dtype,
                "shape": list(place.shape),
                "file": place.file,
                "offset": place.begin,
                "nbytes": place.entry.nbytes,
                "crc32": place.crc,
            }
            for kind, places in source.tensors.items()
            for name, place in places.items()
        ]
    return found


def _totals(places: Iterable[Location]) -> dict[str, dict[str, int]]:
    """Tensors, elements and bytes by dtype."""
    found: dict[str, dict[str, int]] = {}
    for place in places:
        own = found.setdefault(place.dtype, {"tensors": 0, "elements": 0, "nbytes": 0})
        own["tensors"] += 1
        own["elements"] += place.entry.numel
        own["nbytes"] += place.entry.nbytes
    return found


def _nbytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _verify(options: argparse.Namespace) -> int:
    if not options.all:
        return _verify_one(_resolve(options.path))
    chosen = committed_steps(options.path).values()
    if not chosen:
        raise _Refused(f"{options.path}: --all needs a folder of checkpoints (step-...)")
    return max([_verify_one(path) for path in chosen])


def _verify_one(path: Path) -> int:
    """Verify one checkpoint; returns the exit status.

    Prints each file as soon as it is verified, because terabytes take long.
    """
    print(path)
    known = set()
    num_bad = nbytes = 0
    for file, damages in verify(path):
        known.add(file.name)
        num_bad += bool(damages)
        for damage in damages:
            print(f"  DAMAGED  {damage}", flush=True)
        if not damages:
            nbytes += file.stat().st_size
            print(f"  OK       {file.name}  {file.stat().st_size} bytes", flush=True)
    text = f"{len(known)} file{'s' * (len(known) != 1)}"
    if num_bad:
        print(f"  damaged: {num_bad} of {text}")
        return 1
    if MANIFEST in known:
        for name in sorted({each.name for each in path.iterdir()} - known):
            print(f"  not part of the checkpoint, never opened: {name}")
    kind = "; without checkpoint.json only sizes and headers can be checked"
    print(f"  OK: {text}, {nbytes} bytes{'' if MANIFEST in known else kind}")
    return 0


def verify(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Read every byte of what `resolve` returned; yields each file with all its damages.

    `load` raises at the first damage; this lists all of it. Weights from another source have no
    checksums: headers are compared with file sizes.
    """
    manifest, listing, files = None, path / MANIFEST, [path]
    try:
        if listing.exists():
            manifest = Manifest.from_bytes(read_small(listing), listing)
            files = [path / check_file_name(name, listing) for name in manifest.files]
            yield listing, []
        elif path.is_dir():
            files = [path / name for name in foreign_files(path)]
    except (CheckpointError, OSError) as error:
        yield listing, [str(error)]
        return
    for file in files:
        yield file, list(_damages_of(file, manifest))


def _damages_of(path: Path, manifest: Manifest | None) -> Iterator[str]:
    """Every damage of a file, with file and tensor."""
    try:
        if manifest is not None and path.suffix == ".json":
            check_index(path, manifest.files[path.name])
            return
        _, found = read_head(path, manifest)
    except (CheckpointError, OSError) as error:
        yield str(error)
        return
    for name, entry in found.items():
        try:
            written = None if manifest is None else manifest.crc_of(name)
            check_crc(f"{path}: {name}", _crc_of(path, entry), written)
        except (CheckpointError, OSError) as error:
            yield str(error)


def _crc_of(path: Path, entry: TensorEntry) -> int:
    """CRC-32 of the bytes of a tensor, in the memory of one chunk."""
    rest, crc = entry.nbytes, 0
    buffer = memoryview(bytearray(min(_CHUNK_NBYTES, rest)))
    with path.open("rb") as file:
        file.seek(entry.begin)
        while rest:
            chunk = buffer[:rest]
            if file.readinto(chunk) < len(chunk):
                raise CheckpointError(f"{path}: damaged: it was truncated while it was read")
            crc = crc32(chunk, crc)
            rest -= len(chunk)
    return crc


if __name__ == "__main__":
    sys.exit(main())
