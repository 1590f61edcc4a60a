"""How much less is a round of patches than the full weights, in time and bytes?

A transformer on gloo ranks of this machine changes a share of its bfloat16 values before each
measurement. Then they leave the model: as patches (`changes`), and packed as bytes (`packed`);
gathered by `stream_full` in bfloat16; or gathered as a full state dict in host memory. The floor,
`cast`, casts every rank's main shards, once over memory,
and does nothing else. What a receiver does is not measured. The ways take turns in each round, so a
ratio is within one round; the slowest rank counts. Processor time (all threads, all ranks) stands
beside it: other work on the machine disturbs it less.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
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
from engines import TransformerBlock, layerzero, make_transformer

from layerzero.checkpoint import DeltaStream, get_model_state_dict, stream_full

BARS = {"changes of stream_full": 0.25, "changes of full_state_dict": 0.1}


def main() -> None:
    parser = options(__doc__, size="56m", world_size=2, rounds=7)
    parser.add_argument("--share", type=float, default=0.02, help="of the values that change")
    args = parser.parse_args()
    report(args, run_on_ranks(args.world_size, measure, args))


def change(model: torch.nn.Module, share: float) -> None:
    """Change the bfloat16 values of about this share of the elements."""
    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape) < share
            parameter[chosen] = parameter[chosen] * 1.25 + 2.0**-10


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run on each rank."""
    transformer = make_transformer(SIZES[args.size], 128)
    numel = sum(parameter.numel() for parameter in transformer.parameters())
    model = layerzero(transformer, TransformerBlock)
    torch.manual_seed(dist.get_rank())
    stream = DeltaStream(model)
    nbytes: dict[str, list[int]] = {"changes": [], "packed": []}

    def cast() -> None:
        for parameter in model.parameters():
            parameter.detach().bfloat16()

    def changes() -> None:
        nbytes["changes"].append(sum(patch.nbytes for patch in stream.changes()))

    def packed() -> None:
        nbytes["packed"].append(sum(len(patch.to_bytes()) for patch in stream.changes()))

    def streamed() -> None:
        for _ in stream_full(model, dtype=torch.bfloat16):
            pass

    def before(name: str) -> None:
        for _ in stream.changes():
            pass  # So that a round has the changes of one measurement.
        change(model, args.share)

    ways: dict[str, Callable[[], object]] = {
        "cast": cast,
        "changes": changes,
        "packed": packed,
        "stream_full": streamed,
        "full_state_dict": lambda: get_model_state_dict(model, full=True, cpu_offload=True),
    }
    times = take_turns(ways, args.rounds, before=before)
    return {
        "times": times,
        "nbytes": {name: found[-args.rounds :] for name, found in nbytes.items()},
        "full_nbytes": 2 * numel,
        "snapshot_nbytes": stream.snapshot_nbytes,
    }


def report(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    times, full = results[0]["times"], results[0]["full_nbytes"]
    took, cpu = times.elapsed, times.processor
    of_stream = {name: ratio(values, took["stream_full"]) for name, values in took.items()}
    of_full = {name: ratio(values, took["full_state_dict"]) for name, values in took.items()}
    shares = {
        name: Spread.of([sum(each) / full for each in zip(*found, strict=True)])
        for name in ("changes", "packed")
        for found in [[result["nbytes"][name] for result in results]]
    }
    print(f"{full / 2e6:.0f} M parameters on {len(results)} ranks, {args.share:.1%} changed")
    print_table(
        ["", "ms", "of stream_full's", "of full_state_dict's", "cpu ms", "of both's", "bytes"],
        [
            [
                name,
                Spread.of(took[name]).text(1),
                of_stream[name].text(3),
                of_full[name].text(3),
                Spread.of(cpu[name]).text(1),
                " ".join(
                    f"{ratio(cpu[name], cpu[other]).median:.3f}"
                    for other in ("stream_full", "full_state_dict")
                ),
                shares[name].text(4) if name in shares else "",
            ]
            for name in took
        ],
    )
    snapshot = sum(result["snapshot_nbytes"] for result in results)
    print(f"snapshots of all ranks: {snapshot / full:.4f} of the full bytes")
    print("bytes: of the full weights in bfloat16, all ranks together")
    print(f"bars: {BARS}, at 2 % bytes 0.11 (changes) and 0.08 (packed)")
    print_result(
        args,
        cpu_ms=spreads(cpu),
        ms=spreads(took),
        of_stream_full={name: found.as_dict() for name, found in of_stream.items()},
        of_full_state_dict={name: found.as_dict() for name, found in of_full.items()},
        bytes_share={name: found.as_dict() for name, found in shares.items()},
    )


if __name__ == "__main__":
    main()
