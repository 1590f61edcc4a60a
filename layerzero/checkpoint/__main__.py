"""python -m layerzero.checkpoint: inspects, verifies and converts checkpoints in one process.

Exit status: 0 for success; 1 if something is damaged or cannot be written; 2 for a bad command or
if there is no checkpoint; 130 if interrupted. An error is one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from layerzero.checkpoint.file_io.direct_io import bytes_of
from layerzero.checkpoint.format.crc import crc32
from layerzero.checkpoint.format.file_plan import Announcement, plan_files
from layerzero.checkpoint.format.folder import (
    FILE_MODE,
    MANIFEST,
    committed_steps,
    leftovers,
    make_durably,
    read_small,
    resolve,
    sync_folder,
    write_durably,
)
from layerzero.checkpoint.format.inventory import MODEL, OPTIMIZER, split_state_name
from layerzero.checkpoint.format.manifest import Manifest, check_file_name
from layerzero.checkpoint.source import (
    Location,
    Source,
    check_crc,
    check_head,
    check_index,
    check_size,
    foreign_files,
    open_source,
    read_head,
)
from layerzero.config import parse_nbytes
from layerzero.state_dict.dtype_names import dtype_name
from layerzero.state_dict.errors import CheckpointError, some
from layerzero.state_dict.json_codec import decode

CHUNK_NBYTES = 8 << 20
"""Bytes of a tensor held in memory at a time; a multiple of every element size."""
_PROGRAM = "python -m layerzero.checkpoint"
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_LABEL_WIDTH = 12
_MAX_VALUE_CHARS = 48


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
        description="Inspect, verify and convert checkpoints of layerzero, and folders or files of "
        "safetensors from elsewhere. Needs no ranks and no model.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="inspect|verify|convert")
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

    one = commands.add_parser(
        "convert",
        parents=[path],
        help="write the weights to a separate folder, for transformers and others",
        description="Write the weights, verified while they are read, as OUT/model.safetensors, or "
        "as several files and model.safetensors.index.json. OUT appears when it is complete. A "
        "checkpoint does not contain a model's configuration and tokenizer: add their files.",
        allow_abbrev=False,
    )
    one.add_argument("out", type=Path, metavar="OUT", help="folder to create; must not exist")
    one.add_argument(
        "--dtype", choices=_DTYPES, help="cast floating-point tensors to it (default: as saved)"
    )
    one.add_argument(
        "--max-file-size", type=_nbytes, default="5GB", metavar="SIZE", help="default: %(default)s"
    )
    one.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        metavar="NAME",
        help="tensors to convert, as shell patterns such as 'encoder.*' (default: all)",
    )
    one.add_argument(
        "--strip-prefix",
        default="",
        metavar="PREFIX",
        help="remove it from all names, e.g. 'model.'",
    )
    one.set_defaults(run=_convert)
    return parser


def _nbytes(text: str) -> int:
    try:
        return parse_nbytes(text, "SIZE")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _resolve(path: Path) -> Path:
    try:
        return resolve(path)
    except CheckpointError as error:
        raise _Refused(str(error)) from error


# inspect --------------------------------------------------------------------------------------


def _inspect(options: argparse.Namespace) -> int:
    found = _describe(options.path, _resolve(options.path), options.tensors)
    for line in [json.dumps(found, indent=1)] if options.json else _report(found):
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


def _report(description: Mapping[str, Any]) -> Iterator[str]:
    """Lines for what `_describe` returned."""
    if "checkpoints" in description:
        yield description["path"]
        yield from _listing(description)
        yield ""
    checkpoint = description["checkpoint"]
    yield checkpoint["path"]
    if "error" in checkpoint:
        yield f"  damaged: {checkpoint['error']}"
        return
    label = ""
    for name, line in _lines(checkpoint):
        yield f"  {'' if name == label else name:{_LABEL_WIDTH}}{line}"
        label = name
    if "tensors" in checkpoint:
        yield ""
        rows = [["tensor", "dtype", "shape", "bytes", "file"]]
        rows += [
            [each["name"], each["dtype"], str(each["shape"]), str(each["nbytes"]), each["file"]]
            for each in checkpoint["tensors"]
        ]
        yield from _table(rows, right=(3,))


def _listing(description: Mapping[str, Any]) -> Iterator[str]:
    rows = [["checkpoint", "size", "ranks", "written (UTC)", ""]]
    for each in description["checkpoints"]:
        latest = "latest" if each["latest"] else ""
        if "error" in each:
            rows.append([each["name"], "", "", "", f"{latest} damaged: {each['error']}".strip()])
        else:
            written = each["written"][:19].replace("T", " ")
            ranks = str(each["world_size"])
            rows.append([each["name"], _size_text(each["nbytes"]), ranks, written, latest])
    for each in description["leftovers"]:
        note = "being written, or left by a killed run"
        rows.append([each["name"], _size_text(each["nbytes"]), "", "", note])
    yield from _table(rows, right=(1, 2))


def _lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(label, line)."""
    if found["checksums"]:
        yield "step", f"{found['step']}, written by {_count_text(found['world_size'], 'rank')}"
    else:
        yield "source", "safetensors without checkpoint.json: no step, no checksums"
    yield "model", _totals_text(found["model"])
    for alias, kept in found["aliases"].items():
        yield "model", f"{alias} is {kept}"
    if found.get("optimizer"):
        for line in _optimizer_lines(found["optimizer"]):
            yield "optimizer", line
    for name, each in found.get("optimizers", {}).items():
        for line in _optimizer_lines(each):
            yield "optimizer", f"{name}: {line}"
    if found.get("scheduler") is not None:
        yield "scheduler", _items(decode(found["scheduler"]))
    extras = found.get("extra") or [None]
    if len(extras) > 1:
        first = _items(decode(extras[0]))
        yield "extra", f"one for each of {len(extras)} ranks; the first: {first}"
    elif extras[0] is not None:
        yield "extra", f"the same on all ranks: {_items(decode(extras[0]))}"
    for name in found.get("extra_states", ()):
        yield "extra states", name
    for name, nbytes in found["files"].items():
        yield "files", f"{name}  {_size_text(nbytes)}"


def _optimizer_lines(found: Mapping[str, Any]) -> Iterator[str]:
    for number, group in enumerate(found["groups"]):
        # Options that are None or False are left out: optimizers have many of them.
        set_ones = {k: v for k, v in group["options"].items() if v is not None and v is not False}
        options = _items({key: decode(value) for key, value in set_ones.items()})
        yield f"group {number}: {_count_text(group['num_parameters'], 'parameter')}; {options}"
    for key, totals in found["state"].items():
        yield f"{key}: {_totals_text(totals)}"
    for key in found["values"]:
        yield f"{key}: values"


def _totals_text(totals: Mapping[str, Any]) -> str:
    dtypes = totals["dtypes"]
    parts = [f"{name} {_size_text(own['nbytes'])}" for name, own in dtypes.items()]
    listed = ", ".join(parts) if len(parts) > 1 else "".join(dtypes)
    return (
        f"{_count_text(totals['num_tensors'], 'tensor')}, {totals['num_elements']:,} elements, "
        f"{_size_text(totals['nbytes'])} ({listed or 'nothing'})"
    )


def _size_text(nbytes: int) -> str:
    """Such as '4.9 MB'."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size = nbytes / 1000
    for unit in ("kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _count_text(number: int, noun: str) -> str:
    """Such as '1 tensor', '2 tensors'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _table(rows: list[list[str]], right: tuple[int, ...]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()


def _items(value: Any) -> str:
    if not isinstance(value, dict):
        return _value_text(value)
    return ", ".join(f"{key} {_value_text(item)}" for key, item in value.items()) or "empty"


def _value_text(value: Any) -> str:
    """A short value as it is; for others, type and shape or length, or the beginning."""
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim:
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value.item() if isinstance(value, torch.Tensor) else value)
    if len(text) <= _MAX_VALUE_CHARS:
        return text
    if isinstance(value, (list, tuple, set, dict)):
        return f"({type(value).__name__} of {len(value)})"
    return text[: _MAX_VALUE_CHARS - 3] + "..."


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
        if manifest is not None:
            check_size(path, manifest.files[path.name])
            for each in manifest.tensors.values():
                crcs |= each
        head, found = read_head(path, is_ours=manifest is not None)
        if manifest is not None:
            check_head(path, head, found, manifest)
    except (CheckpointError, OSError) as error:
        return Finding(path, 0, 0, [str(error)])
    nbytes, damages = len(head), []
    for name, entry in found.items():
        try:
            for chunk in _chunks(path.parent, name, Location(path.name, entry, crcs.get(name))):
                nbytes += len(chunk)
        except (CheckpointError, OSError) as error:
            damages.append(str(error))
    return Finding(path, nbytes, len(found), damages)


def _chunks(folder: Path, name: str, place: Location) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in writable chunks of whole elements, each valid until the next.

    The data is verified only when the iterator ends, because the checksum covers the whole tensor.

    Raises:
        CheckpointError: the bytes are not those that were written, or the file is too short.
        OSError: the file cannot be read.
    """
    rest, crc = place.entry.nbytes, 0
    buffer = memoryview(bytearray(min(CHUNK_NBYTES, rest)))
    where = f"{folder / place.file}: {name}"
    with (folder / place.file).open("rb") as file:
        file.seek(place.entry.begin)
        while rest:
            chunk = buffer[:rest]
            if file.readinto(chunk) < len(chunk):
                raise CheckpointError(f"{where}: damaged: the file ends inside it")
            crc = crc32(chunk, crc)
            rest -= len(chunk)
            yield chunk
    check_crc(where, crc, place.crc)


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


# convert --------------------------------------------------------------------------------------


class _Weight(NamedTuple):
    """A tensor to write, and where it comes from."""

    name: str
    aliases: tuple[str, ...]
    """Name and aliases in the output."""
    saved_name: str
    place: Location
    dtype: torch.dtype

    @property
    def is_cast(self) -> bool:
        return self.dtype != self.place.entry.dtype


def _convert(options: argparse.Namespace) -> int:
    """Write the folder OUT; it appears complete and on the disk, or not at all."""
    source, out = open_source(_resolve(options.path), with_optimizer=False), options.out
    weights = _select(source, options)
    if os.path.lexists(out):
        raise _Refused(f"{out}: exists already; name another folder, or remove it")
    announced = [
        Announcement(MODEL, w.name, w.aliases, w.dtype, w.place.entry.shape, (number,), True)
        for number, w in enumerate(weights)
    ]
    plan = plan_files(MODEL, announced, options.max_file_size)
    by_name = {weight.name: weight for weight in weights}
    # The process id keeps two processes that write the same folder apart until the rename.
    partial = out.parent / f".writing-{out.name}-{os.getpid()}"
    make_durably(partial)
    try:
        for planned in plan.files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(partial / planned.name, flags, FILE_MODE), "wb") as file:
                file.write(planned.head)
                for name, entry in planned.tensors.items():
                    _copy(source.folder, by_name[name], file)
                    assert file.tell() == entry.end, "tensors follow each other without gaps"
                file.flush()
                os.fsync(file.fileno())
        if plan.index is not None:
            write_durably(partial / plan.index_name, plan.index)
        sync_folder(partial)
        os.rename(partial, out)
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    num_cast = sum(weight.is_cast for weight in weights)
    cast = f", {num_cast} of them cast to {options.dtype}" if options.dtype else ""
    nbytes = sum(file.nbytes for file in plan.files)
    print(
        f"{out}: {_count_text(len(weights), 'tensor')}{cast}, {_size_text(nbytes)} in "
        f"{_count_text(len(plan.files), 'file')}"
    )
    return 0


def _select(source: Source, options: argparse.Namespace) -> list[_Weight]:
    """The tensors to write. A tied one is written under those of its names that match."""
    tied: dict[str, list[str]] = {}
    for alias, kept in source.aliases.items():
        tied.setdefault(kept, []).append(alias)
    weights, prefix = [], options.strip_prefix
    for name, place in source.tensors[MODEL].items():
        wanted = [
            each
            for each in (name, *tied.get(name, ()))
            if any(fnmatchcase(each, pattern) for pattern in options.only)
        ]
        bare = [each.removeprefix(prefix) for each in wanted]
        if prefix and any(not b or b == w for b, w in zip(bare, wanted, strict=True)):
            raise _Refused(
                f"{source.folder}: the prefix {prefix!r} is not part of {some(wanted)}; select "
                "only tensors that have it"
            )
        dtype = place.entry.dtype
        if options.dtype and dtype.is_floating_point:
            dtype = getattr(torch, options.dtype)
        if wanted:
            weights.append(_Weight(bare[0], tuple(bare[1:]), name, place, dtype))
    if not weights:
        raise _Refused(
            f"{source.folder}: no tensor matches {' or '.join(options.only)}; the folder has "
            f"{some(list(source.tensors[MODEL]))}"
        )
    return weights


def _copy(folder: Path, weight: _Weight, file: BinaryIO) -> None:
    saved, written = weight.place.entry.dtype, weight.dtype
    may_overflow = weight.is_cast and torch.finfo(written).max < torch.finfo(saved).max
    largest = 0.0
    for chunk in _chunks(folder, weight.saved_name, weight.place):
        if not weight.is_cast:
            file.write(chunk)
            continue
        values = torch.frombuffer(chunk, dtype=saved)
        cast = values.to(written)
        if may_overflow and not torch.equal(cast.isfinite(), values.isfinite()):
            largest = max(largest, float(values[values.isfinite()].abs().max()))
        file.write(bytes_of(cast))
    # Raised after the loop, where the checksum has proved that these are the saved values.
    if largest:
        raise CheckpointError(
            f"{folder / weight.place.file}: {weight.saved_name}: {largest:.6g} does not fit "
            f"{written}; convert to a dtype with a wider range"
        )


if __name__ == "__main__":
    sys.exit(main())
