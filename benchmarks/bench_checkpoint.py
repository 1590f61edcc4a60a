"""How fast is a checkpoint written and read, compared with the disk and with torch's DCP?

A transformer and its AdamW state on gloo ranks of this machine are saved and loaded by
`layerzero.checkpoint`, and by `torch.distributed.checkpoint` (DCP) for the same sharded model and
for a `fully_shard` one. Baselines move the same number of bytes and do nothing else: `dd`, one
process between memory and the same disk; `disk`, all ranks at once with O_DIRECT and memory that is
allocated already, a lower bound for any checkpoint; and, for a load, `memory`, which touches as
much fresh memory as the values take.
Every contender fsyncs before the clock stops, and files are dropped from the page cache before a
read. A load is that of a resumed run: the model exists, the optimizer is new. The contenders take
turns in each round, so a ratio is within one round; the slowest rank counts.

--contenders chooses some of them; columns that compare with one that is left out are left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import (
    SIZES,
    Spread,
    interleave,
    max_over_ranks,
    options,
    print_result,
    print_table,
    ratio,
    run_on_ranks,
)
from engines import TransformerBlock, fully_shard, layerzero, make_transformer
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_helpers

from layerzero import checkpoint
from layerzero.checkpoint.transfer import PAGE_NBYTES, bytes_of, pages

NAMES = ("dd", "disk", "memory", "layerzero", "dcp", "dcp_fully_shard")
BARS = {"of_dd": 0.8, "of_dcp": 0.5, "save_of_disk": 1.25, "load_of_disk": 1.4}


def main() -> None:
    parser = options(__doc__, size="100m", world_size=2, rounds=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument(
        "--contenders", type=lambda text: text.split(","), help=f"some of {','.join(NAMES)}"
    )
    args = parser.parse_args()
    names = args.contenders or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"--contenders: unknown: {', '.join(sorted(unknown))}")
    args.contenders = names
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=args.folder) as folder:
        args.folder = folder
        results = run_on_ranks(args.world_size, measure, args)
    found = report(args, results[0], names)
    print_result(args, nbytes=results[0]["nbytes"], **found)


@dataclass
class Contender:
    """One way to write a checkpoint, and to read it."""

    save: Callable[[str], object]
    load: Callable[[str], object]
    copies: bool = True
    """Whether a save takes as much memory as it writes: in the page cache, say."""
    saved: Sequence[torch.Tensor] = ()
    """What it saves."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run on each rank: seconds of each contender, in each round."""
    size = SIZES[args.size]
    model, optimizer = stepped(layerzero(make_transformer(size, 128), TransformerBlock))
    weights = sum(parameter.numel() for parameter in make_transformer(size, 128).parameters())
    nbytes = 3 * 4 * weights  # and two moments
    contenders = {
        "dd": Contender(lambda path: dd_write(path, nbytes), dd_read),
        "disk": disk_contender(nbytes // dist.get_world_size()),
        "memory": Contender(
            lambda path: os.makedirs(path, exist_ok=True), lambda path: touch_memory(nbytes)
        ),
        "layerzero": Contender(
            lambda path: checkpoint.save(path, model, optimizer),
            lambda path: checkpoint.load(path, model, new_optimizer(model)),
            copies=False,
            saved=values(model, optimizer),
        ),
        "dcp": dcp_contender(model, optimizer, checkpoint),
    }
    if "dcp_fully_shard" in args.contenders:
        torchs = fully_shard(make_transformer(size, 128), TransformerBlock)
        contenders["dcp_fully_shard"] = dcp_contender(*stepped(torchs), torch_helpers)

    def timed(name: str) -> tuple[float, float]:
        path = f"{args.folder}/{name}"
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            os.sync()
        took, contender = [], contenders[name]
        # A virtual machine gives free memory back to its host. Getting it again may be slower than
        # the disk, and so is all memory while that goes on, or that was not used for a while. So a
        # contender rests until what the last one freed is gone. Then it begins with what it saves
        # just used, as by a step, and the memory that it will take just freed.
        time.sleep(_REST_S)
        for tensor in contender.saved:
            tensor.sum()
        for work, takes in ((contender.save, contender.copies), (contender.load, True)):
            held = None
            if takes:
                touch_memory(nbytes)  # On small pages, and on huge ones.
                held = pages(nbytes // dist.get_world_size()).fill_(1)
            dist.barrier()
            del held
            start = time.perf_counter()
            work(path)
            took.append(max_over_ranks(time.perf_counter() - start))
            if dist.get_rank() == 0:
                drop_from_cache(path)
        if dist.get_rank() == 0:
            shutil.rmtree(path)
        return took[0], took[1]

    took = interleave(args.contenders, timed, args.rounds)
    return {
        "nbytes": nbytes,
        "save": {name: [each[0] for each in values] for name, values in took.items()},
        "load": {name: [each[1] for each in values] for name, values in took.items()},
    }


def stepped(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, and an optimizer that has made one step."""
    optimizer = new_optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def dcp_contender(model: nn.Module, optimizer: torch.optim.Optimizer, helpers: Any) -> Contender:
    """DCP as users call it; `helpers` has torch's state dict functions, or ours of equal names."""

    def state(of: torch.optim.Optimizer) -> dict[str, Any]:
        return {
            "model": helpers.get_model_state_dict(model),
            "optimizer": helpers.get_optimizer_state_dict(model, of),
        }

    def save(path: str) -> None:
        # DCP's file writer fsyncs by default.
        dcp.save(state(optimizer), checkpoint_id=path)

    def load(path: str) -> None:
        fresh = new_optimizer(model)
        into = state(fresh)
        dcp.load(into, checkpoint_id=path)
        helpers.set_model_state_dict(model, into["model"])
        helpers.set_optimizer_state_dict(model, fresh, into["optimizer"])

    return Contender(save, load, saved=values(model, optimizer))


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's part of the weights and the optimizer's state."""
    states = (each for state in optimizer.state.values() for each in state.values())
    return [
        getattr(each, "_local_tensor", each).detach() for each in (*model.parameters(), *states)
    ]


_REST_S = 2.5
_REQUEST_NBYTES = 8 << 20
_DD = ("dd", "bs=8M", "status=none")


def dd_write(path: str, nbytes: int) -> None:
    """One process writes all bytes; the others wait."""
    if dist.get_rank() == 0:
        os.makedirs(path)
        count = f"count={nbytes}"
        source = ("if=/dev/zero", f"of={path}/file", "conv=fsync", "iflag=count_bytes", count)
        subprocess.run([*_DD, *source], check=True)
    dist.barrier()


def dd_read(path: str) -> None:
    if dist.get_rank() == 0:
        subprocess.run([*_DD, f"if={path}/file", "of=/dev/null"], check=True)
    dist.barrier()


def disk_contender(nbytes: int) -> Contender:
    """Each rank moves its bytes to and from its own file, with several requests at once."""
    memory = pages(nbytes // PAGE_NBYTES * PAGE_NBYTES).fill_(1)
    data = bytes_of(memory)
    windows = range(0, len(data), _REQUEST_NBYTES)

    def save(path: str) -> None:
        os.makedirs(path, exist_ok=True)
        file = os.open(f"{path}/{dist.get_rank()}", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        os.ftruncate(file, len(data))
        each(lambda begin: os.pwrite(file, data[begin : begin + _REQUEST_NBYTES], begin))
        os.fsync(file)
        os.close(file)

    def load(path: str) -> None:
        file = os.open(f"{path}/{dist.get_rank()}", os.O_RDONLY | os.O_DIRECT)
        each(lambda begin: os.preadv(file, [data[begin : begin + _REQUEST_NBYTES]], begin))
        os.close(file)

    def each(move: Callable[[int], int]) -> None:
        with ThreadPoolExecutor(4) as pool:
            if sum(pool.map(move, windows)) != len(data):
                raise RuntimeError("the system moved less than it was asked for")

    return Contender(save, load, copies=False, saved=[memory])


def touch_memory(nbytes: int) -> None:
    """Each rank touches its share of fresh memory, as any load into new tensors must."""
    fresh = torch.empty(nbytes // dist.get_world_size(), dtype=torch.uint8)
    for part in fresh.split(8 << 20):
        part.fill_(1)


def drop_from_cache(path: str) -> None:
    """Drop files from the page cache, so that the next read comes from the disk."""
    for file in Path(path).rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def report(
    args: argparse.Namespace, results: dict[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Print a table; returns its values."""
    nbytes = results["nbytes"]
    print(f"{nbytes / 1e9:.2f} GB on {args.world_size} ranks, medians of {args.rounds} rounds\n")
    columns = ["", "s", "GB/s"]
    if "dd" in names:
        columns.append("of dd's GB/s")
    if "disk" in names:
        columns.append("of disk's time")
    if "dcp" in names:
        columns.append("of DCP's time")
    rows, found = [], {}
    for verb in ("save", "load"):
        took = results[verb]
        for name in names:
            if (verb, name) == ("save", "memory"):
                continue
            speed = Spread.of([nbytes / 1e9 / each for each in took[name]])
            ratios = {}
            if "dd" in names:
                ratios["of_dd"] = ratio(took["dd"], took[name])  # of its bytes per second
            if "disk" in names:
                ratios["of_disk_time"] = ratio(took[name], took["disk"])
            if "dcp" in names:
                ratios["of_dcp_time"] = ratio(took[name], took["dcp"])
            median = f"{Spread.of(took[name]).median:.2f}"
            texts = [each.text() for each in ratios.values()]
            rows.append([f"{verb} {name}", median, speed.text(), *texts])
            found[f"{verb}_{name}"] = {
                "seconds": Spread.of(took[name]).as_dict(),
                "gb_per_s": speed.as_dict(),
                **{key: each.as_dict() for key, each in ratios.items()},
            }
    print_table(columns, rows)
    print(
        f"\nbars: layerzero at least {BARS['of_dd']} of dd, at most {BARS['of_dcp']} of DCP's time;"
        f"\nof disk's time at most {BARS['save_of_disk']} to save, {BARS['load_of_disk']} to load"
    )
    return found


if __name__ == "__main__":
    main()
