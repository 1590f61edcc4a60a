"""The scales of 8-bit states where a border between shards cuts a block of elements.

    whole parameter  | block 0 | block 1 | block 2 |      blocks of 256 elements, from index 0 on
    shards           | rank 0       |  rank 1      |      whatever the number of ranks

The scale of block 1 is the largest magnitude in both of its parts, so the two ranks tell each other
theirs: one all-gather of a few numbers for each placement and step. A shard is contiguous, so it
has at most two such blocks: its first, slot 0, and its last, slot 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from layerzero.comm.collectives import gather_small
from layerzero.flat.flat_param import FlatParam
from layerzero.flat.layout import FlatLayout
from layerzero.flat.placement import Placement
from layerzero.ops.step_reference import QUANT_NUMEL
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState

Cut = tuple[int, int]
_STATES = 3


def cuts_of(start: int, stop: int, total: int) -> tuple[Cut | None, Cut | None]:
    """The part [start, stop) of a parameter of `total` elements begins and ends with these parts of
    blocks that are cut; None: its first or last block is whole, or is the same one."""
    first = last = None
    if start % QUANT_NUMEL and start < stop:
        first = (start, min(-(-start // QUANT_NUMEL) * QUANT_NUMEL, stop))
    if stop % QUANT_NUMEL and start < stop < total:
        begin = max(stop // QUANT_NUMEL * QUANT_NUMEL, start)
        last = None if first is not None and first[1] == stop else (begin, stop)
    return first, last


_Blocks = list[tuple[int, int] | None]
"""(parameter, block) in each of a shard's two slots; None: no border cuts a block there."""


def _cut_blocks(layout: FlatLayout) -> list[_Blocks]:
    """The blocks that borders cut, for each shard."""
    found: list[_Blocks] = []
    for shard in range(layout.group_size):
        found.append([None, None])
        for index, start, stop, _ in layout.shard_ranges(shard):
            for slot, cut in enumerate(cuts_of(start, stop, layout.numels[index])):
                if cut is not None:
                    found[-1][slot] = index, cut[0] // QUANT_NUMEL
    return found


class EdgeExchange:
    """Exchanges the magnitudes of cut blocks, of all flat parameters of one placement."""

    def __init__(
        self, placement: Placement, cuts: Sequence[tuple[FlatParam, list[_Blocks]]]
    ) -> None:
        """`cuts`: of the flat parameters that have some, in an order that all ranks share."""
        self._placement = placement
        self._places = {id(handle): number for number, (handle, _) in enumerate(cuts)}
        self._size = len(cuts) * 2
        self._numel = self._size * _STATES + 1
        # Each slot of this rank, and the slot of every rank that has a part of the same block.
        pairs = [
            (number * 2 + slot, shard * self._size + number * 2 + other)
            for number, (_, blocks) in enumerate(cuts)
            for slot, own in enumerate(blocks[placement.main_shard_index])
            for shard, theirs in enumerate(blocks)
            for other, block in enumerate(theirs)
            if own is not None and own == block
        ]
        self._targets, self._sources = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)

    def run(
        self, root: RootState, edges: Sequence[tuple[FlatParam, torch.Tensor]], stops: bool | None
    ) -> bool:
        """Write the largest magnitudes of each block into `edges`. Collective over the placement's
        owners; blocks the host on the CPU.

        Args:
            edges: [2, states] of the flat parameters that step here.
            stops: this rank does not step; None: no rank asks.

        Returns:
            Whether any rank does not.
        """
        # A few calls for all: the host's time should not grow with the number of flat parameters.
        given = {self._places[id(h)]: own for h, own in edges if id(h) in self._places}
        none = torch.zeros_like(next(iter(given.values()), torch.zeros(2, _STATES)))
        count = none.shape[1]
        own = torch.zeros(self._size + 1, _STATES, device=root.device)
        own[:-1, :count] = torch.cat([given.get(i, none) for i in range(len(self._places))])
        own = own.view(-1)[: self._numel]
        if stops:
            own[-1] = 1.0
        table = _gather(root, own, self._placement).view(-1, self._numel)
        anyone = stops is not None and bool(table[:, -1].any())
        # As integers: the order is that of the magnitudes, with NaN above all.
        bits = table[:, :-1].reshape(-1, _STATES).contiguous().view(torch.int32)
        if self._targets.device != bits.device:
            self._targets = self._targets.to(bits.device)
            self._sources = self._sources.to(bits.device)
        largest = torch.zeros(self._size, _STATES, dtype=torch.int32, device=bits.device)
        index = self._targets.unsqueeze(1).expand(-1, _STATES)
        largest.scatter_reduce_(0, index, bits[self._sources], "amax")
        agreed = largest.view(torch.float32)[:, :count].split(2)
        if given:
            torch._foreach_copy_([*given.values()], [agreed[place] for place in given])
        return anyone


@remembers_failure
def _gather(root: RootState, own: torch.Tensor, placement: Placement) -> torch.Tensor:
    for group in placement.owner_groups:
        operation = root.operations.next("optimizer state scales", "the model", group)
        own = gather_small(own, group, operation)
    return own


def make_exchanges(handles: Iterable[FlatParam]) -> list[EdgeExchange]:
    """One exchange for each placement where a block is cut, the same on every rank."""
    by_placement: dict[int, tuple[Placement, list[tuple[FlatParam, list[_Blocks]]]]] = {}
    for handle in handles:
        blocks = _cut_blocks(handle.layout)
        if any(slots != [None, None] for slots in blocks):
            found = by_placement.setdefault(id(handle.placement), (handle.placement, []))
            found[1].append((handle, blocks))
    return [EdgeExchange(*each) for each in by_placement.values()]
