"""Which calls move a unit's bytes fastest on gloo: its own collectives, or point-to-point?

All-gather and reduce-scatter of several sizes on 2 ranks of this machine: the engine's verbs,
gloo's own, and an all-to-all with a local sum. The variants take turns in each round; the slowest
rank counts. A memory copy of the same bytes is the upper bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import options, print_result, print_table, run_on_ranks, spreads, take_turns

from layerzero.comm.collectives import all_gather, reduce_scatter
from layerzero.comm.pending import Operation
from layerzero.flat.groups import make_shard_group

SIZES_KB = (64, 256, 1024, 4096, 16384)


def main() -> None:
    parser = options(__doc__, world_size=2, rounds=15)
    parser.add_argument("--sizes-kb", type=int, nargs="+", default=SIZES_KB, help="of a full unit")
    args = parser.parse_args()
    results = run_on_ranks(args.world_size, measure, list(args.sizes_kb), args.rounds)[0]
    names = list(next(iter(results.values())))
    print_table(
        ["KB", *names],
        [
            [str(size), *(f"{result[name]['median']:.2f}" for name in names)]
            for size, result in results.items()
        ],
    )
    print_result(args, unit="ms", sizes_kb=results)


def measure(sizes_kb: list[int], rounds: int) -> dict[int, Any]:
    """Run on each rank: times of every variant at every size."""
    return {
        size: spreads(take_turns(_variants(size * 1024 // 4), rounds, warmup=3).elapsed)
        for size in sizes_kb
    }


def _variants(numel: int) -> dict[str, Callable[[], object]]:
    world = dist.get_world_size()
    process_group = dist.group.WORLD
    assert process_group is not None, "run_on_ranks initialises it"
    group = make_shard_group(process_group, torch.device("cpu"), timedelta(minutes=1))
    shard_numel = numel // world
    shard, summed = torch.randn(shard_numel), torch.empty(shard_numel)
    full, chunks = torch.empty(shard_numel * world), torch.randn(shard_numel * world)
    received = torch.empty_like(chunks)
    counter = itertools.count()

    def engine_all_gather() -> None:
        all_gather(full, shard, group, Operation("all-gather", "unit", next(counter))).wait()

    def engine_reduce_scatter() -> None:
        operation = Operation("reduce-scatter", "unit", next(counter))
        _, pending = reduce_scatter(chunks, group, operation)
        pending.wait()

    def all_to_all_and_sum() -> None:
        dist.all_to_all_single(received, chunks)
        torch.sum(received.view(world, -1), dim=0, out=summed)

    return {
        "copy": lambda: full.copy_(chunks),
        "all-gather": engine_all_gather,
        "gloo all-gather": lambda: dist.all_gather_into_tensor(full, shard),
        "reduce-scatter": engine_reduce_scatter,
        "all-to-all + sum": all_to_all_and_sum,
        "gloo reduce-scatter": lambda: dist.reduce_scatter_tensor(summed, chunks),
    }


if __name__ == "__main__":
    main()
