"""The example's flags, and every check that is possible before a process group exists.

Uses the standard library only, so that flags are checked before torch is imported.
"""

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lm_data import read_corpus

ENGINES = ("layerzero", "fully_shard", "ddp")
# A launcher kills the other ranks when one exits. Ranks other than 0 wait this long, so that rank
# 0, the only one that prints the reason, exits first.
SILENT_EXIT_DELAY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Options:
    steps: int
    data: Path | None
    layers: int
    width: int
    batch: int
    seq: int
    seed: int
    lr: float
    out: Path
    engine: str
    log: Path | None
    checkpoint_dir: Path | None
    checkpoint_every: int | None
    resume: bool
    keep: int | None


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process's rank, from a launcher such as torchrun; a single rank without one."""

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int

    @classmethod
    def from_environment(cls) -> "Place":
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
        )


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def multiple_of_8(text: str) -> int:
    if positive_int(text) % 8:
        raise argparse.ArgumentTypeError(f"expected a multiple of 8, got {text!r}")
    return int(text)


def seed_int(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 0 to 2**63 - 1, got {text!r}"
        )
    return int(text)


def learning_rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return rate


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_lm.py",
        description="Train a byte-level transformer on text with one of three sharding engines.",
        epilog="Peak bytes are those of the fullest rank: on a GPU torch.cuda.max_memory_allocated,"
        " on CPU the growth of the process's peak resident memory since just before the model was"
        " built, so parameters, gradients, optimizer state, activations and buffers all count.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--steps", type=positive_int, default=150, help="optimizer steps")
    add("--data", type=Path, help="file or folder to train on; None: Python's standard library")
    add("--layers", type=positive_int, default=4, help="transformer blocks")
    add("--width", type=multiple_of_8, default=448, help="size of the residual stream")
    add("--batch", type=positive_int, default=4, help="sequences per rank and step")
    add("--seq", type=positive_int, default=128, help="bytes per sequence")
    add("--seed", type=seed_int, default=0, help="of initial weights, data order and sampling")
    add("--lr", type=learning_rate, default=1e-3, help="peak learning rate")
    add("--out", type=Path, default=Path("out"), help="folder for loss.png and results.json")
    add("--engine", choices=ENGINES, default="layerzero", help="what shards the model")
    add(
        "--log",
        type=Path,
        help="file that gets one JSON object a step: step, loss (mean over ranks), rank_losses"
        " (float32, unrounded), learning_rate, grad_norm (before clipping), tokens_per_s (all"
        " ranks), bytes_per_rank (peak so far)",
    )
    add = parser.add_argument_group("checkpoints", "for --engine layerzero").add_argument
    add("--checkpoint-dir", type=Path, help="folder of checkpoints; the last step is always saved")
    add("--checkpoint-every", type=positive_int, help="also save every so many steps, meanwhile")
    add("--keep", type=positive_int, help="checkpoints that stay, the newest; None: all")
    add(
        "--resume",
        action="store_true",
        help="go on from the latest in --checkpoint-dir, or start where there is none. With equal"
        " flags and ranks losses are, bit for bit, those of a run that was never stopped. --log"
        " loses the lines behind the checkpoint and goes on from there. The data go on where they"
        " were: at another number of ranks choose --batch such that ranks x batch stays the same",
    )
    return parser


def reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}"


def load_options(argv: Sequence[str], world_size: int) -> tuple[Options, bytearray]:
    """Parse and check the flags, make the output folders, read the text.

    Raises:
        SystemExit: with the reason on stderr, when anything is wrong.
    """
    parser = build_parser()
    options = Options(**vars(parser.parse_args(argv)))
    try:
        corpus = read_corpus(options.data)
    except OSError as error:
        refuse(f"argument --data: {reason(error)}")
    check_checkpoint_flags(options)
    needed = world_size * options.batch * (options.seq + 1)
    if len(corpus) < needed:
        refuse(
            f"argument --data: {options.data or 'the standard library'} has {len(corpus)} bytes,"
            f" too few for one step: {world_size} rank(s) x {options.batch} sequences x"
            f" {options.seq} + 1 bytes = {needed}; give more text or lower --batch or --seq"
        )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"argument --out: {reason(error)}")
    try:
        if options.log is not None:
            options.log.parent.mkdir(parents=True, exist_ok=True)
            options.log.open("ab").close()
    except OSError as error:
        refuse(f"argument --log: {reason(error)}")
    return options, corpus


def check_checkpoint_flags(options: Options) -> None:
    """Reject checkpoint flags that exclude each other, and create the folder of checkpoints."""
    folder = options.checkpoint_dir
    if folder is None:
        for flag in ("checkpoint_every", "keep", "resume"):
            if getattr(options, flag):
                refuse(f"argument --{flag.replace('_', '-')}: needs --checkpoint-dir")
        return
    if options.engine != "layerzero":
        refuse(f"argument --checkpoint-dir: needs --engine layerzero, got {options.engine}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"argument --checkpoint-dir: {reason(error)}")
    if not os.access(folder, os.W_OK):
        refuse(f"argument --checkpoint-dir: {folder}: not writable")
    if has_checkpoints(folder) and not options.resume:
        refuse(
            f"argument --checkpoint-dir: {folder} has checkpoints of another run; pass --resume to"
            " go on with it, or give another folder"
        )


def has_checkpoints(folder: Path) -> bool:
    return (folder / "latest").exists() or any(folder.glob("step-*"))


def refuse(message: str) -> NoReturn:
    print(f"train_lm.py: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def load_options_on_rank(argv: Sequence[str], place: Place) -> tuple[Options, bytearray]:
    """`load_options` on every rank; only rank 0 prints. All ranks have the same flags."""
    if place.rank == 0:
        return load_options(argv, place.world_size)
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        try:
            return load_options(argv, place.world_size)
        except SystemExit as stop:
            if stop.code:
                time.sleep(SILENT_EXIT_DELAY_S)
            raise


def refuse_on_rank(message: str, place: Place) -> NoReturn:
    """`refuse` on all ranks; only rank 0 prints the message."""
    if place.rank:
        time.sleep(SILENT_EXIT_DELAY_S)
        raise SystemExit(2)
    refuse(message)
