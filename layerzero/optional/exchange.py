"""Exchange: a few integers from every rank to every rank, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerzero.comm.collectives import gather_small
from layerzero.comm.gather_texts import gather_texts
from layerzero.comm.new_groups import new_group
from layerzero.flat.groups import ShardGroup
from layerzero.flat.placement import Placement
from layerzero.step.operations import Operations

_HOST = torch.device("cpu")
_SUBJECT = "optional modules"


class Exchange:
    """Exchanges integers between the ranks of one placement.

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
        """Every rank's row, sorted by its first integer. Collective; blocks the host.

        Args:
            row: integers of 64 bits, as many on every rank; the first is this rank's number.

        Raises:
            CollectiveError: a peer is dead, or did not take part within the timeout.
        """
        rows = torch.tensor(row)
        for group in self._groups:
            operation = self._operations.next_on_host("agreement", self._subject, group)
            rows = gather_small(rows, group, operation)
        return sorted(rows.view(-1, len(row)).tolist())

    def texts(self, text: str | None) -> dict[int, str]:
        """The texts of the ranks that have one, by rank. Collective; blocks the host."""
        return gather_texts(text, self.rank, self._groups, _HOST, _SUBJECT)


def _on_host(group: ShardGroup) -> ShardGroup:
    process_group = new_group(
        group.ranks, "gloo", group.timeout, description="layerzero optional modules"
    )
    return ShardGroup(process_group, group.rank, group.ranks, "gloo", group.timeout)
