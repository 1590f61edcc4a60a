"""Warns where ranks have drawn the same random numbers for different parts of a model.

A parameter of a wrapped model is this rank's part. Who initialises it again after wrapping, with
one seed on all ranks (`nn.init.normal_(p)` over `model.parameters()`, `model.apply(init)`), draws
equal numbers for unequal parts, and nothing fails. The first training forward has all parts side by
side in the full buffers, so nothing is sent to find it. Only flat parameters that have changed
since they were wrapped are looked at: values built before may well repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from layerzero.step.handle import FlatParamHandle

_NUM_COMPARED = 8
"""Elements at the beginning of each part that must be equal, and not all the same number."""
_NUM_SAMPLES = 64
"""Elements of a shard by which it is recognised."""
_MOST_SHARDS = 16
"""Shards that are looked at: what all ranks do shows in a few."""


class _Head(NamedTuple):
    """How the first random part of a shard begins."""

    shard: int
    fqn: str
    values: tuple[float, ...]


class EqualDraws:
    """Looks at flat parameters in the first training forward."""

    def __init__(self, handles: Sequence[FlatParamHandle]) -> None:
        """Notes what the shards of these hold. Does not block the host."""
        self._samples = {handle: _sample(handle) for handle in handles if _num_shards(handle) > 1}
        self._seen: dict[FlatParamHandle, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(self, handle: FlatParamHandle) -> None:
        """`handle` is unsharded, in the first training forward. Does not block the host."""
        if handle in self._samples and handle not in self._seen:
            full = handle.full.data
            # Slices: indices would have to be copied to the device, which blocks the host.
            heads = [full[place : place + _NUM_COMPARED] for _, _, place in _parts(handle)]
            if heads:
                self._seen[handle] = _sample(handle), torch.stack(heads)

    def found(self) -> str | None:
        """What to warn of, the same on ranks whose shards have changed alike. Blocks the host."""
        # Each rank's first draw gives the same numbers, and each flat parameter's may: until then
        # ranks have drawn equally many, unless one had fewer random parameters in its shards.
        first_of_all: dict[int, _Head] = {}
        for handle, sample in self._samples.items():
            if handle not in self._seen or not handle.full.dtype.is_floating_point:
                continue
            now, heads = self._seen[handle]
            if torch.equal(now, sample):
                continue
            firsts: dict[int, _Head] = {}
            for (shard, index, _), head in zip(_parts(handle), heads.tolist(), strict=True):
                if len(set(head)) > 1:  # Else a constant, such as zeros.
                    firsts.setdefault(shard, _Head(shard, handle.fqns[index], tuple(head)))
            for shard, head in firsts.items():
                first_of_all.setdefault(shard, head)
            text = _equal_heads(firsts.values())
            if text is not None:
                return text
        return _equal_heads(first_of_all.values())


def _num_shards(handle: FlatParamHandle) -> int:
    return handle.layout.padded_numel // max(handle.main_shard.numel(), 1)


def _sample(handle: FlatParamHandle) -> torch.Tensor:
    shard = handle.main_shard.detach()
    return shard[:: max(shard.numel() // _NUM_SAMPLES, 1)].clone()


def _parts(handle: FlatParamHandle) -> Iterator[tuple[int, int, int]]:
    """(shard, parameter, place in the full buffer) of each part that is long enough."""
    numel = handle.main_shard.numel()
    for index, (start, length) in enumerate(
        zip(handle.layout.starts, handle.layout.numels, strict=True)
    ):
        end = -(-(start + length) // numel)
        for shard in range(start // numel, min(end, _MOST_SHARDS)):
            first, last = max(start, shard * numel), min(start + length, (shard + 1) * numel)
            if last - first >= _NUM_COMPARED:
                yield shard, index, first


def _equal_heads(heads: Iterable[_Head]) -> str | None:
    first_with: dict[tuple[float, ...], _Head] = {}
    for head in heads:
        other = first_with.setdefault(head.values, head)
        if other is not head:
            return (
                f"the parts of {other.fqn!r} in shard {other.shard} and of {head.fqn!r} in shard "
                f"{head.shard} begin with the same numbers, and were written after the model was "
                "wrapped. If they were drawn there with one seed on all ranks: a rank holds only "
                "its part of each parameter, and drew the same numbers for another part. "
                "Initialise before wrapping, with param_init_fn, or inside summon_full_params()"
            )
    return None
