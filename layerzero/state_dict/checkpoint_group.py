"""The ranks that save or load together, and their exchange of names and checksums.

They communicate through a separate gloo group on the CPU, so that a background save never mixes
with the collectives of a training step. Parameters are never sent this way.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from layerzero.comm.exchanges import broadcast, gather_along, gather_bytes
from layerzero.comm.new_groups import agree_on_group_names, new_group
from layerzero.comm.pending import Operation
from layerzero.errors import CheckpointError
from layerzero.flat.groups import (
    DEFAULT_TIMEOUT,
    chosen_timeout,
    describe_group,
    raise_backend_timeout,
)
from layerzero.flat.placement import ShardGroup
from layerzero.notices import some_ranks
from layerzero.step.root import RootState

_SLOWEST_DISK = 10_000_000
"""Bytes per second; a rank that writes or reads more slowly may exceed the timeout."""
_HOST = torch.device("cpu")
_TOGETHER = "the ranks that save or load together"


class CheckpointGroup:
    """The ranks of one save or load, in the order of their global ranks."""

    ranks: tuple[int, ...]
    """Global ranks."""
    rank: int
    """This rank's place among them."""
    is_first: bool
    wait_for_save: Callable[[], object] | None
    """Blocks until a background save is done, which exchanges messages while it runs."""
    timeout: timedelta
    """Timeout of one exchange; set for each save or load."""

    def __init__(self, group: ShardGroup | None) -> None:
        """`group`: a group on the CPU; None: this rank alone."""
        self._group = group
        self.ranks = (dist.get_rank(),) if group is None else group.ranks
        self.rank = 0 if group is None else group.rank
        self.is_first = self.rank == 0
        self._num_operations = 0
        self.wait_for_save = None
        self.timeout = DEFAULT_TIMEOUT

    def finish(self) -> None:
        """Block until the background save, if any, is done, and raise its error."""
        wait, self.wait_for_save = self.wait_for_save, None
        if wait is not None:
            wait()

    def exchange(self, what: str, make: Callable[[], Any], nbytes_moved: int = 0) -> list[Any]:
        """What `make` returns on every rank, in rank order. Collective; blocks the host.

        Args:
            what: name of the exchange, for messages.
            make: returns what JSON can hold; tuples arrive as lists.
            nbytes_moved: bytes read or written since the last exchange by the rank with the most;
                they extend the timeout.

        Raises:
            CheckpointError: on every rank, if `make` raised on any; names that rank.
            CollectiveError: a rank is dead, or did not take part within the timeout.
        """
        error: Exception | None = None
        try:
            own = json.dumps([True, make()], separators=(",", ":"))
        except Exception as caught:
            error = caught
            is_plain = isinstance(caught, (CheckpointError, OSError))
            own = json.dumps([False, f"{'' if is_plain else type(caught).__name__ + ': '}{caught}"])
        timeout = self.timeout + timedelta(seconds=nbytes_moved / _SLOWEST_DISK)
        groups = [dataclasses.replace(each, timeout=timeout) for each in (self._group,) if each]
        texts = gather_bytes(own.encode(), groups, lambda _: self._operation(what), _HOST)
        answers = [json.loads(each) for each in texts]
        ranks_of: dict[str, list[int]] = {}
        for rank, (is_good, answer) in zip(self.ranks, answers, strict=True):
            if not is_good:
                ranks_of.setdefault(answer, []).append(rank)
        if ranks_of:
            each = [f"{some_ranks(own)}: {text}" for text, own in ranks_of.items()]
            raise CheckpointError("; ".join(each)) from error
        return [answer for _, answer in answers]

    def from_first(self, what: str, make: Callable[[], Any]) -> Any:
        """What `make` returns on the first rank; it runs only there. Otherwise as `exchange`."""
        return self.exchange(what, make if self.is_first else lambda: None)[0]

    def broadcast(self, what: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The CPU tensor of one of the ranks, in place. Collective; blocks the host."""
        if self._group is not None and tensor.numel():
            group = dataclasses.replace(self._group, timeout=self.timeout)
            broadcast(tensor, group, self._operation(what), rank).wait()
        return tensor

    def _operation(self, what: str) -> Operation:
        self._num_operations += 1
        return Operation("exchange", what, self._num_operations)


_made: WeakKeyDictionary[dist.ProcessGroup | RootState, dict[tuple[int, ...], CheckpointGroup]]
_made = WeakKeyDictionary()
"""By process group or root, and ranks; dropped together with that group or root."""


def checkpoint_group_of(
    root: RootState, process_group: dist.ProcessGroup | None
) -> CheckpointGroup:
    """The ranks that share the model, or those of `process_group`. Collective the first time.

    Models on the same ranks share one object. Blocks the host until a background save among them is
    done, so that the caller is the only user.

    Raises:
        CheckpointError, CollectiveError: the background save failed.
    """
    placements = root.placements
    timeouts = [placement.shard_group.limit for placement in placements]
    if process_group is not None:
        chosen = chosen_timeout(process_group, root.device)
        timeouts += [] if chosen is None else [chosen]
    timeout = max(timeouts, default=DEFAULT_TIMEOUT)
    parent: dist.ProcessGroup | RootState = root
    ranks: Sequence[int] = [dist.get_rank()]
    if process_group is not None:
        ranks, parent = dist.get_process_group_ranks(process_group), process_group
    elif placements:
        # Of all that share the model, data-parallel and tensor-parallel.
        members = sorted({rank for p in placements for rank in (p.data_parallel or p).members})
        name = partial(root.operations.next, "checkpoint", "ranks")
        own = torch.tensor(members, device=root.device)
        ranks = gather_along(own, root.tensor_parallel_groups, name).unique().tolist()
        parent = placements[0].shard_group.process_group
    made = _made.setdefault(parent, {})
    key = tuple(ranks)
    if key not in made:
        if process_group is not None:
            has_device = root.device.type in dist.get_backend_config(process_group)
            device = root.device if has_device else _HOST
            agree_on_group_names([describe_group(process_group, device, None)], device, _TOGETHER)
        else:
            axes = [*root.groups, *root.tensor_parallel_groups]
            agree_on_group_names(axes, root.device, _TOGETHER)
        group = None
        if len(key) > 1:
            group = describe_group(new_group(key, "gloo", timeout), _HOST, None)
            # Each exchange has its own timeout.
            raise_backend_timeout(group, _HOST, timedelta(days=1))
        made[key] = CheckpointGroup(group)
    together = made[key]
    together.finish()
    together.timeout = timeout
    return together
