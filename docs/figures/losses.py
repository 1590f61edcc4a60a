"""Draws losses.png: losses of one process, of layerzero and of fully_shard, on top of each other.

    python docs/figures/losses.py

Everything is measured: the transformer of the benchmarks learns the text of this repository's pages
with AdamW, on two gloo ranks with half of each batch, and in one process with all of it.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from style import ENGINES, figure, save

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]

from benchmarks.common import run_on_ranks  # noqa: E402
from benchmarks.engines import ENGINES as WRAP  # noqa: E402
from benchmarks.engines import Transformer, TransformerBlock  # noqa: E402

STEPS, BATCH, LENGTH, RANKS = 200, 16, 64, 2
STYLES = {
    "one process": {"color": ENGINES["one process"], "linewidth": 7},
    "FSDP2 (fully_shard), 2 ranks": {"color": ENGINES["fully_shard"], "linewidth": 3.5},
    "layerzero, 2 ranks": {"color": ENGINES["layerzero"], "linewidth": 1.2},
}


def train(engine: str) -> list[float]:
    """Run on each rank; returns the mean loss of all ranks at each step."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.manual_seed(0)
    text = "".join(page.read_text() for page in sorted((REPOSITORY / "docs").rglob("*.md")))
    data = torch.tensor([*text.encode()])
    model = WRAP[engine](Transformer(64, 2, 4, LENGTH), TransformerBlock)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
        batch = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])
        loss = model(batch.chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("losses.png"))
    path = parser.parse_args().out
    found = {
        "one process": run_on_ranks(1, train, "bare")[0],
        "FSDP2 (fully_shard), 2 ranks": run_on_ranks(RANKS, train, "fully_shard")[0],
        "layerzero, 2 ranks": run_on_ranks(RANKS, train, "layerzero")[0],
    }
    drawn, axis = figure(3.2)
    for name, losses in found.items():
        axis.plot(losses, label=name, **STYLES[name])
    axis.set(xlabel="step", ylabel="loss")
    axis.legend()
    save(drawn, path)
    one = found["one process"]
    for name, losses in found.items():
        largest = max(abs(a - b) for a, b in zip(losses, one, strict=True))
        print(f"{name}: last loss {losses[-1]:.4f}, at most {largest:.1e} from one process")


if __name__ == "__main__":
    main()
