"""Counts the bytes that a rank sends, at torch's process group, below every engine.

A send counts its bytes. What a collective sends depends on the backend's algorithm, so it counts
the minimum of all algorithms: with n ranks and an input of b bytes, (n - 1) b for an all-gather,
b (n - 1) / n for a reduce-scatter or all-to-all, and twice that for an all-reduce.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor


class _Verb(NamedTuple):
    argument: int
    """Index of the argument with the input tensor, or list of tensors."""
    sent: Callable[[int], float]
    """Bytes sent for each byte of input, as a function of the number of ranks."""


_TO_EACH = _Verb(1, lambda ranks: ranks - 1)
_PART = _Verb(1, lambda ranks: (ranks - 1) / ranks)
# torch 2.13 renamed the calls on single tensors; both names are listed.
_VERBS = {
    "send": _Verb(0, lambda ranks: 1),
    "broadcast": _Verb(0, lambda ranks: 1),
    "allreduce": _Verb(0, lambda ranks: 2 * (ranks - 1) / ranks),
    **dict.fromkeys(("allgather", "_allgather_base", "all_gather_single"), _TO_EACH),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), _PART),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _PART),
}


class SentBytes(ExitStack):
    """Counts the bytes this rank sends while entered, in any thread."""

    counts_input = False
    """Whether the bytes of a call's input count, and not those that it makes the rank send."""

    def __init__(self) -> None:
        super().__init__()
        self.by_group: dict[tuple[int, ...], float] = {}
        """Bytes sent, keyed by the group's global ranks in ascending order."""
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> float:
        return sum(self.by_group.values())

    def __enter__(self) -> SentBytes:
        for name, verb in _VERBS.items():
            if hasattr(dist.ProcessGroup, name):
                counting = self._counting(getattr(dist.ProcessGroup, name), verb)
                self.enter_context(mock.patch.object(dist.ProcessGroup, name, counting))
        return self

    def _counting(self, original: Callable[..., Any], verb: _Verb) -> Callable[..., Any]:
        def counting(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            given = args[verb.argument]
            tensors = given if isinstance(given, (list, tuple)) else [given]
            sent = float(sum(each.nbytes for each in tensors if isinstance(each, Tensor)))
            sent *= 1 if self.counts_input else verb.sent(group.size())
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            with self._lock:
                self.by_group[ranks] = self.by_group.get(ranks, 0.0) + sent
            return original(group, *args, **kwargs)

        return counting
