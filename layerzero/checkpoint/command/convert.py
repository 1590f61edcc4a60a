"""The weights of a checkpoint as a folder of their own, as `save_pretrained` would write it.

One process, no model, no rank: tensor by tensor, large ones in chunks, compared with their
checksums while they are read. A checkpoint's own `model*.safetensors` are such files already; this
casts, selects, renames and cuts them anew.
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
from layerzero.checkpoint.format.folder import sync_folder, write_durably
from layerzero.checkpoint.format.inventory import MODEL
from layerzero.checkpoint.source import Place, Source
from layerzero.state_dict.errors import CheckpointError, some


@dataclass(frozen=True)
class _Weight:
    """A tensor that is written, and where it comes from."""

    name: str
    aliases: tuple[str, ...]
    """Both as they are written."""
    saved_name: str
    place: Place
    dtype: torch.dtype

    @property
    def is_cast(self) -> bool:
        return self.dtype != self.place.entry.dtype


@dataclass(frozen=True)
class Converted:
    """What was written."""

    num_tensors: int
    num_cast: int
    files: list[str]
    nbytes: int
    """Of all files."""


def convert(
    source: Source,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_nbytes: int = 5 * 10**9,
    only: Sequence[str] = ("*",),
    strip_prefix: str = "",
) -> Converted:
    """Write `out`: complete and on the disk, or not there at all.

    Args:
        out: must not exist. It is written beside, as `.writing-...`, and renamed.
        dtype: of floating-point tensors; None: as saved. Others stay what they are.
        max_file_nbytes: tensors in a file; a larger tensor gets a file of its own.
        only: shell patterns of names. A tied weight is taken if any of its names is wanted, and
            written under the wanted ones.
        strip_prefix: left out of every name.

    Raises:
        ValueError: no tensor has such a name, or one is without the prefix.
        CheckpointError: a tensor is damaged; a finite value is infinite in `dtype`.
        FileExistsError: `out` is there.
        OSError: the disk is full, and so on.
    """
    weights = _select(source, only, strip_prefix, dtype)
    if os.path.lexists(out):
        raise FileExistsError(f"{out}: exists already; give a folder to make, or remove it")
    announced = [
        Announcement(MODEL, w.name, w.aliases, w.dtype, w.place.entry.shape, (number,), True)
        for number, w in enumerate(weights)
    ]
    plan = plan_files(MODEL, announced, max_file_nbytes)
    by_name = {weight.name: weight for weight in weights}
    # The process number, so that two that write the same at a time do not meet before the rename.
    partial = out.parent / f".writing-{out.name}-{os.getpid()}"
    partial.mkdir(parents=True)
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
                    f"{source.folder}: cannot leave {strip_prefix!r} out of {some(wanted)}; "
                    "select the tensors that have it"
                )
            saved = place.entry.dtype
            written = dtype if dtype is not None and saved.is_floating_point else saved
            weights.append(_Weight(bare[0], tuple(bare[1:]), name, place, written))
    if not weights:
        raise ValueError(
            f"{source.folder}: no tensor is called {' or '.join(only)}; there are "
            f"{some(list(tensors))}"
        )
    return weights


def _write(plan: FilePlan, folder: Path, copy: Callable[[str, BinaryIO], None]) -> None:
    for planned in plan.files:
        with (folder / planned.name).open("xb") as file:
            file.write(planned.head)
            for name, entry in planned.tensors.items():
                copy(name, file)
                assert file.tell() == entry.end, "tensors lie one behind the other, as planned"
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
    # Only here is it known that these are the saved values, and not damage.
    if largest:
        raise CheckpointError(
            f"{folder / weight.place.file}: {weight.saved_name}: {largest:.6g} does not fit "
            f"{written}; convert to a dtype with a wider range"
        )
