"""What do checked bytes and a ledger cost? One model with each, and without.

A transformer on gloo ranks of this machine, AdamW included. One model takes single steps, of each
kind once in a round, in changing order: "off", as without either; "again", the same once more;
"checked", a step of `verify="always"`; "unchecked", one of the seven of eight that "sampled" does
not check; "ledger", a step inside `layerzero.ledger`, which is entered before. A ratio is within
one round, to the mean of "off" and "again"; that of "sampled" is made of one checked and seven
unchecked steps. Given are the median of the rounds and the interval that holds it with 95 %
(bootstrap). "again" to "off" is the control: its interval must hold 1, and is what a bar has to be
compared with.

It is one model, and malloc keeps freed memory, because two equal models differ by more than the
checks cost: by where their memory lies. Time is that of the slowest rank; processor time, user and
system, is that of all ranks, which waits and other processes disturb least.
"""

from __future__ import annotations

import argparse
import gc
import sys
from contextlib import ExitStack
from typing import Any

import torch
from common import (
    SIZES,
    Interval,
    Spread,
    Times,
    keep_freed_memory,
    options,
    print_result,
    print_table,
    run_on_ranks,
    take_turns,
    to_two,
)
from engines import LEARNING_RATE, TransformerBlock, make_transformer, random_batches
from engines import layerzero as wrap

import layerzero
from layerzero.step.context import Transport
from layerzero.verify.verifier import Verifier

KINDS = ("off", "again", "unchecked", "checked", "ledger")
BARS = {"sampled": 1.01, "always": 1.05, "ledger": 1.05}
EVERY = 8  # "sampled" checks one step of so many


def main() -> None:
    args = options(__doc__, size="25m", batch=2, length=128, world_size=2, rounds=60).parse_args()
    keep_freed_memory()
    times = run_on_ranks(args.world_size, measure, args)[0]
    clocks = {"elapsed": times.elapsed, "processor": times.processor}
    found = {
        clock: {name: Interval.of(each) for name, each in ratios(values).items()}
        for clock, values in clocks.items()
    }
    rows = [
        [name, *(found[clock][name].text() for clock in clocks), str(BARS.get(name, ""))]
        for name in ("sampled", "always", "ledger", "control")
    ]
    print_table(["extension", *(f"{clock}, ratio" for clock in clocks), "bar"], rows)
    off = {clock: Spread.of(values["off"]) for clock, values in clocks.items()}
    for clock, spread in off.items():
        print(f"a step without any, {clock}: {spread.text(1)} ms")
    print_result(
        args,
        ratios={f"{n}, {c}": each._asdict() for c, of in found.items() for n, each in of.items()},
        off_ms={clock: spread.as_dict() for clock, spread in off.items()},
    )


def ratios(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of each round, to steps without any; and the control."""
    found = to_two(times, "off", "again")
    both = zip(found["checked"], found["unchecked"], strict=True)
    sampled = [(checked + (EVERY - 1) * unchecked) / EVERY for checked, unchecked in both]
    alone = {name: found[name] for name in ("ledger", "control")}
    return {"sampled": sampled, "always": found["checked"], **alone}


def measure(args: argparse.Namespace) -> Times:
    """Run on each rank."""
    module = make_transformer(SIZES[args.size], args.length)
    model: Any = wrap(module, TransformerBlock, verify="always")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    next_batch = random_batches(args.batch, args.length)
    root = model._root_state
    (verifier,) = root.extensions.of(Verifier)
    ledgers = ExitStack()

    def be(kind: str) -> None:
        """Have the next step be of this kind; between steps."""
        root.context.transport = Transport()
        if root.extensions.of(Verifier):
            root.extensions.remove(verifier)
        if kind in ("unchecked", "checked"):
            root.extensions.add(verifier)
            root.context.transport = verifier
        verifier._every = 1 if kind == "checked" else sys.maxsize
        verifier._num_passes, verifier._records = 0, kind == "checked"

    def prepare(kind: str) -> None:
        ledgers.close()
        be(kind)
        if kind == "ledger":
            ledgers.enter_context(layerzero.ledger(model))

    def step() -> None:
        model(next_batch()).backward()
        optimizer.step()
        optimizer.zero_grad()

    gc.disable()
    times = take_turns(dict.fromkeys(KINDS, step), args.rounds, warmup=2, before=prepare)
    ledgers.close()
    return times


if __name__ == "__main__":
    main()
