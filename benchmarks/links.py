"""Alpha and bandwidth of the links between ranks on this machine, for `alpha_beta`.

Each rank swaps messages of two sizes with a peer, point to point as the engine does on gloo; a line
through both times gives the two figures. On one machine a link consists of memory and cores, so it
is slower when all ranks use it at once, as they do in a step.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from alpha_beta import Link
from common import max_over_ranks

SMALL_NBYTES, LARGE_NBYTES = 4 << 10, 8 << 20


def measure_links(inner_size: int, rounds: int) -> dict[str, Link]:
    """Measure the links. Collective over all ranks, which form two shard groups.

    Returns:
        "alone": between the first two ranks while the others wait. With all ranks at once: "inner",
        with a neighbour in the shard group, if there is one; "outer", with the outer peer.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    links = {"alone": _fit(1 - rank if rank < 2 else None, rounds)}
    if inner_size > 1:
        start = rank // inner_size * inner_size
        links["inner"] = _fit(start + (rank - start ^ 1), rounds)
    links["outer"] = _fit((rank + world_size // 2) % world_size, rounds)
    return links


def _fit(peer: int | None, rounds: int) -> Link:
    small_s, large_s = _swap_s(peer, SMALL_NBYTES, rounds), _swap_s(peer, LARGE_NBYTES, rounds)
    bandwidth = (LARGE_NBYTES - SMALL_NBYTES) / (large_s - small_s)
    return Link(alpha_s=small_s - SMALL_NBYTES / bandwidth, bandwidth=bandwidth)


def _swap_s(peer: int | None, nbytes: int, rounds: int, repeats: int = 8) -> float:
    """Median seconds of one swap on the slowest rank; a rank without a peer waits."""
    given = torch.ones(nbytes, dtype=torch.uint8)
    received = torch.empty_like(given)
    times = []
    for _ in range(1 + rounds):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(0 if peer is None else repeats):
            send = dist.isend(given, peer)
            dist.recv(received, peer)
            send.wait()
        times.append(max_over_ranks((time.perf_counter() - start) / repeats))
    return statistics.median(times[1:])
