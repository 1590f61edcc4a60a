"""Sequence numbers of models on a process group, under a name that no earlier run had.

Ranks leave notes for each other in torch's store (diagnosis.py, watchdog.py, lookout.py). That
store may outlive a run, as when an elastic launcher starts the ranks again, and then it still has
the notes of the run before. So the ranks of a group agree on a random name once, and notes that
were not left under it are not read.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from layerzero.comm.collectives import Operation, gather_small
from layerzero.comm.run_names import remember_run
from layerzero.core.groups import ShardGroup


class ModelNumber(NamedTuple):
    """One model on one process group; the same on all ranks of the group."""

    run: str
    """Of the group, in this run."""
    number: int
    """Models are counted from 1, in the order in which they were wrapped."""

    @property
    def place(self) -> str:
        """Of this model's notes in the store."""
        return f"{self.run}/{self.number}"


_numbers: WeakKeyDictionary[dist.ProcessGroup, ModelNumber] = WeakKeyDictionary()
"""Of the last model on each group."""


def number_model(
    groups: Iterable[ShardGroup], device: torch.device
) -> dict[dist.ProcessGroup, ModelNumber]:
    """Count one more model on each of its groups. Collective over a group the first time.

    Raises:
        CollectiveError: a rank did not come.
    """
    numbers: dict[dist.ProcessGroup, ModelNumber] = {}
    for group in groups:
        process_group = group.process_group
        if group.size == 1 or process_group in numbers:
            continue
        before = _numbers.get(process_group)
        if before is None:
            before = ModelNumber(_agree_on_run(group, device), 0)
            remember_run(process_group, before.run)
        _numbers[process_group] = numbers[process_group] = ModelNumber(
            before.run, before.number + 1
        )
    return numbers


def _agree_on_run(group: ShardGroup, device: torch.device) -> str:
    # Not from torch's generator, whose numbers are the user's.
    own = torch.tensor([secrets.randbits(62)], device=device)
    numbers = gather_small(own, group, Operation("agreement", "the name of this run", 0))
    return f"{numbers.max().item():x}"
