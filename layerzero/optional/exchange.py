"""Exchange: what the ranks of one model say to each other inside a pass, on the host.

Each method is one exchange; `Exchange.agree` is the usual one: each rank says what it wants next,
and all take part in one of these requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from layerzero.comm.exchanges import gather_along, gather_texts
from layerzero.comm.new_groups import new_group
from layerzero.flat.placement import Placement, ShardGroup
from layerzero.step.operations import Operations
from layerzero.watch.diagnosis import CollectiveError, PeerRaised

NOTHING = -1
"""The request of a rank that wants nothing."""
_RAISED = -2
_WORD = 62
"""Bits in an integer of an exchange."""
_HOST = torch.device("cpu")
_SUBJECT = "optional modules"


class Exchange:
    """Exchanges integers between the ranks of one placement. All methods but `name` are collective
    and block the host.

    The answers decide what the host does next, so they must not come from the device: reading them
    would block the host until the device has come to it. Where the model is on one, the exchange
    has gloo groups of its own.
    """

    def __init__(self, placement: Placement, operations: Operations, on_device: bool) -> None:
        """Collective over each group of the placement if `on_device`, which makes new groups."""
        self.rank = placement.rank
        self._operations = operations
        self._groups = [_on_host(g) for g in placement.groups] if on_device else placement.groups
        self._subject = _SUBJECT

    def name(self, addition: str) -> None:
        """Add this to the name of the exchanges that follow. Ranks with other names never exchange
        anything, and an error shows each one's."""
        self._subject = f"{_SUBJECT}{addition}"

    def __call__(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row, sorted by its first integer.

        Args:
            row: integers of 64 bits, as many on every rank; the first is this rank's number.

        Raises:
            CollectiveError: a peer is dead, or did not take part within the timeout.
        """
        name = partial(self._operations.next_on_host, "agreement", self._subject)
        rows = gather_along(torch.tensor(row), self._groups, name)
        return sorted(rows.view(-1, len(row)).tolist())

    def texts(self, text: str | None) -> dict[int, str]:
        """The texts of the ranks that have one, by rank."""
        return gather_texts(text, self.rank, self._groups, _HOST, _SUBJECT)

    def agree(self, request: int) -> int:
        """Exchange requests; the lowest is followed.

        Returns:
            The request that all ranks take part in now; NOTHING: no rank wants anything.

        Raises:
            PeerRaised: another rank has raised.
        """
        requests = [row[1] for row in self([self.rank, request])]
        if _RAISED in requests:
            rank, text = next(iter(self.texts(None).items()))
            raise PeerRaised(
                f"rank {rank} raised between or inside units that ranks may skip: {text}"
            )
        return min((each for each in requests if each >= 0), default=NOTHING)

    def report(self, error: BaseException) -> None:
        """Raise on the ranks that call `agree`; not if they raise at the same place, or may be gone
        (after an interrupt, or a failed collective)."""
        is_own = isinstance(error, Exception) and not isinstance(error, CollectiveError)
        if not is_own or isinstance(error, PeerRaised) or self._operations.failure is not None:
            return
        self([self.rank, _RAISED])
        self.texts(f"{type(error).__name__}: {error}".splitlines()[0])

    def bits(self, own: Sequence[bool]) -> list[list[bool]]:
        """Every rank's bits, in rank order; as many on every rank."""
        words = [own[start : start + _WORD] for start in range(0, len(own), _WORD)]
        packed = [sum(1 << place for place, bit in enumerate(word) if bit) for word in words]
        return [
            [bool(row[1 + i // _WORD] >> i % _WORD & 1) for i in range(len(own))]
            for row in self([self.rank, *packed])
        ]


def _on_host(group: ShardGroup) -> ShardGroup:
    process_group = new_group(
        group.ranks, "gloo", group.timeout, description="layerzero optional modules"
    )
    return ShardGroup(process_group, group.rank, group.ranks, "gloo", group.timeout)
