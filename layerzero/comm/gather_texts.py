"""Exchanges short texts between ranks, for errors and warnings; too slow for every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerzero.comm.collectives import gather_small
from layerzero.comm.pending import Operation
from layerzero.flat.placement import ShardGroup

MAX_NBYTES = 1000
"""Limit on the UTF-8 bytes of one text; longer texts are truncated."""


def gather_texts(
    text: str | None, rank: int, groups: Sequence[ShardGroup], device: torch.device, what: str
) -> dict[int, str]:
    """Gather the texts of all ranks that have one: {global rank: text}, in rank order.

    Collective over each group; blocks the host. If no rank has a text, the only traffic is two
    integers a rank.

    Args:
        text: this rank's text; None if it has none.
        rank: this rank's global number.
        groups: groups that together connect all ranks that take part.
        what: the subject, which the error names if a rank does not take part.
    """
    flags = _gather(torch.tensor([rank, text is not None], device=device), groups, what)
    speakers = sorted(number for number, has_text in flags.view(-1, 2).tolist() if has_text)
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
            values = gather_small(values, group, Operation("exchange", what, 0))
    return values
