"""This process's connections to other ranks: slowed, cut, or left with a message half sent.

gloo hides its sockets, so they are found among the process's files. Each operation works on a
duplicate of the descriptor, which is the same socket. Linux only.
"""

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator

_SIOCOUTQ = 0x5411
_SO_MAX_PACING_RATE = 47
_BYTES_ACKED = 120
"""Offset of `tcpi_bytes_acked` in the kernel's `struct tcp_info`."""
_SLOW = 50_000
_FAST = 2**31 - 1
_SEND_BUFFER = 16_384
"""So small that the kernel holds only a part of a message when its sender is killed."""


def connections() -> list[socket.socket]:
    """Connected TCP sockets of this process, except those to torch's store."""
    return [each for each in _sockets() if _store_port() not in _ports(each)]


def _sockets() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found = socket.socket(fileno=os.dup(int(name)))
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    found.getpeername()  # A listening socket has none.
                    yield found


def _ports(each: socket.socket) -> tuple[int, int]:
    return each.getsockname()[1], each.getpeername()[1]


def _store_port() -> int | None:
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


def slow_down() -> None:
    """Let each connection send 50 kB a second, and the kernel take little ahead of that."""
    for each in connections():
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        each.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _SLOW)


def speed_up() -> None:
    for each in connections():
        each.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _FAST)


def stall() -> None:
    """Let nothing more out, as a network that is gone; the connections stay open."""
    for each in connections():
        each.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 1)


def wait_until_half_sent(limit_s: float = 2.0) -> bool:
    """Block until a part of a message has arrived at a peer, and another part waits here.

    Returns:
        Whether that happened within the limit; not if this rank has nothing to send.
    """
    links = connections()
    before = [_acknowledged(each) for each in links]
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for each, start in zip(links, before, strict=True):
            if _waiting(each) and _acknowledged(each) > start:
                return True
        time.sleep(0.005)
    return False


def _waiting(each: socket.socket) -> int:
    return int(struct.unpack("i", fcntl.ioctl(each.fileno(), _SIOCOUTQ, b"\0" * 4))[0])


def _acknowledged(each: socket.socket) -> int:
    info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
    return int(struct.unpack_from("Q", info, _BYTES_ACKED)[0])


def send_part_of_a_header() -> None:
    """What a message too small to be cut in two can leave behind: fewer bytes than its header."""
    for each in connections():
        with contextlib.suppress(OSError):
            each.send(b"\0" * 7)


def close_one(number: int) -> None:
    """Cut one connection in both directions; the process lives on."""
    links = connections()
    links[number % len(links)].shutdown(socket.SHUT_RDWR)
