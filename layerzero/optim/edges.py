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


def partners(layout_of: FlatParam) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """For both slots of this rank, the (main shard, slot) of every part of the same block."""
    layout, own = layout_of.layout, layout_of.placement.main_shard_index
    found: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for index, start, stop, _ in layout.shard_ranges(own):
        for slot, cut in enumerate(cuts_of(start, stop, layout.numels[index])):
            if cut is not None:
                found[slot].extend(_parts_of(layout_of, index, cut[0] // QUANT_NUMEL))
    return found


def _parts_of(of: FlatParam, index: int, block: int) -> Iterable[tuple[int, int]]:
    layout = of.layout
    begin = layout.starts[index] + block * QUANT_NUMEL
    end = min(begin + QUANT_NUMEL, layout.starts[index] + layout.numels[index])
    for shard in range(begin // layout.shard_numel, (end - 1) // layout.shard_numel + 1):
        start, stop = layout.owned_range(index, shard)
        first, _ = cuts_of(start, stop, layout.numels[index])
        yield shard, 0 if first is not None and first[0] // QUANT_NUMEL == block else 1


def has_cuts(of: FlatParam) -> bool:
    """Whether a border of any two shards cuts a block; the same on every rank."""
    layout = of.layout
    for shard in range(1, layout.group_size):
        border = shard * layout.shard_numel
        for start, numel in zip(layout.starts, layout.numels, strict=True):
            if start < border < start + numel and (border - start) % QUANT_NUMEL:
                return True
    return False


class EdgeExchange:
    """Exchanges the magnitudes of cut blocks, of all flat parameters of one placement."""

    def __init__(self, placement: Placement, handles: Sequence[FlatParam]) -> None:
        """`handles`: those with cuts, in an order that all ranks share."""
        self._placement = placement
        self._places = {id(handle): number for number, handle in enumerate(handles)}
        size = len(handles) * 2
        self._numel = size * _STATES + 1
        targets, sources = [], []
        for number, handle in enumerate(handles):
            for slot, members in enumerate(partners(handle)):
                for shard, other in members:
                    targets.append(number * 2 + slot)
                    sources.append(shard * size + number * 2 + other)
        self._size = size
        self._targets = torch.tensor(targets, dtype=torch.int64)
        self._sources = torch.tensor(sources, dtype=torch.int64)

    @remembers_failure
    def _gather(self, root: RootState, own: torch.Tensor) -> torch.Tensor:
        parts = own
        for group in self._placement.owner_groups:
            operation = root.operations.next("optimizer state scales", "the model", group)
            parts = gather_small(parts, group, operation)
        return parts.view(-1, self._numel)

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
        table = self._gather(root, own)
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


def make_exchanges(handles: Iterable[FlatParam]) -> list[EdgeExchange]:
    """One exchange for each placement where a block is cut, the same on every rank."""
    by_placement: dict[int, tuple[Placement, list[FlatParam]]] = {}
    for handle in handles:
        if handle.placement.num_main_shards > 1 and has_cuts(handle):
            found = by_placement.setdefault(id(handle.placement), (handle.placement, []))
            found[1].append(handle)
    return [EdgeExchange(placement, members) for placement, members in by_placement.values()]
