"""Checks that what ranks received is what was sent.

Each rank keeps the checksums of the chunks that it sends, taken when they are packed, and of those
that it received, taken before their first use (for a reduction, before they are summed). At a
check, each pair of ranks compares one number, a sum of all checksums since the last check: 8 bytes.
Only if some rank finds a difference are the single checksums exchanged, which name the collective.

A collective counts from the time when this rank has received all of it. So one that is under way at
a check may count on some ranks alone; the numbers then differ, the single checksums do not, and the
next check compares it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from layerzero.comm.exchanges import all_to_all, gather_bytes
from layerzero.comm.pending import Operation
from layerzero.flat.placement import ShardGroup
from layerzero.step.operations import Operations

_WHAT = "the model"
_MAX_KEPT = 4096
"""Collectives of a group between two checks; older ones are not compared."""
MODULUS = 1 << 64


Checksums = torch.Tensor | list[int]
"""[n] int64; on the CPU as numbers."""


def kept(checksums: torch.Tensor) -> Checksums:
    """Checksums, to be kept until the next check. Does not block the host.

    Not as tensors of the CPU: memory of theirs between freed buffers keeps malloc from joining
    these, and the next buffers are fresh memory, which costs more than all checksums.
    """
    return checksums.tolist() if checksums.device.type == "cpu" else checksums


class Seen(NamedTuple):
    operation: Operation
    sent: Checksums
    """[group_size], or [1] if every peer was sent the same."""
    received: Checksums
    """[group_size]; of the own part, too."""


class Wire:
    def __init__(self, device: torch.device, operations: Operations) -> None:
        self._device = device
        self._operations = operations
        self._lanes: dict[ShardGroup, dict[int, Seen]] = {}
        self._last_kept = 0, 0

    def note(
        self,
        operation: Operation,
        group: ShardGroup,
        sent: Checksums,
        received: Checksums,
    ) -> None:
        """A collective is done. May be called from several threads."""
        lane = self._lanes.setdefault(group, {})
        lane[operation.number] = Seen(operation, sent, received)
        if len(lane) > _MAX_KEPT:
            lane.pop(next(iter(lane)), None)

    def keep(self) -> None:
        """What came so far belongs to gradients that wait: `undo` leaves it."""
        self._last_kept = self._operations.expert_count, self._operations.count

    def undo(self) -> None:
        """Forget the collectives of a pass that failed."""
        for lane in self._lanes.values():
            for number in [*lane]:
                if not self._last_kept[0] <= number <= self._last_kept[1]:
                    del lane[number]

    def forget(self, group: ShardGroup, operation: Operation) -> None:
        self._lanes.get(group, {}).pop(operation.number, None)

    def clear(self, groups: Iterable[ShardGroup]) -> None:
        for group in groups:
            self._lanes.get(group, {}).clear()

    def used(self) -> list[ShardGroup]:
        """Groups with collectives since the last check."""
        return [group for group, lane in self._lanes.items() if lane]

    def differs(self, groups: Sequence[ShardGroup]) -> bool:
        """Whether this rank received other bytes than were sent to it, or something is under way.

        Collective over each group; blocks the host.
        """
        exchanges = []
        for group in groups:
            sent, received = self._totals(group)
            theirs = torch.empty_like(sent)
            sizes = [1] * group.size
            operation = self._operations.next("verification", _WHAT, group)
            pending = all_to_all(theirs, sizes, sent, sizes, group, operation, 8)
            exchanges.append((group, sent, received, theirs, pending))
        result = False
        for group, sent, received, theirs, pending in exchanges:
            pending.wait()
            theirs[group.rank] = sent[group.rank]  # No message goes to the rank itself.
            result |= theirs.tolist() != received.tolist()
        return result

    def _totals(self, group: ShardGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """[group_size] of what was sent to each peer, on the model's device; and received, on CPU.

        Sums of checksums times odd numbers: what changes one checksum changes the total.
        """
        sent, received = [0] * group.size, [0] * group.size
        for number, to_peer, from_peer in self._rows(group):
            factor = 2 * number + 1
            for peer in range(group.size):
                sent[peer] += factor * to_peer[peer]
                received[peer] += factor * from_peer[peer]
        return (
            torch.tensor([signed(each) for each in sent], device=self._device),
            torch.tensor([signed(each) for each in received], device="cpu"),
        )

    def _rows(self, group: ShardGroup) -> list[tuple[int, list[int], list[int]]]:
        """For each collective: its number, the checksums sent to peers, those received."""
        lane = list(self._lanes.get(group, {}).values())
        parts = _on_host([part for seen in lane for part in (seen.sent, seen.received)])
        return [
            (seen.operation.number, sent * (group.size // len(sent)), received)
            for seen, sent, received in zip(lane, parts[::2], parts[1::2], strict=True)
        ]

    def find(self, group: ShardGroup) -> Iterator[str]:
        """What was received otherwise than it was sent, in words; the same on all of its ranks.

        Collective; blocks the host. Forgets what it has compared.
        """
        rows = [[number, *sent, *received] for number, sent, received in self._rows(group)]
        name = partial(self._operations.next, "verification", _WHAT)
        everyones = gather_bytes(json.dumps(rows).encode(), [group], name, self._device)
        by_rank = [{row[0]: row[1:] for row in json.loads(each)} for each in everyones]
        common = set.intersection(*map(set, by_rank))
        lane = self._lanes.get(group, {})
        for number in sorted(common):
            seen = lane.pop(number)
            for source in range(group.size):
                for target in range(group.size):
                    sent = by_rank[source][number][target]
                    if sent != by_rank[target][number][group.size + source]:
                        yield _text(seen.operation, group.ranks[source], group.ranks[target])


def _on_host(parts: list[Checksums]) -> list[list[int]]:
    """Numbers; what is on a device is copied at once, which blocks the host."""
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if not tensors:
        return [part for part in parts if isinstance(part, list)]
    values = iter(torch.cat(tensors).tolist())
    return [
        part if isinstance(part, list) else [next(values) for _ in range(part.numel())]
        for part in parts
    ]


def _text(operation: Operation, source: int, target: int) -> str:
    if source == target:
        return (
            f"{operation}: what rank {source} has of its own part is not what it packed; a bit "
            "flipped in its memory"
        )
    return (
        f"{operation}: what rank {target} received is not what rank {source} sent; a bit flipped "
        f"on the way, or in the memory of rank {source} or rank {target}"
    )


def signed(value: int) -> int:
    value %= MODULUS
    return value - MODULUS if value >= MODULUS // 2 else value
