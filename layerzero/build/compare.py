"""Compares ranks: what they are about to build, and then whether all could.

All that must be the same on every rank of a model is text, of which ranks exchange a hash. Only if
hashes differ, the first rank's text is sent, and each rank names its first difference.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from layerzero.build.materialize import Materializer
from layerzero.comm.exchanges import broadcast_from_first, gather_along, gather_texts
from layerzero.comm.pending import Operation
from layerzero.flat.groups import own_rank
from layerzero.flat.placement import Placement, ShardGroup
from layerzero.notices import some_ranks

REFUSED = -1
"""Sent in place of a hash by a rank that refuses the module or an argument."""
Rows = Mapping[str, Sequence[str]]
"""Lines of text that must be the same on all ranks, by section, in the order of comparison."""
_ADVICE = {
    "experts": "every rank needs equally many experts of equal size",
    "positions": "its ranks have different parts of the DTensor parameters: take both groups from "
    'one mesh: mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp")), '
    'parallelize_module(..., mesh["tp"]), ZeRO3(..., process_group=mesh["dp"])',
    "optional modules": "which of these modules a rank skips is its own choice in each forward",
}
"""Advice on ranks that differ in a section of an outline, where it is not to give all the same."""


class Exchange:
    """Messages between all ranks at construction. Each method is collective; blocks the host."""

    def __init__(self, axes: Sequence[ShardGroup], device: torch.device, what: str) -> None:
        """
        Args:
            axes: groups that together connect the ranks, inner first.
            device: one that their backends serve.
            what: the subject, which the error names if a rank does not take part.
        """
        self._axes = [axis for axis in axes if axis.size > 1]
        self._device = device
        self._operation = Operation("exchange", what, 0)

    def bounds(self, number: int) -> tuple[int, int]:
        """The lowest and the highest `number` of a rank."""
        own = torch.tensor([number], device=self._device)
        numbers = gather_along(own, self._axes, lambda _: self._operation)
        low, high = torch.stack(numbers.aminmax()).tolist()
        return low, high

    def first(self, own: object) -> Any:
        """The first rank's `own`: Python values that JSON has."""
        data = torch.tensor([*json.dumps(own).encode()], dtype=torch.uint8, device=self._device)
        size = torch.tensor([data.numel()], device=self._device)
        broadcast_from_first(size, self._axes, lambda _: self._operation)
        received = torch.zeros(int(size), dtype=torch.uint8, device=self._device)
        received[: data.numel()] = data[: received.numel()]
        broadcast_from_first(received, self._axes, lambda _: self._operation)
        return json.loads(bytes(received.tolist()))

    def refuse_difference(self, what: str, rows: Rows) -> NoReturn:
        """Raise ValueError on every rank: how rows, of which the hashes differ, differ from the
        first rank's. `what`: what was given them, such as "ZeRO3"."""
        rank, first = self.first([own_rank(), rows])
        texts = self.texts(_difference(rows, first, rank))
        text = next(iter(texts.values()))
        ranks = [number for number, each in texts.items() if each == text]
        section, row = text.split("\0", 1)
        has = f"{some_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {row}"
        advice = _ADVICE.get(section, "give every rank the same")
        raise ValueError(f"{what}: {section} differ between ranks: {has}; {advice}")

    def texts(self, text: str | None) -> dict[int, str]:
        """The texts of the ranks that have one, by global rank."""
        return gather_texts(text, self._axes, self._device, self._operation.unit)


def hash_of(value: object) -> int:
    """A number from 0 to 2**62 that is equal in all processes for equal JSON."""
    digest = hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def _difference(rows: Rows, first: Rows, first_rank: int) -> str | None:
    for section in {**first, **rows}:
        own, theirs = rows.get(section, ()), first.get(section, ())
        nothing = f"no other {section.removesuffix('s')}"
        for one, other in itertools.zip_longest(own, theirs, fillvalue=nothing):
            if one != other:
                return f"{section}\0{one}, where rank {first_rank} has {other}"
    return None


_WAITS = "\0"


def settle(made: Materializer, placement: Placement, device: torch.device) -> bool:
    """Make construction succeed or fail on all ranks together. Collective over the model's ranks.

    Args:
        placement: placement of the whole model.

    Returns:
        Whether any rank has parameters or buffers without values; the same on every rank.

    Raises:
        Exception: `made.failure`; a rank without one raises ValueError with that of another rank.
    """
    failure, text = made.failure, _WAITS if made.waits else None
    if failure is not None:
        text = f"{type(failure).__name__}: {failure}"
    texts = Exchange(placement.groups, device, "initial values").texts(text)
    if failure is not None:
        raise failure
    for rank, each in texts.items():
        if each != _WAITS:
            raise ValueError(f"rank {rank} could not initialise the model: {each}")
    return bool(texts)
