"""Draws ledger.png: what `layerzero.ledger` draws of a step on two CPU ranks.

    python docs/figures/ledger.py

Everything is measured: four layers train on two gloo ranks. Of several ledgers rank 0 draws the one
with the shortest steps, and saves it as ledger.json, which <https://ui.perfetto.dev> opens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]

import layerzero  # noqa: E402
from benchmarks.common import run_on_ranks  # noqa: E402
from layerzero import ZeRO3  # noqa: E402

WIDTH, HIDDEN, ROWS, NUM_UNITS, NUM_LEDGERS, NUM_STEPS = 512, 2048, 64, 4, 10, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def record(picture: str) -> str | None:
    """On each rank: train, and keep the best ledger. Rank 0 returns it as text."""
    torch.manual_seed(0)
    model = ZeRO3(nn.Sequential(*(Layer() for _ in range(NUM_UNITS))), auto_wrap_policy={Layer})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(ROWS, WIDTH)

    def steps(count: int) -> None:
        for _ in range(count):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(2)  # The first records the order of units.
    ledgers = []
    for _ in range(NUM_LEDGERS):
        with layerzero.ledger(model) as ledger:
            steps(NUM_STEPS)
        ledgers.append(ledger)
    if dist.get_rank():
        return None
    best = min(ledgers, key=lambda ledger: ledger.step_ms)
    best.plot(picture)
    best.save(Path(picture).with_suffix(".json"))
    return str(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("ledger.png"))
    print(run_on_ranks(2, record, str(parser.parse_args().out))[0])


if __name__ == "__main__":
    main()
