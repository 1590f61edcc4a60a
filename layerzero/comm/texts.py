"""What some ranks have to say, heard by all: for errors and warnings, not for steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerzero.comm.collectives import Operation, gather_small
from layerzero.core.groups import ShardGroup

MAX_NBYTES = 1000
"""Of a text; longer ones are cut."""


def gather_texts(
    text: str | None, rank: int, groups: Sequence[ShardGroup], device: torch.device, what: str
) -> dict[int, str]:
    """The texts of the ranks that have one, by rank, rising. Collective over the groups.

    One small exchange where nobody has one.

    Args:
        rank: this rank's global number.
        groups: axes of the ranks that talk.
        what: they talk about, for the error where a rank does not come.
    """
    flags = _gather(torch.tensor([rank, text is not None], device=device), groups, what)
    speakers = sorted(number for number, speaks in flags.view(-1, 2).tolist() if speaks)
    if not speakers:
        return {}
    data = (text or "").encode()[:MAX_NBYTES]
    row = [rank, len(data), *data.ljust(MAX_NBYTES, b" ")]
    rows = _gather(torch.tensor(row, device=device), groups, what).view(-1, len(row)).tolist()
    texts = {
        number: bytes(rest[:length]).decode(errors="replace") for number, length, *rest in rows
    }
    return {number: texts[number] for number in speakers}


def _gather(values: torch.Tensor, groups: Sequence[ShardGroup], what: str) -> torch.Tensor:
    for group in groups:
        if group.size > 1:
            values = gather_small(values, group, Operation("agreement", what, 0))
    return values
