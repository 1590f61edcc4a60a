"""PlannedLearner: what a memory budget chooses, in a planned model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from layerzero.flat.placement import Placement
from layerzero.memory_budget.learner import Learner
from layerzero.memory_budget.meter import Meter
from layerzero.memory_budget.storages import StorageCount
from layerzero.step.root import RootState
from layerzero.step.unit import Unit


class PlannedLearner(Learner):
    """Every rank holds what this one holds; a gather takes as long as it has bytes."""

    def __init__(
        self, root: RootState, placement: Placement, budget: int, count: StorageCount
    ) -> None:
        self._storages = count
        super().__init__(root, placement, budget)

    def _make_meter(self, device: torch.device) -> Meter:
        return _PlannedMeter(self._storages)

    def _weights_changed(self) -> bool:
        return True

    def _highest(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def _seconds(self, unit: Unit) -> float:
        return unit.nbytes / 1e9


class _PlannedMeter:
    """Reads the count of the planned rank."""

    def __init__(self, count: StorageCount) -> None:
        self._count = count

    def start(self, tensors: Iterable[torch.Tensor]) -> None:
        self.look()

    def look(self) -> int:
        return self._count.restart()

    def stop(self) -> None:
        return None
