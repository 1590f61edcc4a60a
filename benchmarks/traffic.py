"""Counts the bytes that a rank sends, at torch's process group, below every engine.

A send counts its bytes. What a collective sends depends on the backend's algorithm, so it counts
the minimum of all algorithms: with n ranks and an input of b bytes, (n - 1) b for an all-gather,
b (n - 1) / n for a reduce-scatter or all-to-all, and twice that for an all-reduce.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist


class _Verb(NamedTuple):
    argument: int
    """Index of the argument with the input tensor, or list of tensors."""
    sent: Callable[[int, int], float]
    """Bytes sent, as a function of input bytes and number of ranks."""


def _part(nbytes: int, ranks: int) -> float:
    return nbytes * (ranks - 1) / ranks


def _to_each(nbytes: int, ranks: int) -> float:
    return float(nbytes * (ranks - 1))


# torch 2.13 renamed the calls on single tensors; both names are listed.
_VERBS = {
    "send": _Verb(0, lambda nbytes, ranks: float(nbytes)),
    "allreduce": _Verb(0, lambda nbytes, ranks: 2 * _part(nbytes, ranks)),
    "allgather": _Verb(1, _to_each),
    "_allgather_base": _Verb(1, _to_each),
    "all_gather_single": _Verb(1, _to_each),
    "_reduce_scatter_base": _Verb(1, _part),
    "reduce_scatter_single": _Verb(1, _part),
    "alltoall_base": _Verb(1, _part),
    "all_to_all_single": _Verb(1, _part),
}


class SentBytes:
    """Counts the bytes this rank sends while entered, in any thread."""

    def __init__(self) -> None:
        self.by_group: dict[tuple[int, ...], float] = {}
        """Bytes sent, keyed by the group's global ranks in ascending order."""
        self._lock = threading.Lock()
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> SentBytes:
        for name, verb in _VERBS.items():
            if name in vars(dist.ProcessGroup):
                # Read from the class's dict: attribute access returns a bare function, which would
                # not bind self when it is restored.
                self._originals[name] = vars(dist.ProcessGroup)[name]
                original = getattr(dist.ProcessGroup, name)
                setattr(dist.ProcessGroup, name, self._counting(original, verb))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)

    def _counting(self, original: Callable[..., Any], verb: _Verb) -> Callable[..., Any]:
        def counting(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            given = args[verb.argument]
            tensors = given if isinstance(given, (list, tuple)) else [given]
            sent = verb.sent(sum(tensor.nbytes for tensor in tensors), group.size())
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            with self._lock:
                self.by_group[ranks] = self.by_group.get(ranks, 0.0) + sent
            return original(group, *args, **kwargs)

        return counting
