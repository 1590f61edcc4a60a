"""The alpha-beta model of layered ZeRO at scale: flags, predictions, table and plot."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import asdict
from typing import Any

from alpha_beta import (
    Link,
    Links,
    Mode,
    Split,
    Workload,
    predict,
    resident_nbytes,
    through_all_links,
)
from common import print_table

RANKS = [2**power for power in range(3, 13)]
THROUGH_ALL_LINKS = "shard, all links"
CURVES: dict[str, tuple[Mode, str]] = {
    "zero1": ("zero1", "zero1, layered"),
    "replicate": ("replicate", "replicate (HSDP)"),
    "shard": ("shard", "shard: one hop over all ranks"),
    THROUGH_ALL_LINKS: ("shard", "shard, in rings through all links of a node"),
}

Predictions = dict[str, list[dict[str, Any]]]
"""Predictions of each curve, in the order of RANKS."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("predicted; figures are those of one rank")
    group.add_argument("--intra", type=float, default=450e9, help="B/s in a node")
    group.add_argument("--inter", type=float, default=50e9, help="B/s between nodes")
    group.add_argument("--alpha-intra", type=float, default=2e-6, help="s a message in a node")
    group.add_argument("--alpha-inter", type=float, default=5e-6, help="s a message between nodes")
    group.add_argument("--flops", type=float, default=400e12, help="operations a second, achieved")
    group.add_argument("--tokens", type=float, default=8192, help="in a step")
    group.add_argument("--model-parameters", type=float, default=7e9, help="in bf16")
    group.add_argument("--gradients", choices=("fp32", "bf16"), default="fp32")
    group.add_argument("--units", type=int, default=32, help="the model is cut into")
    group.add_argument("--node-size", type=int, default=8, help="ranks; also of a shard group")
    group.add_argument("--plot", default="layered_prediction.png", help="PNG to write; '': none")


def check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Reject flags that would otherwise fail after minutes."""
    if args.node_size < 1 or args.node_size & (args.node_size - 1):
        parser.error("--node-size: expected a power of two, as the numbers of ranks are")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is not installed here; install it, or give --plot ''")


def predict_all(args: argparse.Namespace) -> Predictions:
    itemsize = 4 if args.gradients == "fp32" else 2
    work = Workload.of_model(args.model_parameters, args.tokens, args.flops, args.units, itemsize)
    rows: Predictions = {name: [] for name in CURVES}
    for ranks in RANKS:
        node = min(args.node_size, ranks)
        split = Split(node, ranks // node)
        for name, (mode, _) in CURVES.items():
            prediction = predict(mode, work, split, _links(args, split, name))
            resident = resident_nbytes(
                mode, split, 4 * args.model_parameters, work.gathered_nbytes, casts=True
            )
            rows[name].append({"ranks": ranks, **asdict(prediction), "resident_nbytes": resident})
    return rows


def _links(args: argparse.Namespace, split: Split, curve: str) -> Links:
    inner, outer = Link(args.alpha_intra, args.intra), Link(args.alpha_inter, args.inter)
    if split.outer == 1:
        return Links(inner, outer, all=inner)
    if curve == THROUGH_ALL_LINKS:
        return Links(inner, outer, all=through_all_links(inner, outer, split.inner))
    return Links(inner, outer, all=outer)


def show(predictions: Predictions) -> None:
    print("Predicted: s a step (s of communication in a step; GB that stay on a rank)")
    print_table(
        ["ranks", *predictions],
        [
            [
                str(rows[0]["ranks"]),
                *(
                    f"{row['step_s']:.2f} ({row['communication_s']:.2f}; "
                    f"{row['resident_nbytes'] / 1e9:.1f})"
                    for row in rows
                ),
            ]
            for rows in zip(*predictions.values(), strict=True)
        ],
    )


def plot(predictions: Predictions, args: argparse.Namespace) -> None:
    """Plot step time and its communication part over the number of ranks, as a PNG."""
    from matplotlib.figure import Figure

    styles = {
        "zero1": {"color": "tab:blue", "marker": "o", "linewidth": 3},
        "replicate": {"color": "tab:orange", "marker": "s", "linestyle": "--"},
        "shard": {"color": "tab:red", "marker": "^"},
        THROUGH_ALL_LINKS: {"color": "tab:red", "marker": "v", "linestyle": ":"},
    }
    figure = Figure(figsize=(8, 8), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, key in ((upper, "step_s"), (lower, "communication_s")):
        for name, rows in predictions.items():
            values = [row[key] for row in rows]
            axes.plot(RANKS, values, label=CURVES[name][1], markersize=5, **styles[name])
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    compute_s = 6 * args.model_parameters * args.tokens / args.flops
    lower.axhline(compute_s, color="gray", linewidth=1, label="compute, for comparison")
    upper.set_ylabel("step time (s)")
    lower.set_ylabel("communication in a step (s)")
    lower.legend(loc="upper left")
    lower.set_xlabel("ranks")
    lower.set_xscale("log", base=2)
    lower.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
    upper.set_title(
        f"Predicted: {args.model_parameters / 1e9:g} G parameters in bf16, gradients in "
        f"{args.gradients}, {args.tokens:g} tokens a rank,\nnodes of {args.node_size} ranks; a "
        f"rank's {args.intra / 1e9:g} GB/s in a node, {args.inter / 1e9:g} GB/s between nodes",
        fontsize=11,
    )
    figure.savefig(args.plot, dpi=150, bbox_inches="tight", pad_inches=0.2)
    print(f"picture: {args.plot}")
