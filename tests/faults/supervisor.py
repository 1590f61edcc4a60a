"""Starts the ranks of worker.py, kills one at random moments, and starts them all again.

It does what torchrun does with `--max-restarts`: it serves the store, sets the same environment,
ends all ranks when one fails, and starts them once more. Its ranks are forked with torch loaded, so
that a restart takes a fraction of a second instead of several.
"""

import math
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from tests.faults.worker import train
from tests.harness.ranks import context, server_finds_the_repository

_STUCK_S = 120.0
"""After which ranks that neither end nor are killed count as a hang."""


@dataclass
class Report:
    """What became of one run."""

    kills: int = 0
    restarts: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def supervise(
    folder: Path,
    num_steps: Callable[[int], int],
    world_size: int,
    kills: int,
    mean_s: float,
    generator: random.Random,
    pause_s: float = 0.0,
    limit_s: float = math.inf,
) -> Report:
    """Train up to `num_steps(kills left)` steps; kill one rank `kills` times on the way.

    Args:
        mean_s: mean time from the start of the ranks to the kill; exponentially distributed.
        limit_s: after which nobody is killed any more.
    """
    report = Report()
    start = time.monotonic()
    while not report.problems:
        # A new one for each attempt, as torchrun does: the old one has the addresses of dead ranks.
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(60), wait_for_workers=False)
        attempt = report.restarts
        if time.monotonic() - start > limit_s:
            kills = report.kills
        delay = generator.expovariate(1 / mean_s) if report.kills < kills else math.inf
        with server_finds_the_repository():
            ranks = [
                _start(
                    folder,
                    num_steps(kills - report.kills),
                    pause_s,
                    (rank, world_size, store.port, attempt),
                )
                for rank in range(world_size)
            ]
        was_killed = _watch(ranks, delay, generator, report)
        _end(ranks)
        if not was_killed and not report.problems:
            break
        report.kills += was_killed
        report.restarts += 1
    report.seconds = time.monotonic() - start
    return report


Place = tuple[int, int, int, int]
"""Rank, world size, port of the store, number of the attempt."""


def _start(folder: Path, num_steps: int, pause_s: float, place: Place) -> BaseProcess:
    process = context.Process(target=_work, args=(folder, num_steps, pause_s, place), daemon=True)
    process.start()
    return process


def _work(folder: Path, num_steps: int, pause_s: float, place: Place) -> None:
    rank, world_size, port, attempt = place
    signal.alarm(int(_STUCK_S) + 600)  # Nothing survives its supervisor for long.
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(attempt),
        GLOO_SOCKET_IFNAME="lo",
    )
    log = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    torch.set_num_threads(1)
    train(folder, num_steps, pause_s)
    os._exit(0)


def _watch(
    ranks: list[BaseProcess], delay: float, generator: random.Random, report: Report
) -> bool:
    """Wait until all ranks have ended, or kill one after `delay` seconds; whether that happened."""
    start = time.monotonic()
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        elapsed = time.monotonic() - start
        if elapsed > delay:
            victim = generator.choice(ranks)
            is_alive = victim.exitcode is None
            victim.kill()
            return is_alive
        if delay == math.inf and elapsed > _STUCK_S + 600:
            report.problems.append("the ranks hang")
            return False
        for sentinel in wait(list(running), min(delay - elapsed, 1.0)):
            code = running.pop(sentinel).exitcode
            if code:
                report.problems.append(f"a rank ended with exit code {code}, and nobody killed it")
                return False
    return False


def _end(ranks: list[BaseProcess]) -> None:
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.join(5.0)
        if rank.exitcode is None:
            rank.kill()
            rank.join()
