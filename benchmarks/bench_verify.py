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
from engines import LEARNING_RATE, TransformerBlock, layerzero, make_transformer, random_batches

from layerzero.step.context import Transport
from layerzero.verify.verifier import Verifier

KINDS = ("off", "again", "unchecked", "checked")
BARS = {"sampled": 1.01, "always": 1.05}
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
        for name in ("sampled", "always", "control")
    ]
    print_table(["verify", *(f"{clock}, ratio" for clock in clocks), "bar"], rows)
    off = {clock: Spread.of(values["off"]) for clock, values in clocks.items()}
    for clock, spread in off.items():
        print(f"a step without verification, {clock}: {spread.text(1)} ms")
    print_result(
        args,
        ratios={f"{n}, {c}": each._asdict() for c, of in found.items() for n, each in of.items()},
        off_ms={clock: spread.as_dict() for clock, spread in off.items()},
    )


def ratios(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of each round, to steps without verification; and the control."""
    found = to_two(times, "off", "again")
    both = zip(found["checked"], found["unchecked"], strict=True)
    sampled = [(checked + (EVERY - 1) * unchecked) / EVERY for checked, unchecked in both]
    return {"sampled": sampled, "always": found["checked"], "control": found["control"]}


def measure(args: argparse.Namespace) -> Times:
    """Run on each rank."""
    module = make_transformer(SIZES[args.size], args.length)
    model: Any = layerzero(module, TransformerBlock, verify="always")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    next_batch = random_batches(args.batch, args.length)
    root = model._root_state
    (verifier,) = root.extensions.of(Verifier)

    def be(kind: str) -> None:
        """Have the next step be of this kind; between steps."""
        root.context.send_through(Transport())
        if root.extensions.of(Verifier):
            root.extensions.remove(verifier)
        if kind not in ("off", "again"):
            root.extensions.add(verifier)
            root.context.send_through(verifier)
        verifier._every = 1 if kind == "checked" else sys.maxsize
        verifier._num_passes, verifier._records = 0, kind == "checked"

    def prepare(kind: str) -> None:
        # What the step before a checked one does; before the others, too, for an equal cache.
        be("checked")
        verifier.after_step(optimizer)
        be(kind)

    def step() -> None:
        model(next_batch()).backward()
        optimizer.step()
        optimizer.zero_grad()

    gc.disable()
    return take_turns(dict.fromkeys(KINDS, step), args.rounds, warmup=2, before=prepare)


if __name__ == "__main__":
    main()
