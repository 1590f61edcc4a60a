"""Shared by all benchmarks: options, ranks, rounds in turns, medians with spread, the result.

A benchmark begins with `options(__doc__, ...)`, measures in `take_turns` (on ranks) or
`interleave`, shows `print_table`s, and ends with `print_result`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
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
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.distributed.fake_pg import FakeStore

from layerzero.comm.gloo import threads as loop_threads

T = TypeVar("T")
SIZES = dict(tiny=(64, 2), **{"6m": (256, 8), "25m": (512, 8), "56m": (768, 8), "100m": (1024, 8)})
"""Width and layers of the transformer."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "size": {"choices": SIZES},
    "width": {"type": int},
    "layers": {"type": int},
    "units": {"type": int},
    "batch": {"type": int, "help": "sequences a rank"},
    "length": {"type": int, "help": "bytes in a sequence"},
    "world_size": {"type": int},
    "world_sizes": {"type": int, "nargs": "+"},
    "rounds": {"type": int},
    "steps": {"type": int, "help": "of each in a round"},
}


def options(
    doc: str | None, engines: Sequence[str] = (), **defaults: Any
) -> argparse.ArgumentParser:
    """A parser of the usual options that `defaults` names, and of `--engines` if there are some."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if engines:
        parser.add_argument(
            "--engines",
            type=lambda text: _known(parser, text.split(","), engines),
            default=list(engines),
            help=f"comma-separated, of {','.join(engines)} (default: all of them)",
        )
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **_OPTIONS[name])
    return parser


def print_result(args: argparse.Namespace, **result: Any) -> None:
    """Print the result as JSON, the last line of a benchmark's output."""
    config = {name: value for name, value in vars(args).items() if name != "measure"}
    name = Path(sys.argv[0]).stem.removeprefix("bench_")
    print_json({"benchmark": name, **result, "config": config, "environment": environment()})


def print_json(result: Mapping[str, Any]) -> None:
    print(json.dumps(result, default=str), flush=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


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


def spreads(values: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """The spread of each, for JSON."""
    return {name: Spread.of(each).as_dict() for name, each in values.items()}


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Of ratios within rounds, in which both saw the same disturbances."""
    return Spread.of([a / b for a, b in zip(numerators, denominators, strict=True)])


def difference(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """`left - right`, round by round."""
    return [a - b for a, b in zip(left, right, strict=True)]


STATE_NBYTES = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1 + 4 / 256}
"""Of an element of a state, by the names of `layerzero.optim`; 8 bits: with its part of a scale."""


def step_nbytes(state: str) -> tuple[float, float]:
    """Bytes of an element that one AdamW step of a float32 parameter must read and write: the
    parameter, the gradient (read) and two states."""
    states = 2 * STATE_NBYTES[state]
    return 4 + 4 + states, 4 + states


def interleave(
    names: Sequence[str], measure: Callable[[str], T], rounds: int, warmup: int = 1
) -> dict[str, list[T]]:
    """Measure each name once in each round, in an order that changes but is equal on all ranks.

    So a lasting disturbance affects every name, and no name always follows the same other one.

    Returns:
        For each name, one value for each round, without the `warmup` rounds.
    """
    results: dict[str, list[T]] = {name: [] for name in names}
    generator = random.Random(0)
    for index in range(warmup + rounds):
        order = list(names)
        generator.shuffle(order)
        for name in order:
            value = measure(name)
            if index >= warmup:
                results[name].append(value)
    return results


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    steps: int = 1,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Time `steps` calls of each name in each round; see `interleave`. Collective.

    Args:
        before: called with the name, untimed.

    Returns:
        By name, milliseconds of a call of the slowest rank in each round.
    """

    def one(name: str) -> float:
        before(name)
        gc.collect()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            calls[name]()
        return max_over_ranks((time.perf_counter() - begin) * 1e3 / steps)

    gc.collect()
    gc.freeze()  # Else each collection looks at all that was imported.
    return interleave(list(calls), one, rounds)


def max_over_ranks(value: float) -> float:
    """The largest value of all ranks. Collective over the default group."""
    values = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.item()


def run_on_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `fn(*args)` on gloo ranks with one thread each; returns the results in rank order.

    `fn` must be a module-level function. If a rank fails, the others are ended and its error is
    raised.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        given = (world_size, folder, fn, args)
        torch.multiprocessing.spawn(_rank_main, given, nprocs=world_size)
        return [
            pickle.loads(Path(folder, f"result_{rank}").read_bytes()) for rank in range(world_size)
        ]


def _rank_main(
    rank: int, world_size: int, folder: str, fn: Callable[..., Any], args: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    # gloo would ask the resolver for the name of the host.
    if interfaces := {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interfaces.pop())
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    result = fn(*args)
    Path(folder, f"result_{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def join_fake_world(ranks: int, threads: int = 1) -> None:
    """Make this process rank 0 of so many ranks, in a group that moves no bytes."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(threads)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def in_own_process(
    *measure: str, command: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Any:
    """What a benchmark prints last with `--measure` and these words, in a process of its own.

    Args:
        command: script and options; empty: those of this process.
    """
    given = [sys.executable, *(command or sys.argv), "--measure", *measure]
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(given, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{' '.join(given[1:])}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


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


def _known(parser: argparse.ArgumentParser, chosen: list[str], names: Sequence[str]) -> list[str]:
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.error(f"no engine {', '.join(unknown)}; there are {', '.join(names)}")
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
