"""Sends patches as bytes to one other process: a rank, or one outside of the process group.

A channel has `send_bytes` and `recv_bytes`. Those of `multiprocessing.connection` (a pipe, or a
`Client` and a `Listener` over sockets) are channels as they are; `RankChannel` is one to a rank.
What travels is JSON and raw numbers: nothing that is received is executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from layerzero.checkpoint.delta.packing import Chain, chain_from, chain_of, pack, row_of, unpack
from layerzero.checkpoint.delta.patch import DeltaError, Patch

_CHAIN, _PATCH, _END = b"C", b"P", b"E"
_LENGTH_NBYTES = 4


class Channel(Protocol):
    """A connection on which whole messages arrive in order."""

    def send_bytes(self, buf: bytes, /) -> None: ...

    def recv_bytes(self) -> bytes: ...


def send_patches(patches: Iterable[Patch], channel: Channel) -> int:
    """Send a round: the patches of `DeltaStream.changes()` or `full()`, and then an end.

    Each patch is sent before the next one is asked for. Blocks until all of them were handed over.

    Returns:
        The number of bytes sent.

    Raises: what the channel does; the round is then interrupted, and the next one repeats the patch
        that was being sent.
    """
    nbytes = number = 0
    chain: Chain | None = None

    def send(message: bytes) -> None:
        nonlocal nbytes
        nbytes += len(message)
        channel.send_bytes(message)

    for patch in patches:
        row, data = pack(patch)
        if chain != chain_of(patch):
            chain = chain_of(patch)
            send(_CHAIN + _encode(chain))
        head = _encode(row)
        send(_PATCH + len(head).to_bytes(_LENGTH_NBYTES, "little") + head + data)
        number += 1
    send(_END + _encode([number]))
    return nbytes


def receive_patches(channel: Channel) -> Iterator[Patch]:
    """Yield the patches of one round as they arrive, until its end.

    Blocks for each message.

    Raises:
        DeltaError: a message is damaged, or the number of patches is wrong.
        EOFError: the connection closed before the end of the round.
    """
    chain: Chain | None = None
    number = 0
    while True:
        message = channel.recv_bytes()
        kind, body = message[:1], memoryview(message)[1:]
        try:
            if kind == _END:
                (sent,) = json.loads(bytes(body))
                break
            if kind == _CHAIN:
                chain = chain_from(json.loads(bytes(body)))
                continue
            if kind != _PATCH or chain is None:
                raise ValueError(f"unexpected kind {kind!r}")
            end = _LENGTH_NBYTES + int.from_bytes(body[:_LENGTH_NBYTES], "little")
            row = row_of(json.loads(bytes(body[_LENGTH_NBYTES:end])))
            patch = unpack(row, chain, body[end:])
        except DeltaError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise DeltaError(f"receive_patches: a damaged message: {error!r:.300}") from error
        number += 1
        yield patch
    if sent != number:
        raise DeltaError(f"receive_patches: {number} patches arrived of {sent} that were sent")


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


class RankChannel:
    """A channel to one rank of a process group, by point-to-point messages of that group."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None = None) -> None:
        """
        Args:
            rank: global rank of the other end, which has a `RankChannel` to this one.
            group: has both ranks, and should be used for nothing else meanwhile; None: the default
                group.

        Raises:
            ValueError: `rank` is not in the group, or is this rank.
        """
        own = group if group is not None else dist.group.WORLD
        assert own is not None, "torch.distributed is initialised"
        if rank not in dist.get_process_group_ranks(own) or rank == dist.get_rank():
            raise ValueError(
                f"RankChannel: expected another rank of the group "
                f"{dist.get_process_group_ranks(own)}, got {rank} on rank {dist.get_rank()}"
            )
        self._rank = rank
        self._group = own
        self._device = _device_of(own)

    def send_bytes(self, buf: bytes, /) -> None:
        for data in (len(buf).to_bytes(8, "little"), buf):
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.send(tensor.to(self._device), self._rank, self._group)

    def recv_bytes(self) -> bytes:
        length = int.from_bytes(self._receive(8), "little")
        return self._receive(length)

    def _receive(self, nbytes: int) -> bytes:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        dist.recv(tensor, self._rank, self._group)
        return tensor.cpu().numpy().tobytes()


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """The CPU where the group has a backend for it, else the accelerator."""
    devices = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    accelerator = torch.accelerator.current_accelerator()
    if "cpu" in devices or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
