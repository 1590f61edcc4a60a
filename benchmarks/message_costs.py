"""What messages cost between ranks of this machine, for `simulator.py`.

gloo copies a message on a thread of each process, so it costs core seconds on both sides: some for
each message, some for each byte. They are counted while all ranks exchange messages with all others
and compute meanwhile, as in a step: gloo's thread now and then spins, while the thread that holds
its lock waits for a core. Elapsed time would depend on what else the cores do; it is measured only
for the latency: the part of a small message's time, between two ranks while the others wait, in
which neither of them uses a core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from simulator import Link, MessageCosts

SMALL_NBYTES, LARGE_NBYTES = 4 << 10, 1 << 20


def measure_costs(rounds: int) -> tuple[MessageCosts, Link]:
    """Measure the costs of messages and the link. Collective over all ranks."""
    posts, ends = _core_s(SMALL_NBYTES, rounds)
    large = sum(_core_s(LARGE_NBYTES, rounds))
    per_byte = max(0.0, large - posts - ends) / (LARGE_NBYTES - SMALL_NBYTES)
    # The two ends of a message cost about as much as each other.
    costs = MessageCosts(posts, ends, per_byte, ends, per_byte)
    return costs, Link(_latency_s(rounds))


def _core_s(nbytes: int, rounds: int) -> tuple[float, float]:
    """Core seconds of one end of a message: of the thread that posts it and waits for it, and of
    all other threads. The mean over ranks of each one's median round."""
    found = []
    for _ in range(1 + rounds):
        alone, _ = _round(None)
        poster, others = _round(nbytes)
        found.append((poster - alone, others))
    ends = 2 * (dist.get_world_size() - 1)
    medians = [statistics.median(values) / ends for values in zip(*found[1:], strict=True)]
    means = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(means)
    poster, others = (means / dist.get_world_size()).tolist()
    return max(0.0, poster), others


def _round(nbytes: int | None, exchanges: int = 16) -> tuple[float, float]:
    """Core seconds of this thread and of all others for some compute beside an exchange; None:
    without it."""
    x, weight = torch.ones(64, 512), torch.ones(512, 1536)
    dist.barrier()
    start = time.thread_time(), time.process_time()
    for number in range(exchanges):
        works = [] if nbytes is None else _exchange(nbytes, 1 + number)
        for _ in range(2):
            x @ weight
        for work in works:
            work.wait()
    poster, process = time.thread_time() - start[0], time.process_time() - start[1]
    return poster / exchanges, (process - poster) / exchanges


def _exchange(nbytes: int, tag: int) -> list[dist.Work]:
    """Post a message to each other rank, in the order of `layerzero.comm.collectives`."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    sends, receives = [], []
    given = torch.empty(nbytes, dtype=torch.uint8)
    for step in range(1, size):
        sends.append(group.send([given], (rank + step) % size, tag))
        # New memory, as the engine's.
        receives.append(group.recv([torch.empty_like(given)], (rank - step) % size, tag))
    return [*receives, *sends]


def _latency_s(rounds: int, messages: int = 64) -> float:
    """Seconds in which a small message between the first two ranks, one way, uses no core."""
    rank, token = dist.get_rank(), torch.ones(1)
    calls: Sequence[Callable[..., object]] = [dist.send, dist.recv]
    times = []
    for _ in range(1 + rounds):
        dist.barrier()
        start, cores = time.perf_counter(), time.process_time()
        for _ in range(messages // 2 if rank < 2 else 0):
            for call in calls if rank == 0 else reversed(calls):
                call(token, 1 - rank)
        elapsed, used = time.perf_counter() - start, time.process_time() - cores
        both = torch.tensor([elapsed / 2 - used if rank < 2 else 0.0], dtype=torch.float64)
        dist.all_reduce(both)
        times.append(max(0.0, both.item()) / messages)
    return statistics.median(times[1:])
