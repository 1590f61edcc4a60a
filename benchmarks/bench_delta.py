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
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Spread,
    environment,
    interleave,
    max_over_ranks,
    print_json,
    print_table,
    ratio,
    run_on_ranks,
)
from engines import Transformer, TransformerBlock

from layerzero import ZeRO3
from layerzero.checkpoint import DeltaStream, get_model_state_dict, stream_full

SIZES = {"6m": (256, 8), "25m": (512, 8), "56m": (768, 8), "100m": (1024, 8)}  # width, layers
NAMES = ("cast", "changes", "packed", "stream_full", "full_state_dict")
BARS = {"changes of stream_full": 0.25, "changes of full_state_dict": 0.1}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="56m")
    parser.add_argument("--share", type=float, default=0.02, help="of the values that change")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    report(args, run_on_ranks(args.world_size, measure, args))


def change(model: torch.nn.Module, share: float) -> None:
    """Change the bfloat16 values of about this share of the elements."""
    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape) < share
            parameter[chosen] = parameter[chosen] * 1.25 + 2.0**-10


def measure(args: argparse.Namespace) -> dict[str, Any]:
    width, layers = SIZES[args.size]
    torch.manual_seed(0)
    transformer = Transformer(width, layers, heads=8, max_length=128)
    numel = sum(parameter.numel() for parameter in transformer.parameters())
    model = ZeRO3(transformer, auto_wrap_policy={TransformerBlock})
    torch.manual_seed(dist.get_rank())
    stream = DeltaStream(model)
    nbytes: dict[str, list[int]] = {name: [] for name in ("changes", "packed")}

    def changes() -> None:
        nbytes["changes"].append(sum(patch.nbytes for patch in stream.changes()))

    def packed() -> None:
        nbytes["packed"].append(sum(len(patch.to_bytes()) for patch in stream.changes()))

    def cast() -> None:
        for parameter in model.parameters():
            parameter.detach().bfloat16()

    def streamed() -> None:
        for _ in stream_full(model, dtype=torch.bfloat16):
            pass

    def full_state_dict() -> None:
        get_model_state_dict(model, full=True, cpu_offload=True)

    ways: dict[str, Callable[[], None]] = dict(
        zip(NAMES, (cast, changes, packed, streamed, full_state_dict), strict=True)
    )

    def timed(name: str) -> float:
        for _ in stream.changes():
            pass  # so that a round has the changes of one measurement
        change(model, args.share)
        dist.barrier()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        ways[name]()
        took, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
        processor[name].append(cpu)
        return max_over_ranks(took)

    processor: dict[str, list[float]] = {name: [] for name in NAMES}
    took = interleave(NAMES, timed, args.rounds)
    return {
        "took": took,
        "cpu": {name: found[-args.rounds :] for name, found in processor.items()},
        "nbytes": {name: found[-args.rounds :] for name, found in nbytes.items()},
        "full_nbytes": 2 * numel,
        "snapshot_nbytes": stream.snapshot_nbytes,
    }


def report(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    took, full = results[0]["took"], results[0]["full_nbytes"]
    cpu = {
        name: [sum(each) for each in zip(*(r["cpu"][name] for r in results), strict=True)]
        for name in NAMES
    }
    of_stream = {name: ratio(took[name], took["stream_full"]) for name in NAMES}
    of_full = {name: ratio(took[name], took["full_state_dict"]) for name in NAMES}
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
                Spread.of([1e3 * each for each in took[name]]).text(1),
                of_stream[name].text(3),
                of_full[name].text(3),
                Spread.of([1e3 * each for each in cpu[name]]).text(1),
                " ".join(
                    f"{ratio(cpu[name], cpu[other]).median:.3f}"
                    for other in ("stream_full", "full_state_dict")
                ),
                shares[name].text(4) if name in shares else "",
            ]
            for name in NAMES
        ],
    )
    snapshot = sum(result["snapshot_nbytes"] for result in results)
    print(f"snapshots of all ranks: {snapshot / full:.4f} of the full bytes")
    print("bytes: of the full weights in bfloat16, all ranks together")
    print(f"bars: {BARS}, at 2 % bytes 0.11 (changes) and 0.08 (packed)")
    print_json(
        {
            "benchmark": "delta",
            "arguments": vars(args),
            "environment": environment(),
            "cpu_ms": {n: Spread.of([1e3 * each for each in cpu[n]]).as_dict() for n in NAMES},
            "ms": {n: Spread.of([1e3 * each for each in took[n]]).as_dict() for n in NAMES},
            "of_stream_full": {name: found.as_dict() for name, found in of_stream.items()},
            "of_full_state_dict": {name: found.as_dict() for name, found in of_full.items()},
            "bytes_share": {name: found.as_dict() for name, found in shares.items()},
        }
    )


if __name__ == "__main__":
    main()
