"""Checks that all ranks start with the same values of parameters and buffers.

Note [Digests]
    Each rank cuts its shard out of its own values, so ranks that drew different random numbers
    would train a mosaic of their models. Every rank takes a digest of the bits of every parameter
    and buffer when construction reads them anyway. The first rank's digests are broadcast, and each
    rank compares its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerzero import ops
from layerzero.comm.collectives import broadcast_from_first
from layerzero.comm.gather_texts import gather_texts
from layerzero.comm.pending import Operation
from layerzero.flat.groups import ShardGroup
from layerzero.flat.placement import Placement
from layerzero.flat.tensor_parallel import local_of

_VALUES = Operation("exchange", "initial values", 0)


def broadcast_text(
    text: str, axes: Sequence[ShardGroup], device: torch.device, operation: Operation
) -> str:
    """The first rank's `text`. Collective over `axes`, inner first."""
    data = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], device=device)
    groups = [axis for axis in axes if axis.size > 1]
    broadcast_from_first(size, groups, lambda _: operation)
    received = torch.zeros(int(size), dtype=torch.uint8, device=device)
    received[: data.numel()] = data[: received.numel()]
    broadcast_from_first(received, groups, lambda _: operation)
    return bytes(received.tolist()).decode().rstrip("\n")


class Digests:
    """Digests of this rank's parameters and buffers at construction; see Note [Digests]."""

    def __init__(self, device: torch.device, is_needed: bool) -> None:
        """`is_needed`: False if all values come from one rank (`sync_module_states`)."""
        self._device = device
        self._is_needed = is_needed
        self._by_placement: dict[int, tuple[Placement, list[str], list[torch.Tensor | int]]] = {}

    def note(self, label: str, value: torch.Tensor, placement: Placement) -> None:
        """Add a tensor that all ranks of `placement` have. Not collective."""
        if self._is_needed and placement.groups:
            entry = self._by_placement.setdefault(id(placement), (placement, [], []))
            entry[1].append(label)
            entry[2].append(digest(value))

    def first_difference(self) -> str | None:
        """The first difference from the first rank, encoded for `settle`; None if there is none.

        Collective over every placement's groups; blocks the host.
        """
        found: str | None = None
        for placement, labels, digests in self._by_placement.values():
            own = torch.stack(
                [torch.as_tensor(each, dtype=torch.int64, device=self._device) for each in digests]
            )
            theirs = own.clone()
            broadcast_from_first(theirs, placement.groups, lambda _: _VALUES)
            # The CPU and a device compute different digests of one value, with different signs.
            differs = (own != theirs) & ((own < 0) == (theirs < 0))
            indices = differs.nonzero().view(-1).tolist()
            if indices and found is None:
                found = f"{indices[0]:09d}\0{labels[indices[0]]}\0{len(indices)} of {len(labels)}"
        return found


def settle(
    failure: Exception | None, digests: Digests, placement: Placement, device: torch.device
) -> str | None:
    """Make construction succeed or fail on all ranks together. Collective over the model's ranks.

    Args:
        failure: this rank's initialisation error, if any.
        placement: placement of the whole model.

    Returns:
        A warning, the same on every rank, if ranks do not start from the same values.

    Raises:
        Exception: `failure`; a rank without one raises ValueError with the first failed rank's.
    """
    difference = digests.first_difference()
    text = difference if failure is None else f"\0{type(failure).__name__}: {failure}"
    texts = gather_texts(text, placement.rank, placement.groups, device, "initial values")
    failed = [(rank, each[1:]) for rank, each in texts.items() if each.startswith("\0")]
    if failure is not None:
        raise failure
    if failed:
        rank, text = failed[0]
        raise ValueError(f"rank {rank} could not initialise the model: {text}")
    if not texts:
        return None
    order, label, count = min(each.split("\0") for each in texts.values())
    ranks = [rank for rank, each in texts.items() if each.split("\0")[:2] == [order, label]]
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return (
        f"{label} differs between ranks: on {'ranks' if len(ranks) > 1 else 'rank'} {listed} its "
        f"values differ from those on the first rank of the group, as do those of {count} "
        "parameters and buffers there. The shards of different models would be mixed; use one seed "
        "on all ranks before building the model, or pass sync_module_states=True"
    )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
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
        return ops.crc32(value.view(torch.uint8)) if value.numel() else 0
    return device_digest(value)


def device_digest(value: torch.Tensor) -> torch.Tensor:
    """The digest of a 1-D tensor on a device, computed in chunks to bound its memory."""
    bits = value.view(_INTEGERS[value.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, bits.numel(), _CHUNK_NUMEL):
        chunk = bits[start : start + _CHUNK_NUMEL].to(torch.int64)
        places = torch.arange(start, start + chunk.numel(), device=value.device)
        total += ((chunk + places * 2 + 1) * (places * _MIXING | 1)).sum()
    return total | torch.iinfo(torch.int64).min
