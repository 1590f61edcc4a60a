"""Lays out tensors in files. Every rank computes the same layout from all announcements."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from layerzero.checkpoint.format.inventory import Entry, split_state_name
from layerzero.checkpoint.format.safetensors_file import TensorEntry, make_head
from layerzero.errors import CheckpointError
from layerzero.state_dict.dtype_names import DTYPES, dtype_name


class Announcement(NamedTuple):
    """Describes a tensor of the checkpoint; sent by the rank that has its first element."""

    kind: str
    name: str
    aliases: Sequence[str]
    dtype_name: str
    """As safetensors files have it."""
    shape: Sequence[int]
    order: Sequence[int]
    is_whole: bool

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class PlannedFile(NamedTuple):
    name: str
    head: bytes
    """What is before the first tensor; of an index, which has no tensors, all of it."""
    tensors: dict[str, TensorEntry]
    nbytes: int


def index_name(kind: str) -> str:
    return f"{kind}.safetensors.index.json"


def announce(entries: Iterable[Entry]) -> list[Announcement]:
    return [
        Announcement(
            *(entry.kind, entry.name, entry.aliases, dtype_name(entry.tensor.dtype, entry.name)),
            *(entry.extent.shape, entry.order, entry.is_whole),
        )
        for entry in entries
        if entry.announces
    ]


def merge(
    announced: Sequence[Sequence[Sequence[Any]]],
) -> tuple[list[Announcement], dict[tuple[str, str], int]]:
    """All tensors of the checkpoint; and the writing rank of each that several ranks have whole.
    `announced`: the result of `announce` of each rank, as JSON has it."""
    found: dict[tuple[str, str], Announcement] = {}
    writers: dict[tuple[str, str], int] = {}
    for rank, rows in enumerate(announced):
        for new in (Announcement(*row) for row in rows):
            key = new.kind, new.name
            old = found.setdefault(key, new)
            if (old.dtype, old.shape, old.is_whole) != (new.dtype, new.shape, new.is_whole):
                raise CheckpointError(
                    f"{new.name} is {old.dtype} of shape {old.shape} (whole: {old.is_whole}) on "
                    f"one rank, {new.dtype} of shape {new.shape} (whole: {new.is_whole}) on another"
                )
            if new.is_whole:
                writers.setdefault(key, rank)
    return list(found.values()), writers


def plan_files(
    kind: str, announced: Iterable[Announcement], max_file_nbytes: int
) -> list[PlannedFile]:
    """Lay out all tensors of one kind in files of at most `max_file_nbytes` of tensor bytes.

    A larger tensor gets a file of its own. The last of several files is their index, which maps
    tensors to files.
    """
    tensors = sorted((each for each in announced if each.kind == kind), key=_place)
    groups: list[list[Announcement]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > max_file_nbytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    files = []
    for number, group in enumerate(groups, 1):
        name = f"{kind}.safetensors"
        if len(groups) > 1:
            name = f"{kind}-{number:05d}-of-{len(groups):05d}.safetensors"
        # transformers requires "format"; aliases are stored as the safetensors library does.
        metadata = {"format": "pt"} | {a: each.name for each in group for a in each.aliases}
        described = [(each.name, each.dtype, each.shape) for each in group]
        head, entries = make_head(described, metadata)
        nbytes = len(head) + sum(entry.nbytes for entry in entries.values())
        files.append(PlannedFile(name, head, entries, nbytes))
    if len(files) > 1:
        index = json.dumps(
            {
                "metadata": {"total_size": sum(each.nbytes for each in tensors)},
                "weight_map": {name: file.name for file in files for name in file.tensors},
            },
            indent=1,
        ).encode()
        files.append(PlannedFile(index_name(kind), index, {}, len(index)))
    return files


def _place(tensor: Announcement) -> tuple[int, str, Sequence[int], str]:
    """Sort key: wide dtypes first, so that every tensor is aligned; then the order on ranks.

    The latter makes a rank's shards adjacent in the file.
    """
    state = "" if tensor.kind == "model" else split_state_name(tensor.name)[1]
    return (-tensor.dtype.itemsize, state, tensor.order, tensor.name)
