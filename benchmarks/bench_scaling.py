"""How long is a step on 8 to 4096 ranks, in each mode of layered ZeRO, and what does it depend on?

Predicted, not measured: the program of a step is recorded from the engine (device_program.py) and
simulated (simulator.py), with the compute and the links of the flags. The ranks of a step do the
same at the same time, so one of them is simulated: every collective starts when that rank enters
it. A collective over k ranks takes k - 1 latencies and the bytes that the rank sends over its link.
Collectives of one group run one after the other; those of two groups share a link.

    zero1, replicate   two hops: inside nodes, then between them; zero3_size is the node
    shard              one hop over all ranks, through each rank's link between nodes
    shard, all links   the same in as many rings as a node has ranks, each of which crosses nodes at
                       another rank, as NCCL does where every GPU has a network card

Not simulated: the optimizer, ranks that are late, congestion in switches, kernels that slow down
beside a collective.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import environment, print_json, print_table
from device_program import Unit, on_device, record, units_of_ledger
from simulator import Link, Machines, simulate

RANKS = [2**power for power in range(3, 13)]
ALL_LINKS = "shard, all links"
CURVES = {
    "zero1": "zero1, two hops, layered",
    "replicate": "replicate (HSDP), two hops",
    "shard": "shard: one hop over all ranks",
    ALL_LINKS: "shard, in rings through all links of a node",
}
CHANGE = 0.2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Figures:
    """What a prediction depends on. Each can be scaled."""

    compute: float
    """Seconds of a step, relative to those of the units."""
    host: float
    """Seconds for a unit and step."""
    latency_inside: float
    latency_between: float
    bandwidth_inside: float
    bandwidth_between: float


def main() -> None:
    args = _parse()
    units = _units(args)
    figures = Figures(1.0, args.host, args.alpha_intra, args.alpha_inter, args.intra, args.inter)
    predictions: dict[str, list[float]] = {
        curve: [step_s(curve, ranks, units, args, figures) for ranks in RANKS] for curve in CURVES
    }
    compute_s = sum(unit.forward_s + unit.backward_s for unit in units)
    print(f"Predicted: s a step; {compute_s:.3f} s of compute")
    rows = zip(RANKS, *predictions.values(), strict=True)
    print_table(["ranks", *CURVES], [[str(n), *(f"{s:.3f}" for s in row)] for n, *row in rows])
    found = {ranks: sensitivity(ranks, units, args, figures) for ranks in args.sensitivity}
    for ranks, changes in found.items():
        _show_sensitivity(ranks, changes)
    if args.plot:
        plot(predictions, found[args.sensitivity[-1]], compute_s, args)
    print_json(
        {
            "benchmark": "scaling",
            "ranks": RANKS,
            "step_s": predictions,
            "sensitivity": found,
            "figures": asdict(figures),
            "config": {**vars(args), "ledger": args.ledger and str(args.ledger)},
            "environment": environment(),
        }
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--intra", type=float, default=450e9, help="B/s of a rank in a node")
    add("--inter", type=float, default=50e9, help="B/s of a rank between nodes")
    add("--alpha-intra", type=float, default=2e-6, help="s a message in a node")
    add("--alpha-inter", type=float, default=5e-6, help="s a message between nodes")
    add("--host", type=float, default=300e-6, help="s of the host for a unit and step")
    add("--flops", type=float, default=400e12, help="operations a second of a rank, achieved")
    add("--tokens", type=float, default=8192, help="of a rank in a step")
    add("--model-parameters", type=float, default=7e9)
    add("--units", type=int, default=32, help="of equal size, that the model is cut into")
    add("--ledger", type=Path, help="a file of `ledger.save`: its units and their compute instead")
    add("--parameters", choices=DTYPES, default="bf16", help="dtype of gathers")
    add("--gradients", choices=DTYPES, default="fp32", help="dtype of reductions")
    add("--node-size", type=int, default=8, help="ranks; also of a shard group")
    add("--sensitivity", type=int, nargs="+", choices=RANKS, default=[64, 4096], help="ranks")
    add("--plot", default="scaling.png", help="PNG to write; '': none")
    args = parser.parse_args()
    if args.node_size < 2 or args.node_size & (args.node_size - 1):
        parser.error(
            "--node-size: expected a power of two, at least 2, as the numbers of ranks are"
        )
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is not installed here; install it, or give --plot ''")
    return args


def _units(args: argparse.Namespace) -> list[Unit]:
    """The units of a ledger; or a transformer's: six operations for each parameter and token, a
    third of them in the forward."""
    if args.ledger is not None:
        itemsize = DTYPES[args.parameters].itemsize
        return units_of_ledger(json.loads(args.ledger.read_text()), itemsize)
    numel = args.model_parameters / args.units
    third = 2 * numel * args.tokens / args.flops
    return [Unit(numel, third, 2 * third)] * args.units


# Predicted ------------------------------------------------------------------------------------

_recorded = cache(record)


def step_s(
    curve: str, ranks: int, units: Sequence[Unit], args: argparse.Namespace, figures: Figures
) -> float:
    """Seconds of a step."""
    node = min(args.node_size, ranks)
    dtypes = DTYPES[args.parameters], DTYPES[args.gradients]
    # In one node there is no outer group, and all modes are the same.
    outer = "zero1" if node == ranks else "shard" if curve == ALL_LINKS else curve
    recorded = _recorded(len(units), outer, 1 if node == ranks else 2, *dtypes)
    scaled = [
        Unit(u.numel, u.forward_s * figures.compute, u.backward_s * figures.compute) for u in units
    ]
    program = on_device(recorded, scaled, ranks, node, figures.host)
    inside = Link(figures.latency_inside, figures.bandwidth_inside)
    between = Link(figures.latency_between, figures.bandwidth_between)
    if curve == ALL_LINKS:
        between = through_all_links(inside, between, node)
    # Each thread of the program has a processor of its own: the host, or a part of the device.
    return simulate({0: program}, Machines(node, len(program), inside, between)).step_s


def through_all_links(inside: Link, between: Link, node_size: int) -> Link:
    """The effective link of one hop over all ranks that uses `node_size` rings in parallel.

    A ring visits all ranks of a node before the next node, so one of `node_size` messages crosses
    nodes, for each ring through another rank's link.
    """
    return Link(
        latency_s=((node_size - 1) * inside.latency_s + between.latency_s) / node_size,
        bandwidth=min(inside.bandwidth, node_size * between.bandwidth),
    )


Changes = dict[str, dict[str, tuple[float, float]]]
"""By figure and curve: relative change of the step if the figure is smaller, and larger."""


def sensitivity(
    ranks: int, units: Sequence[Unit], args: argparse.Namespace, figures: Figures
) -> Changes:
    """What a change of each figure by `CHANGE`, down and up, does to the step."""
    changes: Changes = {name: {} for name in asdict(figures)}
    for curve in CURVES:
        usual = step_s(curve, ranks, units, args, figures)
        for name, value in asdict(figures).items():
            down, up = (
                step_s(curve, ranks, units, args, replace(figures, **{name: value * factor}))
                for factor in (1 - CHANGE, 1 + CHANGE)
            )
            changes[name][curve] = (down / usual - 1, up / usual - 1)
    return changes


# Shown ----------------------------------------------------------------------------------------


def _show_sensitivity(ranks: int, changes: Changes) -> None:
    print(f"\nChange of the step on {ranks} ranks if a figure is {CHANGE:.0%} smaller / larger")
    print_table(
        ["figure", *CURVES],
        [
            [name.replace("_", " "), *(f"{down:+.1%} / {up:+.1%}" for down, up in row.values())]
            for name, row in changes.items()
        ],
    )


def plot(
    predictions: Mapping[str, Sequence[float]],
    changes: Changes,
    compute_s: float,
    args: argparse.Namespace,
) -> None:
    """Draw step time over the number of ranks, and the sensitivity on the most, as a PNG."""
    from matplotlib.figure import Figure

    styles: dict[str, dict[str, Any]] = {
        "zero1": {"color": "tab:blue", "marker": "o", "linewidth": 3},
        "replicate": {"color": "tab:orange", "marker": "s", "linestyle": "--"},
        "shard": {"color": "tab:red", "marker": "^"},
        ALL_LINKS: {"color": "tab:pink", "marker": "v", "linestyle": ":"},
    }
    figure = Figure(figsize=(8, 9), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    for curve, steps in predictions.items():
        upper.plot(RANKS, steps, label=CURVES[curve], markersize=5, **styles[curve])
    upper.axhline(compute_s, color="gray", linewidth=1, label="compute alone")
    upper.set_ylim(bottom=0)
    upper.set_ylabel("step time (s)")
    upper.set_xlabel("ranks")
    upper.set_xscale("log", base=2)
    upper.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
    upper.grid(alpha=0.3)
    upper.legend(loc="upper left")
    upper.set_title("Predicted: " + _about(args), fontsize=11)
    names = list(changes)
    for number, curve in enumerate(CURVES):
        places = [place + 0.2 * number for place in range(len(names))]
        spans = [[100 * min(pair) for pair in (changes[name][curve] for name in names)]]
        spans += [[100 * max(changes[name][curve]) for name in names]]
        widths = [high - low for low, high in zip(*spans, strict=True)]
        color = styles[curve]["color"]
        lower.barh(places, widths, 0.17, left=spans[0], color=color, label=curve)
    lower.set_yticks(
        [place + 0.3 for place in range(len(names))], [name.replace("_", " ") for name in names]
    )
    lower.invert_yaxis()
    lower.axvline(0, color="gray", linewidth=1)
    lower.grid(alpha=0.3, axis="x")
    lower.set_xlabel(
        f"change of the step (%) on {args.sensitivity[-1]} ranks, "
        f"if the figure is {CHANGE:.0%} smaller or larger"
    )
    figure.savefig(args.plot, dpi=150, bbox_inches="tight", pad_inches=0.2)
    print(f"picture: {args.plot}")


def _about(args: argparse.Namespace) -> str:
    model = f"{args.model_parameters / 1e9:g} G parameters, {args.tokens:g} tokens a rank"
    if args.ledger is not None:
        model = f"the units of {args.ledger.name}"
    return (
        f"{model}; gathers in {args.parameters}, reductions in {args.gradients},\n"
        f"nodes of {args.node_size} ranks; a rank's {args.intra / 1e9:g} GB/s in a node, "
        f"{args.inter / 1e9:g} GB/s between nodes"
    )


if __name__ == "__main__":
    main()
