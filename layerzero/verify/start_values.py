"""Compares the values that ranks start from.

Each rank cuts its shard out of its own values, so ranks that drew different random numbers would
train a mosaic of their models. Every rank takes a digest of the bits of every parameter and buffer
when construction reads them anyway; then ranks exchange a hash of all digests, and these only if
hashes differ.
"""

from __future__ import annotations

import torch

from layerzero.build.compare import Exchange, hash_of
from layerzero.flat.placement import Placement
from layerzero.flat.tensor_parallel import local_of
from layerzero.notices import some_ranks, warn_once
from layerzero.ops.reference import bits_of
from layerzero.step.extension import Extension
from layerzero.step.root import RootState
from layerzero.verify.checksums import run_crc32

_WHAT = "initial values"


class StartValues(Extension):
    """Warns if ranks of a model, whose values come from no single rank, start from others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_placement: dict[int, tuple[Placement, list[str], list[torch.Tensor | int]]] = {}

    def has_value(self, label: str, value: torch.Tensor, placement: Placement) -> None:
        if placement.groups:
            entry = self._by_placement.setdefault(id(placement), (placement, [], []))
            entry[1].append(label)
            entry[2].append(digest(value))

    def built(self, root: RootState) -> None:
        if not self._by_placement or any(unit.was_built_empty for unit in root.units):
            return
        placement = next(iter(self._by_placement.values()))[0]
        whole = placement.data_parallel or placement
        texts = Exchange(whole.groups, self._device, _WHAT).texts(self._first_difference())
        if not texts:
            return
        order, label, count = min(each.split("\0") for each in texts.values())
        ranks = [rank for rank, each in texts.items() if each.split("\0")[:2] == [order, label]]
        warn_once(
            f"{label} differs between ranks: on {some_ranks(ranks)} its values are not those of "
            f"the first rank of the group ({count} parameters and buffers differ there). The model "
            "is a mixture of shards of different models; build it with one seed and the same "
            "random calls on all ranks, or pass sync_module_states=True",
            is_first=whole.is_first,
        )

    def _first_difference(self) -> str | None:
        """The number of the first tensor that is not the first rank's, its name, and how many are
        not; None if all are. Collective over every placement's groups; blocks the host."""
        found: str | None = None
        for placement, labels, digests in self._by_placement.values():
            exchange = Exchange(placement.groups, self._device, _WHAT)
            own = torch.stack(
                [torch.as_tensor(each, dtype=torch.int64, device=self._device) for each in digests]
            ).tolist()
            low, high = exchange.bounds(hash_of(own))
            pairs = zip(own, exchange.first(own) if low != high else own, strict=True)
            # The CPU and a device compute different digests of one value, with different signs.
            differs = [one != other and (one < 0) == (other < 0) for one, other in pairs]
            if found is None and any(differs):
                index = differs.index(True)
                found = f"{index:09d}\0{labels[index]}\0{sum(differs)} of {len(labels)}"
        return found


_CHUNK_NUMEL = 1 << 22
_MIXING = 0x5851F42D4C957F2D
"""Odd, so that multiplication modulo 2**64 loses no bit (Knuth's 64-bit multiplier)."""


def digest(tensor: torch.Tensor) -> torch.Tensor | int:
    """A 64-bit digest of every element and its position. Does not block the host.

    Not negative for a tensor on the CPU, negative for one on a device.
    """
    value = local_of(tensor)
    if value.layout is not torch.strided or value.is_quantized:
        return 0
    if value.is_complex():
        value = torch.view_as_real(value)
    value = value.contiguous().view(-1)
    if value.device.type == "cpu":
        crc: int = run_crc32(value.view(torch.uint8)) if value.numel() else 0
        return crc
    return device_digest(value)


def device_digest(value: torch.Tensor) -> torch.Tensor:
    """The digest of a 1-D tensor on a device, computed in chunks to bound its memory."""
    bits = bits_of(value)
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, bits.numel(), _CHUNK_NUMEL):
        chunk = bits[start : start + _CHUNK_NUMEL].to(torch.int64)
        places = torch.arange(start, start + chunk.numel(), device=value.device)
        total += ((chunk + places * 2 + 1) * (places * _MIXING | 1)).sum()
    return total | torch.iinfo(torch.int64).min
