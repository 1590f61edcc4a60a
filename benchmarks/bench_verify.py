"""What do checked bytes cost? One model with verification "sampled", "always" and turned off.

A transformer on gloo ranks of this machine, AdamW included. One model takes single steps, of each
kind once in a round, in changing order: "off", as without verification; "again", the same once
more; "checked", a step of "always"; "unchecked", one of the seven of eight that "sampled" does not
check. A ratio is within one round, to the mean of "off" and "again"; that of "sampled" is made of
one checked and seven unchecked steps. Given are the median of the rounds and the interval that
holds it with 95 % (bootstrap). "again" to "off" is the control: its interval must hold 1, and is
what a bar has to be compared with.

It is one model, and malloc keeps freed memory, because two equal models differ by more than the
checks cost: by where their memory lies. Time is that of the slowest rank; processor time, user and
system, is that of all ranks, which waits and other processes disturb least.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Interval,
    Spread,
    environment,
    interleave,
    keep_freed_memory,
    max_over_ranks,
    print_json,
    print_table,
    run_on_ranks,
)
from engines import Transformer, TransformerBlock

from layerzero import ZeRO3
from layerzero.step.context import Transport
from layerzero.verify.verifier import Verifier

SIZES = {"tiny": (64, 2), "6m": (256, 8), "25m": (512, 8)}  # width, layers
KINDS = ("off", "again", "unchecked", "checked")
BARS = {"sampled": 1.01, "always": 1.05}
EVERY = 8  # "sampled" checks one step of so many
WARMUP_ROUNDS = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="25m")
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--length", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    keep_freed_memory()
    times = run_on_ranks(args.world_size, measure, args)[0]
    columns = {kind: ratios(values) for kind, values in times.items()}
    rows = []
    for name in columns["elapsed"]:
        cells = [Interval.of(column[name]).text() for column in columns.values()]
        rows.append([name, *cells, str(BARS.get(name, ""))])
    print_table(["verify", *(f"{kind}, ratio" for kind in columns), "bar"], rows)
    for kind, values in times.items():
        print(f"a step without verification, {kind}: {Spread.of(values['off']).text(1)} ms")
    print_json(
        {
            "benchmark": "verify",
            "ratios": {
                f"{name}, {kind}": Interval.of(values)._asdict()
                for kind, column in columns.items()
                for name, values in column.items()
            },
            "off_ms": {kind: Spread.of(values["off"]).as_dict() for kind, values in times.items()},
            "config": vars(args),
            "environment": environment(),
        }
    )


def ratios(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of each round, to steps without verification; and the control."""
    result: dict[str, list[float]] = {"sampled": [], "always": [], "control": []}
    for off, again, unchecked, checked in zip(*(times[kind] for kind in KINDS), strict=True):
        base = (off + again) / 2
        result["sampled"].append((checked + (EVERY - 1) * unchecked) / EVERY / base)
        result["always"].append(checked / base)
        result["control"].append(again / off)
    return result


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Run on each rank: milliseconds of the slowest rank and of all ranks' processors, by kind."""
    model, optimizer, step = make_step(args)
    processor: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def step_ms(kind: str) -> float:
        # What the step before a checked one does; before the others, too, for an equal cache.
        verify(model, "checked")
        root: Any = model._root_state
        root.__dict__["_verifiers"][0].after_step(optimizer)
        verify(model, kind)
        gc.collect()
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        cpu_ms, elapsed_ms = (
            (time.process_time() - cpu_start) * 1e3,
            (time.perf_counter() - start) * 1e3,
        )
        total = torch.tensor([cpu_ms], dtype=torch.float64)
        dist.all_reduce(total)
        processor[kind].append(total.item())
        return max_over_ranks(elapsed_ms)

    gc.disable()
    elapsed = interleave(list(KINDS), step_ms, args.rounds, warmup=WARMUP_ROUNDS)
    kept = {kind: values[WARMUP_ROUNDS:] for kind, values in processor.items()}
    return {"elapsed": elapsed, "processor": kept}


def verify(model: ZeRO3, kind: str) -> None:
    """Have the next step be of this kind; between steps."""
    root: Any = model._root_state
    (verifier,) = root.__dict__.setdefault("_verifiers", root.extensions.of(Verifier))
    root.context.send_through(Transport())
    if root.extensions.of(Verifier):
        root.extensions.remove(verifier)
    if kind not in ("off", "again"):
        root.extensions.add(verifier)
        root.context.send_through(verifier)
    verifier._every = 1 if kind == "checked" else sys.maxsize
    verifier._num_passes, verifier._records = 0, kind == "checked"


def make_step(args: argparse.Namespace) -> tuple[ZeRO3, torch.optim.Optimizer, Callable[[], None]]:
    torch.manual_seed(0)
    width, layers = SIZES[args.size]
    module = Transformer(width, layers, 8, args.length)
    model = ZeRO3(module, auto_wrap_policy={TransformerBlock}, verify="always")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def step() -> None:
        batch = torch.randint(256, (args.batch, args.length + 1), generator=generator)
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


if __name__ == "__main__":
    main()
