"""See ranks that draw text or an image at random train with the losses of one process.

    torchrun --standalone --nproc-per-node 2 -- examples/train_two_towers.py
    python examples/train_two_towers.py --single

A number from 0 to 9 comes as a misspelt word or as a noisy picture; a text tower or an image tower
reads it, and a trunk says which number it is. A rank runs one tower in a step, and most often not
the one that other ranks run: the towers are `optional_modules`. `--single` trains on the batches of
all ranks in one process. `--plot losses.png` does both and draws the losses over each other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lm_options import Place, positive_int
from torch import Tensor, nn

from layerzero import ZeRO3

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LETTERS = "abcdefghijklmnopqrstuvwxyz "
LENGTH = 6
PICTURES = [  # 3 x 5 dots, row by row
    *("111101101101111", "010110010010111", "111001111100111", "111001111001111"),
    *("101101111001001", "111100111001111", "111100111101111", "111001010010010"),
    *("111101111101111", "111101111001111"),
]
SIZE = 8
"""Side of a picture, in which the dots lie at a random place."""
WIDTH = 48


class Block(nn.Module):
    """Attention and an MLP, both residual: [batch, length, WIDTH] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class TextTower(nn.Module):
    """Letters [batch, LENGTH] to [batch, LENGTH, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, letters: Tensor) -> Tensor:
        return self.blocks(self.embed(letters) + self.place)  # type: ignore[no-any-return]


class ImageTower(nn.Module):
    """Pictures [batch, SIZE, SIZE] to [batch, SIZE, WIDTH], one entry a row of dots."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(SIZE, WIDTH)
        self.place = nn.Parameter(torch.randn(SIZE, WIDTH) / 10)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, pictures: Tensor) -> Tensor:
        return self.blocks(self.embed(pictures) + self.place)  # type: ignore[no-any-return]


class TwoTowers(nn.Module):
    """Either input to logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.text_tower = TextTower()
        self.image_tower = ImageTower()
        self.trunk = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, len(WORDS))

    def forward(self, sample: Tensor) -> Tensor:
        tower = self.image_tower if sample.is_floating_point() else self.text_tower
        return self.head(self.trunk(tower(sample)).mean(1))  # type: ignore[no-any-return]


def draw(seed: int, step: int, rank: int, batch: int) -> tuple[Tensor, Tensor]:
    """A rank's batch: letters (int64) or pictures (float32), and the numbers they show."""
    rng = random.Random(f"{seed} {step} {rank}")
    is_text = rng.random() < 0.5
    numbers = [rng.randrange(len(WORDS)) for _ in range(batch)]
    samples = [_misspell(WORDS[n], rng) if is_text else _paint(n, rng) for n in numbers]
    return torch.tensor(samples), torch.tensor(numbers)


def _misspell(word: str, rng: random.Random) -> list[int]:
    letters = [LETTERS.index(letter) for letter in word.ljust(LENGTH)]
    letters[rng.randrange(len(word))] = rng.randrange(len(LETTERS))
    return letters


def _paint(number: int, rng: random.Random) -> list[list[float]]:
    picture = [[rng.gauss(0.0, 0.3) for _ in range(SIZE)] for _ in range(SIZE)]
    top, left = 1 + rng.randrange(2), 2 + rng.randrange(2)
    for place, dot in enumerate(PICTURES[number]):
        picture[top + place // 3][left + place % 3] += float(dot)
    return picture


def train(
    model: nn.Module, ranks: Sequence[int], options: argparse.Namespace, device: torch.device
) -> list[list[float]]:
    """Train on the batches of `ranks`, for which this process stands; the losses [step][rank].

    The gradient is the mean over `ranks`; `ZeRO3` then takes the mean over its own ranks.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    for step in range(options.steps):
        optimizer.zero_grad()
        of_ranks = []
        for rank in ranks:
            sample, numbers = draw(options.seed, step, rank, options.batch)
            loss = F.cross_entropy(model(sample.to(device)), numbers.to(device))
            (loss / len(ranks)).backward()
            of_ranks.append(loss.item())
        optimizer.step()
        losses.append(of_ranks)
    return losses


def train_single(options: argparse.Namespace, num_ranks: int) -> list[float]:
    """One process on the batches of all ranks; the mean loss of each step."""
    torch.manual_seed(options.seed)
    losses = train(TwoTowers(), range(num_ranks), options, torch.device("cpu"))
    return [sum(step) / num_ranks for step in losses]


def train_sharded(options: argparse.Namespace, place: Place) -> list[float]:
    """This rank's part of the same. Collective over the default group."""
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", place.local_rank) if on_gpu else torch.device("cpu")
    torch.manual_seed(options.seed)
    module = TwoTowers().to(device)
    towers = [module.text_tower, module.image_tower]
    model = ZeRO3(module, auto_wrap_policy={Block, *map(type, towers)}, optional_modules=towers)
    losses = train(model, [place.rank], options, device)
    own = torch.tensor([loss for (loss,) in losses], dtype=torch.float64, device=device)
    dist.all_reduce(own)
    return (own / place.world_size).tolist()  # type: ignore[no-any-return]


def plot(sharded: Sequence[float], single: Sequence[float], num_ranks: int, path: Path) -> None:
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["font.size"] = 11
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(single, color="#c8c8c8", linewidth=5, label="one process, all batches")
    axes.plot(sharded, color="#4c72b0", linewidth=1.2, label=f"layerzero, {num_ranks} ranks")
    axes.set(xlabel="step", ylabel="loss (nats), mean over ranks")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def report(losses: Sequence[float], options: argparse.Namespace, num_ranks: int) -> None:
    """Print the losses as JSON, the last line; with `--plot`, beside those of one process."""
    result = {"ranks": num_ranks, "losses": losses}
    if options.plot is not None:
        single = train_single(options, num_ranks)
        largest = max(abs(a - b) / b for a, b in zip(losses, single, strict=True))
        print(f"{options.plot}: the two losses differ by {largest:.1g} of the loss at most")
        plot(losses, single, num_ranks, options.plot)
    print(f"loss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last")
    print(json.dumps(result), flush=True)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=positive_int, default=300)
    add("--batch", type=positive_int, default=16, help="of each rank")
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--single", action="store_true", help="one process, on the batches of --ranks ranks")
    add("--ranks", type=positive_int, default=2, help="for --single")
    add("--plot", type=Path, help="draw both losses into this file")
    options = parser.parse_args(argv)
    if options.single:
        if options.plot is not None:
            parser.error("--plot draws the losses of ranks over those of --single: leave one out")
        report(train_single(options, options.ranks), options, options.ranks)
        return
    place = Place.from_environment()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, or with --single")
    on_gpu = torch.cuda.device_count() >= place.local_world_size
    if on_gpu:
        torch.cuda.set_device(place.local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    losses = train_sharded(options, place)
    dist.destroy_process_group()
    if place.rank == 0:
        report(losses, options, place.world_size)


if __name__ == "__main__":
    main(sys.argv[1:])
