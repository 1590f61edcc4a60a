"""Formats the description of a checkpoint as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from layerzero.state_dict.json_codec import decode

_LABEL_WIDTH = 12
_MAX_VALUE_CHARS = 48


def report(description: Mapping[str, Any]) -> Iterator[str]:
    """Lines for what `describe` returned."""
    if "checkpoints" in description:
        yield description["path"]
        yield from _listing(description)
        yield ""
    checkpoint = description["checkpoint"]
    yield checkpoint["path"]
    if "error" in checkpoint:
        yield f"  damaged: {checkpoint['error']}"
        return
    for label, lines in _sections(checkpoint):
        for line in lines:
            yield f"  {label:{_LABEL_WIDTH}}{line}"
            label = ""
    if "tensors" in checkpoint:
        yield ""
        yield from _tensors(checkpoint["tensors"])


def size_text(nbytes: int) -> str:
    """Such as '4.9 MB'."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size = nbytes / 1000
    for unit in ("kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def count_text(number: int, noun: str) -> str:
    """Such as '1 tensor', '2 tensors'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _listing(description: Mapping[str, Any]) -> Iterator[str]:
    rows = [["checkpoint", "size", "ranks", "written (UTC)", ""]]
    for each in description["checkpoints"]:
        latest = "latest" if each["latest"] else ""
        if "error" in each:
            rows.append([each["name"], "", "", "", f"{latest} damaged: {each['error']}".strip()])
        else:
            written = each["written"][:19].replace("T", " ")
            ranks = str(each["world_size"])
            rows.append([each["name"], size_text(each["nbytes"]), ranks, written, latest])
    for each in description["leftovers"]:
        note = "being written, or left by a killed run"
        rows.append([each["name"], size_text(each["nbytes"]), "", "", note])
    yield from _table(rows, right=(1, 2))


def _sections(found: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    if found["checksums"]:
        yield "step", [f"{found['step']}, written by {count_text(found['world_size'], 'rank')}"]
    else:
        yield "source", ["safetensors without checkpoint.json: no step, no checksums"]
    tied = [f"{alias} is {kept}" for alias, kept in found["aliases"].items()]
    yield "model", [_totals(found["model"]), *tied]
    if found.get("optimizer"):
        yield "optimizer", list(_optimizer(found["optimizer"]))
    for name, each in found.get("optimizers", {}).items():
        yield "optimizer", [f"{name}: {line}" for line in _optimizer(each)]
    if found.get("scheduler") is not None:
        yield "scheduler", [_items(decode(found["scheduler"]))]
    if found.get("extra"):
        yield "extra", list(_extra(found["extra"]))
    if found.get("extra_states"):
        yield "extra states", found["extra_states"]
    yield "files", [f"{name}  {size_text(nbytes)}" for name, nbytes in found["files"].items()]


def _optimizer(found: Mapping[str, Any]) -> Iterator[str]:
    for number, group in enumerate(found["groups"]):
        # Options that are None or False are left out: optimizers have many of them.
        set_ones = {k: v for k, v in group["options"].items() if v is not None and v is not False}
        options = _items({key: decode(value) for key, value in set_ones.items()})
        yield f"group {number}: {count_text(group['num_parameters'], 'parameter')}; {options}"
    for key, totals in found["state"].items():
        yield f"{key}: {_totals(totals)}"
    for key in found["values"]:
        yield f"{key}: values"


def _extra(extras: list[Any]) -> Iterator[str]:
    if len(extras) == 1:
        if extras[0] is not None:
            yield f"the same on all ranks: {_items(decode(extras[0]))}"
        return
    yield f"one for each of {len(extras)} ranks; the first: {_items(decode(extras[0]))}"


def _totals(totals: Mapping[str, Any]) -> str:
    dtypes = totals["dtypes"]
    parts = [f"{name} {size_text(own['nbytes'])}" for name, own in dtypes.items()]
    listed = ", ".join(parts) if len(parts) > 1 else "".join(dtypes)
    return (
        f"{count_text(totals['num_tensors'], 'tensor')}, {totals['num_elements']:,} elements, "
        f"{size_text(totals['nbytes'])} ({listed or 'nothing'})"
    )


def _tensors(tensors: list[Mapping[str, Any]]) -> Iterator[str]:
    rows = [["tensor", "dtype", "shape", "bytes", "file"]]
    rows += [
        [each["name"], each["dtype"], str(each["shape"]), str(each["nbytes"]), each["file"]]
        for each in tensors
    ]
    yield from _table(rows, right=(3,))


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
        return _value(value)
    return ", ".join(f"{key} {_value(item)}" for key, item in value.items()) or "empty"


def _value(value: Any) -> str:
    """A short value as it is; for others, type and shape or length, or the beginning."""
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim:
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, torch.Tensor):
        value = value.item()
    text = repr(value)
    if len(text) <= _MAX_VALUE_CHARS:
        return text
    if isinstance(value, (list, tuple, set, dict)):
        return f"({type(value).__name__} of {len(value)})"
    return text[: _MAX_VALUE_CHARS - 3] + "..."
