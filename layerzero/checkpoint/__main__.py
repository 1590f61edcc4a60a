"""python -m layerzero.checkpoint: inspects and verifies checkpoints in one process.

Exit status: 0 for success; 1 if something is damaged; 2 for a bad command or if there is no
checkpoint; 130 if interrupted. An error is one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from layerzero.checkpoint.format.crc import crc32
from layerzero.checkpoint.format.folder import (
    MANIFEST,
    committed_steps,
    leftovers,
    read_small,
    resolve,
)
from layerzero.checkpoint.format.inventory import MODEL, OPTIMIZER, split_state_name
from layerzero.checkpoint.format.manifest import Manifest, check_file_name
from layerzero.checkpoint.format.safetensors_file import TensorEntry
from layerzero.checkpoint.source import (
    Location,
    Source,
    check_crc,
    check_index,
    foreign_files,
    open_source,
    read_head,
)
from layerzero.state_dict.dtype_names import dtype_name
from layerzero.state_dict.errors import CheckpointError
from layerzero.state_dict.json_codec import decode

CHUNK_NBYTES = 8 << 20
"""Bytes of a tensor held in memory at a time."""
_PROGRAM = "python -m layerzero.checkpoint"
_LINE_CHARS, _VALUE_CHARS = 160, 300
"""Longest dict that `inspect` puts on one line; longest value, which is cut there."""


class _Refused(Exception):
    """The command cannot run on the given paths or options (exit status 2)."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Without this, Python's flush at exit would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except _Refused as error:
        return _fail(str(error), 2)
    except (CheckpointError, OSError) as error:
        return _fail(str(error), 1)


def _fail(reason: str, status: int) -> int:
    print(f"{_PROGRAM}: error: {reason}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Inspect and verify checkpoints of layerzero, and folders or files of "
        "safetensors from elsewhere. Needs no ranks and no model.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="inspect|verify")
    path = argparse.ArgumentParser(add_help=False)
    path.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a checkpoint's folder, a folder of checkpoints (means the latest one), a folder of "
        "safetensors, or one such file",
    )

    one = commands.add_parser(
        "inspect", parents=[path], help="show the contents", allow_abbrev=False
    )
    one.add_argument("--tensors", action="store_true", help="also list every tensor")
    one.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    one.set_defaults(run=_inspect)

    one = commands.add_parser(
        "verify",
        parents=[path],
        help="read every byte and compare it with the checksums; status 1 if any is damaged",
        allow_abbrev=False,
    )
    one.add_argument("--all", action="store_true", help="verify every checkpoint in the folder")
    one.set_defaults(run=_verify)
    return parser


def _resolve(path: Path) -> Path:
    try:
        return resolve(path)
    except CheckpointError as error:
        raise _Refused(str(error)) from error


# inspect --------------------------------------------------------------------------------------


def _inspect(options: argparse.Namespace) -> int:
    found = _describe(options.path, _resolve(options.path), options.tensors)
    for line in [json.dumps(found, indent=1)] if options.json else _outline(found):
        print(line)
    return 1 if "error" in found["checkpoint"] else 0


def _describe(path: Path, chosen: Path, with_tensors: bool) -> dict[str, Any]:
    """The checkpoint or weights at `path` as JSON; of a folder of checkpoints, the latest.

    Reads only the manifest and file headers. Values in the manifest stay encoded; `decode` reads
    them. In a folder, whose other members may be intact, damage is part of the description.
    """
    if chosen == path:
        return {"path": str(path), "checkpoint": _describe_one(path, with_tensors)}
    checkpoints = [
        {"name": step.name, "latest": step == chosen, **_summary(step)}
        for step in committed_steps(path).values()
    ]
    left = [{"name": each.name, "nbytes": _nbytes_of(each)} for each in leftovers(path)]
    try:
        latest = _describe_one(chosen, with_tensors)
    except (CheckpointError, OSError) as error:
        latest = {"path": str(chosen), "error": str(error)}
    return {
        "path": str(path),
        "checkpoints": checkpoints,
        "leftovers": left,
        "checkpoint": latest,
    }


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


def _describe_one(path: Path, with_tensors: bool) -> dict[str, Any]:
    source = open_source(path)
    manifest = source.manifest
    files = sorted({p.file for places in source.tensors.values() for p in places.values()})
    found: dict[str, Any] = {
        "path": str(source.folder),
        "checksums": manifest is not None,
        "files": {name: (source.folder / name).stat().st_size for name in files},
        "model": _totals(source.tensors[MODEL].values()),
        "aliases": dict(source.aliases),
    }
    if manifest is not None:
        optimizers = {
            name: _describe_groups(source, manifest, groups)
            for name, groups in manifest.groups_of_optimizers().items()
        }
        found |= {
            "step": manifest.step,
            "world_size": manifest.world_size,
            "optimizer": optimizers.pop("", None),
            **({"optimizers": optimizers} if optimizers else {}),
            "scheduler": manifest.scheduler,
            "extra": manifest.extras,
            "extra_states": sorted(manifest.extra_states),
        }
    if with_tensors:
        found["tensors"] = [
            {
                "kind": kind,
                "name": name,
                "dtype": dtype_name(place.entry.dtype, name),
                "shape": list(place.entry.shape),
                "file": place.file,
                "offset": place.entry.begin,
                "nbytes": place.entry.nbytes,
                "crc32": place.crc,
            }
            for kind, places in source.tensors.items()
            for name, place in places.items()
        ]
    return found


def _describe_groups(
    source: Source, manifest: Manifest, groups: list[dict[str, Any]]
) -> dict[str, Any]:
    members = {name for group in groups for name in group["params"]}
    by_key: dict[str, list[Location]] = {}
    for name, place in source.tensors[OPTIMIZER].items():
        parameter, key = split_state_name(name)
        if parameter in members:
            by_key.setdefault(key, []).append(place)
    values = (each for name, each in manifest.optimizer_values.items() if name in members)
    return {
        "groups": [
            {"num_parameters": len(group["params"]), "options": group["options"]}
            for group in groups
        ],
        "state": {key: _totals(places) for key, places in by_key.items()},
        "values": sorted({key for each in values for key in each}),
    }


def _totals(places: Iterable[Location]) -> dict[str, Any]:
    total = {"num_tensors": 0, "num_elements": 0, "nbytes": 0}
    dtypes: dict[str, dict[str, int]] = {}
    for place in places:
        own = dtypes.setdefault(dtype_name(place.entry.dtype, place.file), dict.fromkeys(total, 0))
        for each in (total, own):
            each["num_tensors"] += 1
            each["num_elements"] += place.entry.numel
            each["nbytes"] += place.entry.nbytes
    return {**total, "dtypes": dtypes}


def _nbytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _outline(found: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Lines for what `_describe` returned; an object that fits on a line takes one."""
    for key, value in found.items():
        text = _brief(value)
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            rows = {f"{key} {number}": row for number, row in enumerate(value)}
            yield from _outline(rows, indent)
        elif isinstance(value, dict) and len(text) > _LINE_CHARS:
            yield f"{indent}{key}:"
            yield from _outline(value, indent + "  ")
        else:
            yield f"{indent}{key}: {text}"


def _brief(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict) and not any(key.startswith("$") for key in value):
        return "{" + ", ".join(f"{key} {_brief(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        text = f"[{', '.join(map(_brief, value))}]"
    else:
        found = decode(value)
        if isinstance(found, (torch.Tensor, np.ndarray)) and found.ndim:
            return f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)}"
        text = str(found.item() if isinstance(found, torch.Tensor) else found)
    return text if len(text) <= _VALUE_CHARS else text[: _VALUE_CHARS - 3] + "..."


def _size_text(nbytes: int) -> str:
    """Such as '4.9 MB'."""
    size, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.{int(units[0] != 'B')}f} {units[0]}"


def _count_text(number: int, noun: str) -> str:
    """Such as '1 tensor', '2 tensors'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# verify ---------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """What `verify` found in one file."""

    path: Path
    nbytes: int
    """Bytes read."""
    num_tensors: int
    damages: list[str]
    """Every damage, with file and tensor; empty if the file is intact."""


def verify(path: Path) -> Iterator[Finding]:
    """Read every byte of what `resolve` returned, file by file, in the memory of one chunk.

    `load` raises at the first damage; this lists all of it. Weights from another source have no
    checksums: headers are compared with file sizes.
    """
    if path.is_file():
        yield _verify_file(path, None)
        return
    manifest, listing = None, path / MANIFEST
    try:
        if listing.exists():
            text = read_small(listing)
            manifest = Manifest.from_bytes(text, listing)
            names = [check_file_name(name, listing) for name in manifest.files]
            yield Finding(listing, len(text), 0, [])
        else:
            names = foreign_files(path)
    except (CheckpointError, OSError) as error:
        yield Finding(listing, 0, 0, [str(error)])
        return
    for name in names:
        yield _verify_file(path / name, manifest)


def _verify_file(path: Path, manifest: Manifest | None) -> Finding:
    crcs: dict[str, int] = {}
    try:
        if manifest is not None and path.suffix == ".json":
            check_index(path, manifest.files[path.name])
            return Finding(path, path.stat().st_size, 0, [])
        head, found = read_head(path, manifest)
    except (CheckpointError, OSError) as error:
        return Finding(path, 0, 0, [str(error)])
    for each in () if manifest is None else manifest.tensors.values():
        crcs |= each
    nbytes, damages = len(head), []
    for name, entry in found.items():
        try:
            crc = _crc_of(path, entry)
            check_crc(f"{path}: {name}", crc, crcs.get(name))
            nbytes += entry.nbytes
        except (CheckpointError, OSError) as error:
            damages.append(str(error))
    return Finding(path, nbytes, len(found), damages)


def _crc_of(path: Path, entry: TensorEntry) -> int:
    """CRC-32 of the bytes of a tensor, in the memory of one chunk."""
    rest, crc = entry.nbytes, 0
    buffer = memoryview(bytearray(min(CHUNK_NBYTES, rest)))
    with path.open("rb") as file:
        file.seek(entry.begin)
        while rest:
            chunk = buffer[:rest]
            if file.readinto(chunk) < len(chunk):
                raise CheckpointError(f"{path}: damaged: it was truncated while it was read")
            crc = crc32(chunk, crc)
            rest -= len(chunk)
    return crc


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
    num_files = num_bad = nbytes = 0
    for found in verify(path):
        num_files += 1
        num_bad += bool(found.damages)
        nbytes += found.nbytes
        for damage in found.damages:
            print(f"  DAMAGED  {damage}", flush=True)
        if not found.damages:
            tensors = f", {_count_text(found.num_tensors, 'tensor')}" if found.num_tensors else ""
            print(f"  OK       {found.path.name}  {_size_text(found.nbytes)}{tensors}", flush=True)
    is_ours = (path / MANIFEST).exists()
    if num_bad:
        print(f"  damaged: {num_bad} of {_count_text(num_files, 'file')}")
        return 1
    if is_ours:
        known = {MANIFEST, *Manifest.from_bytes(read_small(path / MANIFEST), path).files}
        for name in sorted({each.name for each in path.iterdir()} - known):
            print(f"  not part of the checkpoint, never opened: {name}")
    kind = "" if is_ours else "; without checkpoint.json only sizes and headers can be checked"
    print(f"  OK: {_count_text(num_files, 'file')}, {_size_text(nbytes)}{kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
