"""Draws zero3.png: what two ranks hold at five moments of a step of a model of three units.

    python docs/figures/zero3.py

A drawing, not a measurement: widths are equal, and prefetching is left out.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

COLOURS = {"A": "#4c72b0", "B": "#dd8452", "C": "#55a868"}
MOMENTS = [
    # (title, unit that is full, unit whose gradients are there, whether they are reduced)
    ("between steps", "", "", False),
    ("forward of B:\nB is gathered", "B", "", False),
    ("forward of C:\nB is freed", "C", "", False),
    ("backward of C:\nC is gathered\nagain", "C", "C", False),
    ("backward of B:\nC's gradients\nare reduced", "B", "C", True),
]
SIDE, GAP, COLUMN = 1.0, 0.35, 4.6
HALF = SIDE / 2


def draw_unit(axes: plt.Axes, x: float, y: float, unit: str, rank: int, is_full: bool) -> None:
    """A square: the halves that this rank holds are filled."""
    for half in (0, 1):
        held = is_full or half == rank
        face = COLOURS[unit] if held else "none"
        axes.add_patch(
            Rectangle((x + half * HALF, y), HALF, SIDE, facecolor=face, edgecolor="0.6", lw=0.8)
        )
    axes.add_patch(Rectangle((x, y), SIDE, SIDE, facecolor="none", edgecolor="0.3", lw=1.2))


def draw_gradient(axes: plt.Axes, x: float, y: float, unit: str, rank: int, reduced: bool) -> None:
    """A lower, hatched box above the unit: whole before the reduction, this rank's half after."""
    width, start = (HALF, x + rank * HALF) if reduced else (SIDE, x)
    axes.add_patch(
        Rectangle(
            (start, y + SIDE + 0.12),
            width,
            0.42,
            facecolor="white",
            edgecolor=COLOURS[unit],
            hatch="////",
            lw=1.2,
        )
    )


def main() -> None:
    figure, axes = plt.subplots(figsize=(11, 4.0))
    for column, (title, full, with_gradient, reduced) in enumerate(MOMENTS):
        left = column * COLUMN
        axes.text(left + 1.85, 6.3, title, ha="center", va="top", fontsize=13)
        for rank in (0, 1):
            y = 2.9 - 2.5 * rank
            for place, unit in enumerate(COLOURS):
                x = left + place * (SIDE + GAP)
                draw_unit(axes, x, y, unit, rank, unit == full)
                if unit == with_gradient:
                    draw_gradient(axes, x, y, unit, rank, reduced)
                axes.text(x + HALF, y - 0.12, unit, ha="center", va="top", fontsize=13)
    for rank in (0, 1):
        axes.text(-0.4, 3.4 - 2.5 * rank, f"rank {rank}", ha="right", va="center", fontsize=13)
    legend = [
        Rectangle((0, 0), 1, 1, facecolor="0.55", edgecolor="0.3"),
        Rectangle((0, 0), 1, 1, facecolor="none", edgecolor="0.3"),
        Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="0.3", hatch="////"),
    ]
    names = ["parameters in memory", "not on this rank", "gradients"]
    axes.legend(
        legend,
        names,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.02),
        ncol=3,
        frameon=False,
        fontsize=13,
    )
    axes.set_xlim(-2.2, len(MOMENTS) * COLUMN - 0.6)
    axes.set_ylim(-0.2, 6.4)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.tight_layout()
    path = Path(__file__).with_suffix(".png")
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
