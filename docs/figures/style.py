"""The style of the pictures: a colour means one engine, and text is readable on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb

ENGINES = {
    "layerzero": "#4c72b0",
    "fsdp1": "#dd8452",
    "fully_shard": "#55a868",
    "ddp": "#8c8c8c",
    "one process": "#c8c8c8",
}
NAMES = {
    "layerzero": "layerzero",
    "fsdp1": "FSDP1",
    "fully_shard": "FSDP2 (fully_shard)",
    "ddp": "DDP",
}
UNITS = ["#8172b3", "#64b5cd", "#da8bc3", "#ccb974"]
"""Of units of a model; no colour of an engine."""
WIDTH = 7.0
"""Inches. A phone shows a picture 360 pixels wide, and then 11 points are 8 pixels."""

plt.rcParams.update(
    {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.handlelength": 1.2,
    }
)


def pale(colour: str) -> tuple[float, float, float]:
    """The second value of the same engine."""
    red, green, blue = (0.5 + channel / 2 for channel in to_rgb(colour))
    return red, green, blue


def figure(height: float, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure of the common width, `height` inches high, and its axes."""
    return plt.subplots(
        1, columns, figsize=(WIDTH, height), dpi=150, layout="constrained", **options
    )


def save(drawn: Any, path: Path) -> None:
    drawn.savefig(path)
    plt.close(drawn)
    print(f"wrote {path}")
