"""Phases: stretches of a run in which the waits of one model may last longer (`model.timeout`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakValueDictionary

import torch

from layerzero.flat.groups import raise_backend_timeout
from layerzero.flat.placement import ShardGroup

_HOST = torch.device("cpu")


class Phases:
    """The open phases of one model, and the groups that they apply to."""

    def __init__(self, device: torch.device, groups: Iterable[ShardGroup]) -> None:
        self._device = device
        self._open: list[_Phase] = []
        # By identity: equal groups may be different objects, each with its own limit.
        self._groups: WeakValueDictionary[int, ShardGroup] = WeakValueDictionary()
        for group in groups:
            self.cover(group)

    def cover(self, group: ShardGroup) -> None:
        """Let phases apply to a group that the model also uses from now on."""
        if id(group) not in self._groups:
            self._groups[id(group)] = group
            if self._open:
                self._open[-1].begin(group, self._device)

    @contextmanager
    def phase(self, limit: timedelta) -> Iterator[None]:
        """A context in which waits that begin may last `limit`. Not collective."""
        phase = _Phase(limit)
        self._open.append(phase)
        try:
            for group in list(self._groups.values()):
                phase.begin(group, self._device)
            yield
        finally:
            # Not always the last: a generator may leave its phase after a later one began.
            self._open.remove(phase)
            now = self._open[-1].limit if self._open else None
            for group in list(self._groups.values()):
                group.set_limit(now)
            phase.restore()


class _Phase:
    """One phase; compared by identity."""

    def __init__(self, limit: timedelta) -> None:
        self.limit = limit
        self._undo: list[Callable[[], None]] = []

    def begin(self, group: ShardGroup, device: torch.device) -> None:
        group.set_limit(self.limit)
        if group.size > 1:
            serves = _HOST if group.backend == "gloo" else device
            self._undo.append(raise_backend_timeout(group, serves, self.limit))

    def restore(self) -> None:
        """Give the backends their timeouts back."""
        for undo in reversed(self._undo):
            undo()
