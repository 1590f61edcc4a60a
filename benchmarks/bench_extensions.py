"""What do checked bytes and a ledger cost? One model with each, and without.

A transformer on gloo ranks of this machine, AdamW included. One model takes single steps, of each
kind once in a round, in changing order: "off", as without either; "again", the same once more, the
control; "checked", a step of `verify="always"`; "ledger", a step inside `layerzero.ledger`, which
is entered before. It is one model, and malloc keeps freed memory, because two equal models differ
by more than the checks cost: by where their memory lies. Time is that of the slowest rank; a ratio
is within one round, to the mean of "off" and "again".
"""

from __future__ import annotations

import argparse
import gc
import os
from contextlib import ExitStack
from typing import Any

import torch
from common import (
    SIZES,
    Spread,
    options,
    print_result,
    print_table,
    ratio,
    run_on_ranks,
    spreads,
    take_turns,
)
from engines import LEARNING_RATE, TransformerBlock, make_transformer, random_batches
from engines import layerzero as wrap

import layerzero
from layerzero.verify.verifier import Verifier

BARS = {"again": "", "checked": "1.05", "ledger": "1.05"}


def main() -> None:
    args = options(__doc__, size="25m", batch=2, length=128, world_size=2, rounds=60).parse_args()
    # In ranks, which start later: malloc keeps what is freed, in one arena.
    os.environ["MALLOC_ARENA_MAX"] = "1"
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        os.environ[name] = "2000000000"
    times = run_on_ranks(args.world_size, measure, args)[0]
    plain = [(off + again) / 2 for off, again in zip(times["off"], times["again"], strict=True)]
    ratios = {name: ratio(times[name], times["off"] if name == "again" else plain) for name in BARS}
    rows = [[name, each.text(3), BARS[name]] for name, each in ratios.items()]
    print_table(["extension", "ratio", "bar"], rows)
    print(f"a step without any: {Spread.of(times['off']).text(1)} ms")
    found = {name: each.as_dict() for name, each in ratios.items()}
    print_result(args, ratios=found, ms=spreads(times))


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Run on each rank."""
    module = make_transformer(SIZES[args.size], args.length)
    model: Any = wrap(module, TransformerBlock, verify="always")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    next_batch = random_batches(args.batch, args.length)
    root = model._root_state
    (verifier,) = root.extensions.of(Verifier)
    ledgers = ExitStack()

    def prepare(kind: str) -> None:
        ledgers.close()
        if root.extensions.of(Verifier):
            root.extensions.remove(verifier)
        if kind == "checked":
            root.extensions.add(verifier)
        elif kind == "ledger":
            ledgers.enter_context(layerzero.ledger(model))

    def step() -> None:
        model(next_batch()).backward()
        optimizer.step()
        optimizer.zero_grad()

    gc.disable()
    calls = dict.fromkeys(("off", *BARS), step)
    times = take_turns(calls, args.rounds, before=prepare)
    ledgers.close()
    return times


if __name__ == "__main__":
    main()
