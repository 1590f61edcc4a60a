"""Shared by all benchmarks: interleaved rounds, medians with spread, ranks, environment."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pickle
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.distributed.fake_pg import FakeStore

from layerzero.comm.gloo import threads as loop_threads


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in asdict(self).items()}


class Interval(NamedTuple):
    """A median, and bounds between which it lies with 95 % (bootstrap)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], resamples: int = 2000) -> Interval:
        generator = random.Random(0)
        medians = sorted(
            statistics.median(generator.choices(values, k=len(values))) for _ in range(resamples)
        )
        low, high = medians[resamples // 40], medians[-resamples // 40]
        return cls(statistics.median(values), low, high)

    def text(self) -> str:
        return f"{self.median:.4f} ({self.low:.4f}-{self.high:.4f})"


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, in ranks that start later, instead of giving it back.

    Else a step of any model takes up to thousands of fresh pages, by where its buffers happen to
    lie. Arenas of other threads than the main one give memory back whatever the thresholds.
    """
    os.environ["MALLOC_ARENA_MAX"] = "1"
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        os.environ[name] = "2000000000"


def let_gloo_wait(waits: bool) -> None:
    """Have the threads of gloo's sockets wait for a core when they wake, or take one.

    Wrapping a model with layerzero has them wait, for all that this process runs afterwards;
    without it they take one (layerzero/comm/gloo/threads.py). Engines that are compared in one
    process each get what their users have.
    """
    if sys.platform.startswith("linux"):
        for thread in loop_threads._loop_threads():
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    if waits:
        loop_threads.wake_without_preempting()


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """The spread of the ratios within rounds, in which both saw the same disturbances."""
    return Spread.of([a / b for a, b in zip(numerators, denominators, strict=True)])


def difference(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """`left - right`, round by round."""
    return [a - b for a, b in zip(left, right, strict=True)]


def interleave(
    names: Sequence[str], measure: Callable[[str], float], rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Measure each name once in each round, in an order that changes but is equal on all ranks.

    So a lasting disturbance affects every name, and no name always follows the same other one.

    Returns:
        For each name, one value for each round, without the `warmup` rounds.
    """
    results: dict[str, list[float]] = {name: [] for name in names}
    generator = random.Random(0)
    for index in range(warmup + rounds):
        order = list(names)
        generator.shuffle(order)
        for name in order:
            value = measure(name)
            if index >= warmup:
                results[name].append(value)
    return results


def max_over_ranks(value: float) -> float:
    """The largest value of all ranks. Collective over the default group."""
    values = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.item()


STATE_NBYTES = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1 + 4 / 256}
"""Of an element of a state, by the names of `layerzero.optim`; 8 bits: with its part of a scale."""


def step_nbytes(state: str) -> tuple[float, float]:
    """Bytes of an element that one AdamW step of a float32 parameter must read and write: the
    parameter, the gradient (read) and two states."""
    states = 2 * STATE_NBYTES[state]
    return 4 + 4 + states, 4 + states


def environment() -> dict[str, Any]:
    """The machine and the versions that a number was measured with."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def add_engine_flag(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    parser.add_argument(
        "--engines",
        type=lambda text: _known(parser, text.split(","), names),
        default=",".join(names),
        help=f"comma-separated, of {','.join(names)} (default: all of them)",
    )


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells))


def print_json(result: Mapping[str, Any]) -> None:
    """Print the result as JSON, the last line of a benchmark's output."""
    print(json.dumps(result), flush=True)


def run_on_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, backend: str = "gloo"
) -> list[Any]:
    """Call `fn(*args)` on ranks with one thread each; returns the results in rank order.

    `fn` must be a module-level function. If a rank fails, the others are ended and its error is
    raised.

    Args:
        backend: "gloo", or "fake": each rank is alone, in a group that moves no bytes.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        given = (world_size, folder, backend, fn, args)
        torch.multiprocessing.spawn(_rank_main, given, nprocs=world_size)
        return [
            pickle.loads(Path(folder, f"result_{rank}").read_bytes()) for rank in range(world_size)
        ]


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    backend: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    torch.set_num_threads(1)
    store = FakeStore() if backend == "fake" else dist.FileStore(f"{folder}/store", world_size)
    with loopback():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    result = fn(*args)
    Path(folder, f"result_{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def loopback() -> Iterator[None]:
    """Make gloo use the loopback interface, if there is one and no other was requested."""
    interfaces = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if interfaces:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interfaces.pop())
    yield


def _known(parser: argparse.ArgumentParser, chosen: list[str], names: Sequence[str]) -> list[str]:
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.error(f"no engine {', '.join(unknown)}; there are {', '.join(names)}")
    if "layerzero" in chosen and importlib.util.find_spec("layerzero") is None:
        parser.error("layerzero is not installed here: install it, or choose others by --engines")
    return chosen


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Commit of the checkout that this file is in; with "+" if files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        folder = Path(__file__).parent
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    return None
