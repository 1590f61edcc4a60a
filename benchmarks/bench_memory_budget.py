"""What does a larger memory budget buy? Step time and gathered bytes by `memory_budget`.

A transformer on gloo ranks of this machine, AdamW included. The least and the most bytes of the
model are learned first; then models with budgets in between, and one without a budget, take turns
in each round, and the slowest rank counts. Bytes are those that a rank sends in a step, which noise
does not touch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from common import Spread, options, print_result, print_table, ratio, run_on_ranks, take_turns
from engines import TransformerBlock, layerzero, make_transformer, random_batches, training
from traffic import SentBytes

LEARNED = 6
NONE = "no budget"
LEAST = "0 %"


def main() -> None:
    defaults = {"width": 256, "layers": 8, "batch": 1, "length": 64}
    parser = options(__doc__, **defaults, world_size=2, rounds=9, steps=4)
    parser.add_argument("--shares", type=int, nargs="+", default=[0, 25, 50, 75, 100])
    args = parser.parse_args()
    times, sent, choices = run_on_ranks(args.world_size, measure, args)[0]
    rows, result = [], {}
    for name, values in times.items():
        part, choice = ratio(values, times[LEAST]), choices[name]
        result[name] = {"ms": Spread.of(values).as_dict(), "ratio": part.as_dict()}
        result[name] |= {"sent_bytes": sent[name], **choice}
        rows.append(
            [
                *(name, f"{choice['budget_bytes'] / 1e6:.2f}" if choice else "-"),
                *(str(choice["kept"]) if choice else "0", f"{sent[name] / 1e6:.2f}"),
                *(Spread.of(values).text(1), part.text(3)),
            ]
        )
    print_table(["share", "budget MB", "units full", "sent MB", "step ms", "ratio"], rows)
    print_result(args, results=result)


def measure(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Run on each rank: milliseconds a step, bytes that a step sends, and choices, by name."""
    free, step = make_step("1TB", args)
    for _ in range(LEARNED):
        step()
    choice = free.memory_choice
    assert choice is not None, "made in the sixth forward"
    least, most = choice.least_bytes, choice.most_bytes
    budgets = {f"{share} %": least + (most - least) * share // 100 for share in args.shares}
    del free, step
    made = {name: make_step(budget, args) for name, budget in [*budgets.items(), (NONE, None)]}
    sent = {}
    for name, (_, step) in made.items():
        for _ in range(LEARNED + 1):
            step()
        with SentBytes() as count:
            step()
        sent[name] = sum(count.by_group.values())
    steps = {name: step for name, (_, step) in made.items()}
    chosen = {
        name: {"budget_bytes": c.budget_bytes, "bound_bytes": c.bound_bytes, "kept": len(c.kept)}
        if (c := model.memory_choice)
        else {}
        for name, (model, _) in made.items()
    }
    return take_turns(steps, args.rounds, args.steps).elapsed, sent, chosen


def make_step(
    budget: int | str | None, args: argparse.Namespace
) -> tuple[Any, Callable[[], object]]:
    module = make_transformer((args.width, args.layers), args.length)
    model = layerzero(module, TransformerBlock, memory_budget=budget)
    return model, training(model, random_batches(args.batch, args.length))


if __name__ == "__main__":
    main()
