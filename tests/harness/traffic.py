"""What a rank hands to the network, counted below the engine, at torch's process group."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Method -> which positional argument is what this rank gives.
_GIVEN = {
    "send": 0,
    "broadcast": 0,
    "allreduce": 0,
    "allgather": 1,
    "_allgather_base": 1,
    "all_gather_single": 1,
    "_reduce_scatter_base": 1,
    "reduce_scatter_single": 1,
    "alltoall_base": 1,
}


class SentBytes:
    """Counts the bytes this rank gives to collectives and sends while entered, in any thread."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.by_group: dict[tuple[int, ...], int] = {}
        """Keyed by the group's global ranks."""
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> SentBytes:
        for name, position in _GIVEN.items():
            if hasattr(dist.ProcessGroup, name):
                # From the dict, because reading it off the class would strip the binding to self.
                self._originals[name] = vars(dist.ProcessGroup)[name]
                original = getattr(dist.ProcessGroup, name)
                setattr(dist.ProcessGroup, name, self._counting(original, position))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)

    def _counting(self, original: Callable[..., Any], position: int) -> Callable[..., Any]:
        def counting(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            given = args[position]
            tensors = given if isinstance(given, (list, tuple)) else [given]
            nbytes = sum(each.nbytes for each in tensors if isinstance(each, Tensor))
            ranks = tuple(dist.get_process_group_ranks(group))
            self.nbytes += nbytes
            self.by_group[ranks] = self.by_group.get(ranks, 0) + nbytes
            return original(group, *args, **kwargs)

        return counting
