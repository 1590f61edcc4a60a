"""QuantState: a flat state in 8 bits, with a scale for each block of 256 elements.

whole parameter  | block 0 | block 1 | block 2 |      blocks from index 0 on, on every rank
shards           | rank 0       |  rank 1      |      each part of block 1 has its own scale
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from layerzero.ops import step_reference
from layerzero.optim.flat_state import FlatState, Step

_BLOCK = step_reference.QUANT_NUMEL


class QuantState(FlatState):
    """A flat state in 8 bits; in float32 after somebody asked for it or loaded it, until the next
    step."""

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
        if self._wide is not None or not self._members:
            return
        self._wide = self._zeros(torch.float32)
        for i, (wide, codes, scales) in enumerate(
            zip(self._wide, self.tensors, self._scales, strict=True)
        ):
            for member, place, block in zip(self._members, self._places, self._blocks, strict=True):
                each = self.held[member]
                part = slice(place, place + each.parameter.numel())
                index = torch.arange(each.start, each.start + each.parameter.numel())
                own = scales[(block + index // _BLOCK - each.start // _BLOCK).to(scales.device)]
                is_signed = step_reference.is_signed(i)
                wide[part] = step_reference.dequantize(codes[part], own, is_signed)
        self._show(self._wide, {})

    def _states(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return (self.tensors, self._scales) if self._wide is None else (self._wide, [])

    @property
    def phase(self) -> int:
        return step_reference.WITH_ENDS if self._wide is None else step_reference.WITHOUT_ENDS

    def note_taken(self, step: Step) -> None:
        if self._wide is not None:
            self._narrow(step, self._wide)
        super().note_taken(step)

    def _narrow(self, step: Step, wide: list[torch.Tensor]) -> None:
        """Round float32 states to 8 bits after a step, as a step from 8 bits does."""
        options = step.tensors.rows.tolist()
        for row in step.tensors.table.tolist():
            place = row[step_reference.STATE]
            part = slice(place, place + row[step_reference.NUMEL])
            own = options[row[step_reference.ROW]]
            # Also of a state that the step does not use (without amsgrad), which stays what it is.
            values = [each[part] for each in wide]
            given = values, self.tensors, self._scales, row
            step_reference.store_states(*given, int(own[step_reference.STEP]), step.seed)
        self._wide = None
        stepped = step.gradient.numbers
        if stepped is None:
            self._show((), {})
            return
        # The others have not been rounded: what they were stays, until all have a gradient.
        self.widen()
        assert self._wide is not None
        for number in {*range(len(self._members))} - {*stepped}:
            place = self._places[number]
            part = slice(place, place + self._params[number].numel())
            for now, before in zip(self._wide, wide, strict=True):
                now[part] = before[part]
