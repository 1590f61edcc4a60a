"""What does a ledger cost? Steps of one model inside `layerzero.ledger` and without.

A transformer on gloo ranks of this machine, AdamW included. Both take turns in each round, on the
same model, so a ratio is within one round; the slowest rank counts. Entering and leaving, which
exchange clocks and records, are timed apart. Elapsed time, and processor time of all ranks, which
waits and other processes disturb least.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack

from common import (
    SIZES,
    Spread,
    Times,
    options,
    print_result,
    print_table,
    ratio,
    run_on_ranks,
    take_turns,
)
from engines import TransformerBlock, make_transformer, random_batches, training
from engines import layerzero as wrap

import layerzero

BAR = 1.02


def main() -> None:
    parser = options(__doc__, size="25m", batch=2, length=128, world_size=2, rounds=9, steps=4)
    args = parser.parse_args()
    times, around = run_on_ranks(args.world_size, measure, args)[0]
    rows, result = [], {}
    for name in ("plain", "ledger"):
        row = [name]
        for clock, values in (("elapsed", times.elapsed), ("processor", times.processor)):
            part = ratio(values[name], values["plain"])
            result[f"{name}, {clock}"] = part.as_dict()
            row += [Spread.of(values[name]).text(1), part.text(4)]
        rows.append([*row, str(BAR) if name == "ledger" else ""])
    print_table(["", "step ms", "ratio", "processor ms", "ratio", "bar"], rows)
    print(f"entering and leaving, once: {around:.1f} ms")
    print_result(args, ratios=result, enter_and_leave_ms=around)


def measure(args: argparse.Namespace) -> tuple[Times, float]:
    """Run on each rank: milliseconds a step; and of entering and leaving a block."""
    model = wrap(make_transformer(SIZES[args.size], args.length), TransformerBlock)
    step = training(model, random_batches(args.batch, args.length))
    around: list[float] = []
    open_ledger = ExitStack()

    def before(name: str) -> None:
        start = time.perf_counter()
        open_ledger.close()
        if name == "ledger":
            open_ledger.enter_context(layerzero.ledger(model))
        around.append((time.perf_counter() - start) * 1e3)

    times = take_turns({"plain": step, "ledger": step}, args.rounds, args.steps, before=before)
    open_ledger.close()
    return times, sum(around) / (1 + args.rounds)


if __name__ == "__main__":
    main()
