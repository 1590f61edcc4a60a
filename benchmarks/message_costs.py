"""What messages cost between ranks of this machine, for `simulator.py`.

gloo copies a message on a thread of each process, so it costs core seconds on both sides: some for
each message, some for each byte. They are counted while all ranks exchange messages with all
others, as the engine does in a collective. Elapsed time would depend on what else the cores do; it
is measured only for the latency: what remains of the time of a small message between two ranks
while others wait.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from common import Spread
from simulator import Link, MessageCosts

SMALL_NBYTES, LARGE_NBYTES = 4 << 10, 1 << 20
_SETTLED_S = 0.002
"""By then gloo's threads have nothing left to do."""


def measure_costs(rounds: int) -> tuple[MessageCosts, Link]:
    """Measure the costs of messages and the link. Collective over all ranks."""
    posts, ends = _core_s(SMALL_NBYTES, rounds)
    large = sum(_core_s(LARGE_NBYTES, rounds))
    per_byte = max(0.0, large - posts - ends) / (LARGE_NBYTES - SMALL_NBYTES)
    # The two ends of a message cost about as much as each other.
    costs = MessageCosts(posts, ends, per_byte, ends, per_byte)
    on_the_way = 2 * (costs.post_s + costs.send_s)
    return costs, Link(latency_s=max(0.0, _elapsed_alone(rounds) - on_the_way))


def _core_s(nbytes: int, rounds: int) -> tuple[float, float]:
    """Core seconds of one end of a message: of the thread that posts it and waits for it, and of
    all other threads. The mean over ranks of each one's lower quartile.

    Not the median: where all ranks post at the same moment, gloo's thread often takes the core from
    one that holds a lock of gloo, and spins for a time slice. In a step that is rare.
    """
    found = []
    for number in range(4 * (1 + rounds)):
        dist.barrier()
        time.sleep(_SETTLED_S)
        start = time.thread_time(), time.process_time()
        _exchange(nbytes, 1 + number)
        poster = time.thread_time() - start[0]
        time.sleep(_SETTLED_S)
        found.append((poster, time.process_time() - start[1] - poster))
    ends = 2 * (dist.get_world_size() - 1)
    quartiles = [Spread.of(values).low / ends for values in zip(*found[4:], strict=True)]
    means = torch.tensor(quartiles, dtype=torch.float64)
    dist.all_reduce(means)
    poster, others = (means / dist.get_world_size()).tolist()
    return poster, others


def _exchange(nbytes: int, tag: int) -> None:
    """A message to each other rank, in the order of `layerzero.comm.collectives`."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    sends, receives = [], []
    given = torch.empty(nbytes, dtype=torch.uint8)
    for step in range(1, size):
        sends.append(group.send([given], (rank + step) % size, tag))
        # New memory, as the engine's.
        receives.append(group.recv([torch.empty_like(given)], (rank - step) % size, tag))
    for work in (*receives, *sends):
        work.wait()


def _elapsed_alone(rounds: int, messages: int = 32) -> float:
    """Median seconds of a small message between the first two ranks, one way."""
    rank, token = dist.get_rank(), torch.ones(1)
    calls: Sequence[Callable[..., object]] = [dist.send, dist.recv]
    times = []
    for _ in range(1 + rounds):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(messages if rank < 2 else 0):
            for call in calls if rank == 0 else reversed(calls):
                call(token, 1 - rank)
        times.append((time.perf_counter() - start) / messages / 2)
    found = torch.tensor([statistics.median(times[1:])], dtype=torch.float64)
    dist.broadcast(found, 0)
    return found.item()
