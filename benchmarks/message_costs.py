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

from layerzero.comm.gloo.loop_threads import wake_without_preempting

SMALL_NBYTES, LARGE_NBYTES = 256 << 10, 2 << 20
"""As in a step. Ranks that post empty messages at the same moment make gloo spin far more."""


def measure_costs(rounds: int) -> tuple[MessageCosts, Link]:
    """Measure the costs of messages and the link. Collective over all ranks."""
    wake_without_preempting()  # as under the engine
    small, large = _core_s(SMALL_NBYTES, rounds), _core_s(LARGE_NBYTES, rounds)
    pairs = [*zip(small, large, strict=True)]
    slopes = [(b - a) / (LARGE_NBYTES - SMALL_NBYTES) for a, b in pairs]
    posts, ends = (
        max(0.0, a - slope * SMALL_NBYTES) for (a, _), slope in zip(pairs, slopes, strict=True)
    )
    # The two ends of a message cost about as much as each other; which thread of a process copies
    # it makes no difference to the cores.
    per_byte = max(0.0, sum(slopes))
    costs = MessageCosts(posts, ends, per_byte, ends, per_byte)
    return costs, Link(_latency_s(rounds))


def _core_s(nbytes: int, rounds: int) -> tuple[float, float]:
    """Core seconds of one end of a message: of the thread that posts it and waits for it, and of
    all other threads. The mean over ranks of each one's median exchange."""
    alone: list[float] = []
    posters: list[float] = []
    others: list[float] = []
    for number in range(8 * (1 + rounds)):
        alone.append(_beside_compute(None, number)[0])
        poster, rest = _beside_compute(nbytes, number)
        posters.append(poster)
        others.append(rest)
    ends = 2 * (dist.get_world_size() - 1)
    medians = [statistics.median(values[8:]) / ends for values in (alone, posters, others)]
    means = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(means)
    compute, poster, rest = (means / dist.get_world_size()).tolist()
    return max(0.0, poster - compute), rest


def _beside_compute(nbytes: int | None, tag: int) -> tuple[float, float]:
    """Core seconds of this thread and of all others for some compute beside an exchange; None:
    without it."""
    x, weight = torch.ones(64, 512), torch.ones(512, 1536)
    start = time.thread_time(), time.process_time()
    works = [] if nbytes is None else _exchange(nbytes, 1 + tag)
    for _ in range(2):
        x @ weight
    for work in works:
        work.wait()
    poster, process = time.thread_time() - start[0], time.process_time() - start[1]
    return poster, process - poster


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
