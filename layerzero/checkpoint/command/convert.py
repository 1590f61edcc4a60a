"""Exports the weights of a checkpoint to a folder like that of `save_pretrained`.

Runs in one process without a model. Copies tensor by tensor, large ones in chunks, and verifies
checksums while reading. A checkpoint's own `model*.safetensors` are such files already; this casts,
selects, renames and splits them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

import torch

from layerzero.checkpoint.command.verified_read import read_verified
from layerzero.checkpoint.file_io.direct_io import bytes_of
from layerzero.checkpoint.format.file_plan import Announcement, FilePlan, plan_files
from layerzero.checkpoint.format.folder import FILE_MODE, make_durably, sync_folder, write_durably
from layerzero.checkpoint.format.inventory import MODEL
from layerzero.checkpoint.source import Location, Source
from layerzero.state_dict.errors import CheckpointError, some


@dataclass(frozen=True)
class _Weight:
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


@dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    num_tensors: int
    num_cast: int
    files: list[str]
    nbytes: int
    """Total size of the files."""


def convert(
    source: Source,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_nbytes: int = 5 * 10**9,
    only: Sequence[str] = ("*",),
    strip_prefix: str = "",
) -> Converted:
    """Write `out`; it appears complete and on the disk, or not at all.

    Args:
        out: must not exist. It is written as a sibling `.writing-...` folder, then renamed.
        dtype: dtype for floating-point tensors; None: as saved. Other tensors keep theirs.
        max_file_nbytes: largest number of tensor bytes in a file; a larger tensor gets a file of
            its own.
        only: shell patterns of names. A tied weight is taken if any of its names matches, and
            written under the names that match.
        strip_prefix: removed from every name.

    Raises:
        ValueError: no name matches `only`, or a matching name lacks the prefix.
        CheckpointError: a tensor is damaged, or a finite value overflows in `dtype`.
        FileExistsError: `out` exists.
        OSError: a file cannot be read or written, for example because the disk is full.
    """
    weights = _select(source, only, strip_prefix, dtype)
    if os.path.lexists(out):
        raise FileExistsError(f"{out}: exists already; name another folder, or remove it")
    announced = [
        Announcement(MODEL, w.name, w.aliases, w.dtype, w.place.entry.shape, (number,), True)
        for number, w in enumerate(weights)
    ]
    plan = plan_files(MODEL, announced, max_file_nbytes)
    by_name = {weight.name: weight for weight in weights}
    # The process id keeps two processes that write the same `out` apart until the rename.
    partial = out.parent / f".writing-{out.name}-{os.getpid()}"
    make_durably(partial)
    try:
        _write(plan, partial, lambda name, file: _copy(source.folder, by_name[name], file))
        sync_folder(partial)
        os.rename(partial, out)
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Converted(
        num_tensors=len(weights),
        num_cast=sum(weight.is_cast for weight in weights),
        files=[file.name for file in plan.files],
        nbytes=sum(file.nbytes for file in plan.files),
    )


def _select(
    source: Source, only: Sequence[str], strip_prefix: str, dtype: torch.dtype | None
) -> list[_Weight]:
    tied: dict[str, list[str]] = {}
    for alias, kept in source.aliases.items():
        tied.setdefault(kept, []).append(alias)
    tensors = source.tensors[MODEL]
    weights = []
    for name, place in tensors.items():
        wanted = [
            each
            for each in (name, *tied.get(name, ()))
            if any(fnmatchcase(each, pattern) for pattern in only)
        ]
        if wanted:
            bare = [each.removeprefix(strip_prefix) for each in wanted]
            if strip_prefix and any(not b or b == w for b, w in zip(bare, wanted, strict=True)):
                raise ValueError(
                    f"{source.folder}: the prefix {strip_prefix!r} is not part of {some(wanted)}; "
                    "select only tensors that have it"
                )
            saved = place.entry.dtype
            written = dtype if dtype is not None and saved.is_floating_point else saved
            weights.append(_Weight(bare[0], tuple(bare[1:]), name, place, written))
    if not weights:
        raise ValueError(
            f"{source.folder}: no tensor matches {' or '.join(only)}; the folder has "
            f"{some(list(tensors))}"
        )
    return weights


def _write(plan: FilePlan, folder: Path, copy: Callable[[str, BinaryIO], None]) -> None:
    for planned in plan.files:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(folder / planned.name, flags, FILE_MODE), "wb") as file:
            file.write(planned.head)
            for name, entry in planned.tensors.items():
                copy(name, file)
                assert file.tell() == entry.end, "tensors follow each other without gaps"
            file.flush()
            os.fsync(file.fileno())
    if plan.index is not None:
        write_durably(folder / plan.index_name, plan.index)


def _copy(folder: Path, weight: _Weight, file: BinaryIO) -> None:
    saved, written = weight.place.entry.dtype, weight.dtype
    may_overflow = weight.is_cast and torch.finfo(written).max < torch.finfo(saved).max
    largest = 0.0
    for chunk in read_verified(folder, weight.saved_name, weight.place):
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
