"""Draws zero3.png: what two ranks hold at five moments of a step of a model of three units.

    python docs/figures/zero3.py

A drawing, not a measurement: widths are equal, and prefetching is left out.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from style import UNITS, figure, save

COLOURS = dict(zip("ABC", UNITS, strict=False))
MOMENTS = [
    # (title, unit that is full, unit whose gradients are there, whether they are reduced)
    ("between steps", "", "", False),
    ("forward of B:\nB is gathered", "B", "", False),
    ("forward of C:\nB is freed", "C", "", False),
    ("backward of C:\nC is gathered again", "C", "C", False),
    ("backward of B:\nC's gradients\nare reduced", "B", "C", True),
]
SIDE, GAP, ROW, RANK = 1.0, 0.35, 2.15, 4.7
HALF = SIDE / 2


def draw_unit(axes: Axes, x: float, y: float, unit: str, rank: int, is_full: bool) -> None:
    """A square: the halves that this rank holds are filled."""
    for half in (0, 1):
        held = is_full or half == rank
        face = COLOURS[unit] if held else "none"
        axes.add_patch(
            Rectangle((x + half * HALF, y), HALF, SIDE, facecolor=face, edgecolor="0.6", lw=0.8)
        )
    axes.add_patch(Rectangle((x, y), SIDE, SIDE, facecolor="none", edgecolor="0.3", lw=1.2))
    axes.text(x + HALF, y - 0.1, unit, ha="center", va="top")


def draw_gradient(axes: Axes, x: float, y: float, unit: str, rank: int, reduced: bool) -> None:
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
    drawn, axes = figure(6.3)
    for row, (title, full, with_gradient, reduced) in enumerate(MOMENTS):
        y = -row * ROW
        axes.text(-0.5, y + HALF, title, ha="right", va="center")
        for rank in (0, 1):
            for place, unit in enumerate(COLOURS):
                x = rank * RANK + place * (SIDE + GAP)
                draw_unit(axes, x, y, unit, rank, unit == full)
                if unit == with_gradient:
                    draw_gradient(axes, x, y, unit, rank, reduced)
    for rank in (0, 1):
        middle = rank * RANK + 1.5 * SIDE + GAP
        axes.text(middle, 1.5, f"rank {rank}", ha="center", va="bottom", weight="bold")
    legend = [
        Rectangle((0, 0), 1, 1, facecolor="0.55", edgecolor="0.3"),
        Rectangle((0, 0), 1, 1, facecolor="none", edgecolor="0.3"),
        Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="0.3", hatch="////"),
    ]
    names = ["parameters in memory", "not on this rank", "gradients"]
    drawn.legend(legend, names, loc="outside lower center", ncols=3)
    axes.set_xlim(-4.6, RANK + 3 * SIDE + 2 * GAP + 0.2)
    axes.set_ylim(-(len(MOMENTS) - 1) * ROW - 0.6, 2.1)
    axes.set_aspect("equal")
    axes.axis("off")
    save(drawn, Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
