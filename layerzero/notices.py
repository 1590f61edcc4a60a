"""Warnings to the user: each is given once, by one rank; and how messages list names and rows."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Container, Iterable, Sequence

import torch.distributed as dist

_PASSED_OVER = {
    *("layerzero", "torch", "contextlib"),
    *("lightning", "pytorch_lightning", "transformers", "accelerate", "megatron"),
}
"""Packages between the user's line and a warning: those that call the engine for the user."""

_issued: set[str] = set()
"""Keys of warnings that this process has given, or left to the first rank."""


def some(names: Iterable[str]) -> str:
    """The first eight names, and the number of the others, for a message."""
    listed = list(names)
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return (", ".join(listed[:8]) or "nothing") + more


def some_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {some(map(str, ranks))}"


def columns(rows: Sequence[Sequence[str]], text: Container[int]) -> list[str]:
    """Rows as lines of aligned columns, text in those with these indices, numbers in the others."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in text else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def is_first_rank() -> bool:
    """Whether this process is rank 0 of the default group, or there is no default group."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def warn_once(message: str, key: str = "", *, is_first: bool | None = None) -> None:
    """Warn on one rank, and only the first time in this process. The warning shows the user's line.

    Args:
        key: identifies the warning, which is given once for each key; "": the message does.
        is_first: whether this rank warns, such as the first of a model's ranks; None: rank 0 of
            the default group does.
    """
    key = key or message
    if key in _issued:
        return
    _issued.add(key)
    if is_first_rank() if is_first is None else is_first:
        warnings.warn(message, stacklevel=_users_level())


def _users_level() -> int:
    """The `stacklevel` with which `warnings.warn` in the calling function shows the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in _PASSED_OVER:
        level, frame = level + 1, frame.f_back
    return level
