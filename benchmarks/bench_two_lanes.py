"""What do separate groups for reductions, and several reductions in flight, do to a training step?

A transformer on gloo ranks of this machine, AdamW included. The variants take turns in each round,
so a ratio is within one round; the slowest rank counts.
"""

from __future__ import annotations

import argparse

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
from engines import TransformerBlock, layerzero, make_transformer, random_batches, training

from layerzero import ReductionPolicy

VARIANTS = {
    "default": ReductionPolicy(),
    "separate groups": ReductionPolicy(separate_groups=True),
    "in flight": ReductionPolicy(in_flight="1GB"),
    "both": ReductionPolicy(separate_groups=True, in_flight="1GB"),
}


def main() -> None:
    defaults = {"size": "6m", "world_size": 2, "batch": 2, "length": 128, "rounds": 9, "steps": 2}
    parser = options(__doc__, **defaults)
    parser.add_argument("--zero3-size", type=int, help="ranks of a shard group; default: all")
    args = parser.parse_args()
    times = run_on_ranks(args.world_size, measure, args)[0]
    ratios = {name: ratio(values, times["default"]) for name, values in times.items()}
    print("ms a step, and over the default's in the same round: median (quartiles)")
    rows = [
        [name, Spread.of(values).text(0), ratios[name].text(3)] for name, values in times.items()
    ]
    print_table(["variant", "step", "over default"], rows)
    over = {name: spread.as_dict() for name, spread in ratios.items()}
    print_result(args, step_ms=spreads(times), over_default=over)


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Run on each rank: step times of every variant (slowest rank)."""
    steps = {}
    for name, policy in VARIANTS.items():
        module = make_transformer(SIZES[args.size], args.length)
        given = {"reduction": policy, "zero3_size": args.zero3_size}
        model = layerzero(module, TransformerBlock, **given)
        steps[name] = training(model, random_batches(args.batch, args.length))
    return take_turns(steps, args.rounds, args.steps).elapsed


if __name__ == "__main__":
    main()
