"""QuantState: a flat state in 8 bits, with a scale for each 256 elements of a whole parameter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from layerzero.ops import flat_step_, step_reference
from layerzero.optim.edges import cuts_of
from layerzero.optim.flat_state import FlatState, Held, Step

_BLOCK = step_reference.QUANT_NUMEL


def measure(taken: Sequence[tuple[FlatState, Step]]) -> None:
    """Write, before steps are taken, the largest magnitudes in this rank's parts of blocks of which
    other ranks have a part, into the `edges` of 8-bit states. Not collective."""
    calls: dict[tuple[torch.device, int], list[tuple[FlatState, Step]]] = {}
    for flat, step in taken:
        if len(step.cut):  # In two phases: float32 states, which a load has left, have no scales.
            calls.setdefault((step.tensors.main.device, flat.phase), []).append((flat, step))
    for cuts in calls.values():
        tensors = [step.tensors._replace(table=step.cut) for _, step in cuts]
        flat_step_(cuts[0][0].kind, tensors, cuts[0][1].grad_scale, 0, step_reference.MEASURE)
        for (flat, _), cut in zip(cuts, tensors, strict=True):
            if isinstance(flat, QuantState):
                flat.measure_unused(cut)


class QuantState(FlatState):
    """A step has two halves: `measure` those blocks of which other ranks have a part, `take_steps`
    uses the scales that ranks have agreed on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `FlatState`."""
        self._scales: list[torch.Tensor] = []
        self._wide: list[torch.Tensor] | None = None
        super().__init__(*args, **kwargs)
        self._edges = torch.zeros(2, len(self._keys), device=self.main.device)

    @property
    def edges(self) -> torch.Tensor:
        return self._edges

    @property
    def memory(self) -> list[torch.Tensor]:
        return [*self.tensors, *self._scales]

    def _fill(self, old: dict[nn.Parameter, dict[str, Any]]) -> None:
        self._blocks: list[int] = []
        num_blocks = 0
        for i in self._members:
            start, numel = self.held[i].start, self.held[i].parameter.numel()
            self._blocks.append(num_blocks)
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
                is_signed = step_reference.is_signed(self.kind, i)
                wide[part] = step_reference.dequantize(codes[part], own, is_signed)
        self._show(self._wide, {})

    def measure_unused(self, cut: step_reference.StepTensors) -> None:
        """Write the magnitudes of float32 states that the step of these ranges leaves alone."""
        wide = self._wide
        if wide is None:
            return
        options = cut.rows.tolist()
        for row in cut.table.tolist():
            place = row[step_reference.STATE]
            used = step_reference.num_states(self.kind, options[row[step_reference.ROW]], len(wide))
            for i in range(used, len(wide)):
                part = wide[i][place : place + row[step_reference.NUMEL]]
                self._edges[row[step_reference.EDGE], i] = step_reference.largest(part)

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
            # Also of states that the step does not use (momentum is 0), which stay what they are.
            values = [each[part] for each in wide]
            given = self.kind, values, self.tensors, self._scales, self._edges, row
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

    def _ranges(self, held: Held, number: int, offset: int, row: int) -> list[list[int]]:
        """Rows of `table` for a parameter: blocks cut by a border of shards have their own."""
        start, numel = held.start, held.parameter.numel()
        first, last = cuts_of(start, start + numel, held.total)
        cuts = sorted({start, *(first or ()), *(last or ()), start + numel})
        rows = []
        for begin, end in pairwise(cuts):
            edge = 0 if first == (begin, end) else 1 if last == (begin, end) else -1
            along = begin - start
            block = self._blocks[number] + begin // _BLOCK - start // _BLOCK
            rows.append(
                [
                    *(held.offset + along, offset + along, self._places[number] + along),
                    *(end - begin, row, begin, held.key, block, edge),
                ]
            )
        return rows
