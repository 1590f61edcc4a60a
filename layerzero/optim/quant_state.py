"""QuantState: a flat state in 8 bits, with a scale for each block of 256 elements.

whole parameter  | block 0 | block 1 | block 2 |      blocks from index 0 on, on every rank
shards           | rank 0       |  rank 1      |      each part of block 1 has its own scale
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from layerzero.ops import step_reference
from layerzero.optim.flat_state import FlatState

_BLOCK = step_reference.QUANT_NUMEL


class QuantState(FlatState):
    """A flat state in 8 bits; in float32 after somebody asked for it or loaded it, until the next
    step, which rounds it to the nearest first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `FlatState`."""
        self._scales: list[torch.Tensor] = []
        self._wide: list[torch.Tensor] | None = None
        super().__init__(*args, **kwargs)

    def _fill(self, old: dict[nn.Parameter, dict[str, Any]]) -> None:
        num_blocks = 0
        for number, i in enumerate(self._members):
            start, numel = self.held[i].start, self.held[i].parameter.numel()
            self._blocks[number] = num_blocks
            num_blocks += (start + numel - 1) // _BLOCK - start // _BLOCK + 1 if numel else 0
        device = self.main.device
        self._scales = [torch.zeros(num_blocks, device=device) for _ in self._keys]
        has_old = any(map(old.get, self._params))
        self._wide = self._zeros(torch.float32) if has_old else None
        self._show(self._wide or (), old)

    def widen(self) -> None:
        """Have `shown` show float32 states, which the next step starts from; no value changes."""
        if self._wide is None and self._members:
            self._wide = self._zeros(torch.float32)
            for i, row, part in self._ranges():
                codes, scales = self.tensors[i][part], self._scales[i]
                self._wide[i][part] = step_reference.load_codes(i, codes, scales, row)
            self._show(self._wide, {})

    def _states(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self._wide is not None:
            # Back to what they came from, unless somebody has written or loaded them.
            for i, row, part in self._ranges():
                codes, scales = self.tensors[i][part], self._scales[i]
                step_reference.store_codes(i, self._wide[i][part], codes, scales, row)
            self._wide = None
            self._show((), {})
        return self.tensors, self._scales

    def _ranges(self) -> Iterator[tuple[int, list[int], slice]]:
        """(state, row of `flat_step_`'s table, where it is in the state) of each parameter."""
        for member, place, block in zip(self._members, self._places, self._blocks, strict=True):
            held = self.held[member]
            if numel := held.parameter.numel():
                row = [held.offset, 0, place, numel, 0, held.start, held.key, block]
                for i in range(len(self._keys)):
                    yield i, row, slice(place, place + numel)
