"""Numbers the models on a process group, and names each run so that old notes are ignored.

Ranks exchange notes through torch's store (diagnosis.py, watchdog.py, desync.py). That store may
outlive a run, for example when an elastic launcher restarts the ranks, and then it still holds the
notes of the previous run. So the ranks of a group agree once on a random run name, and only read
notes under that name.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from layerzero.comm.exchanges import gather_small
from layerzero.comm.pending import Operation
from layerzero.flat.placement import ShardGroup
from layerzero.watch.diagnosis import run_names


class ModelNumber(NamedTuple):
    """Identifies one model on one process group; the same on all ranks of the group."""

    run: str
    """Random name of the run, one for each group."""
    number: int
    """Number of the model, counted from 1 in the order of wrapping."""

    @property
    def place(self) -> str:
        """Prefix of this model's notes in the store."""
        return f"{self.run}/{self.number}"


_numbers: WeakKeyDictionary[dist.ProcessGroup, ModelNumber] = WeakKeyDictionary()
"""Number of the last model on each group."""


def number_model(
    groups: Iterable[ShardGroup], device: torch.device
) -> dict[dist.ProcessGroup, ModelNumber]:
    """Count one more model on each of its groups. Collective over a group the first time.

    Raises:
        CollectiveError: a rank did not take part within the timeout.
    """
    numbers: dict[dist.ProcessGroup, ModelNumber] = {}
    for group in groups:
        process_group = group.process_group
        if group.size == 1 or process_group in numbers:
            continue
        before = _numbers.get(process_group)
        if before is None:
            before = ModelNumber(_agree_on_run(group, device), 0)
            run_names[process_group] = before.run
        _numbers[process_group] = numbers[process_group] = ModelNumber(
            before.run, before.number + 1
        )
    return numbers


def _agree_on_run(group: ShardGroup, device: torch.device) -> str:
    # Not from torch's generator: that would change the user's random numbers.
    own = torch.tensor([secrets.randbits(62)], device=device)
    numbers = gather_small(own, group, Operation("exchange", "the name of this run", 0))
    return f"{numbers.max().item():x}"
