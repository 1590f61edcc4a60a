"""PlannedVerifiedContext: what verification holds, without bytes to verify.

Every step is planned as one that is checked, which holds the most.
"""

from __future__ import annotations

from typing import Any

import torch

from layerzero.memory_budget.storages import StorageCount
from layerzero.step.context import RuntimeContext
from layerzero.verify.context import VerifiedContext
from layerzero.verify.wire import Checksums


class PlannedVerifiedContext(VerifiedContext):
    """Sends, sums and keeps as a `VerifiedContext`; compares nothing."""

    def __init__(
        self, *arguments: Any, count: StorageCount, on_accelerator: bool, **named: Any
    ) -> None:
        self._storages = count
        self._on_accelerator = on_accelerator
        super().__init__(*arguments, **named, every=1)

    def _watch_steps(self) -> None:
        """No real optimizer's step concerns it."""

    def _keep(self, checksums: torch.Tensor) -> Checksums:
        if self._on_accelerator:
            self._storages.mark([checksums], "other")
            return checksums
        return [0] * checksums.numel()

    def note_weights(self) -> None:
        RuntimeContext.note_weights(self)
        self._checksums.clear()

    def before_delivery(self) -> None:
        self._wire.clear(self._wire.used())
