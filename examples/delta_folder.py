"""See a reader follow the weights, step by step, that training ranks write into a folder.

    python examples/delta_folder.py

    root/current                                      name of the stream that is written now
    root/3f0c.../0000000040-full-r00000-of-00002      full() of rank 0 after step 40
    root/3f0c.../0000000041-changes-r00000-of-00002   its changes of step 41
    root/3f0c.../.writing-...                         half-written; never read

Each rank writes its own files and waits for no other rank. A file is a sequence of packed patches,
each with its length in 8 bytes before it. It is written under a hidden name, fsynced and renamed,
so a file that is there is complete. A step is there for readers once every rank has written it, so
no reader mixes steps. Take `DeltaWriter` and `DeltaReader` into your own program.
"""

import argparse
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from layerzero import ZeRO3
from layerzero.checkpoint import DeltaError, DeltaStream, Patch, apply_delta, stream_full

RANKS = 2
CHANGES, FULL = "changes", "full"
FILE = re.compile(r"(\d{10})-(changes|full)-r(\d{5,})-of-(\d{5,})")
STREAM = re.compile(r"[0-9a-f]{4,64}")
LENGTH_NBYTES = 8


class DeltaWriter:
    """Writes rounds of a stream. Every rank has one and writes the same steps; not collective."""

    def __init__(self, root: str | Path, stream: DeltaStream) -> None:
        self.root = Path(root)
        self.stream = stream
        self.folder = self.root / stream.name
        self.rank = f"r{stream.sender:05d}-of-{dist.get_world_size():05d}"

    def write(self, step: int) -> int:
        """Write what changed since the last round; returns the bytes of the file.

        `step` is greater than those before. If it fails on a rank, all ranks `write_full`, from
        which readers begin again.
        """
        return self._write(self.stream.changes(), step, CHANGES)

    def write_full(self, step: int) -> int:
        """Write all values as they are now, for readers that begin here.

        `step` is that of the last round, or any number below the first one.
        """
        return self._write(self.stream.full(), step, FULL)

    def prune(self, before: int) -> None:
        """Remove this rank's files of steps before `before`, often that of a `write_full`."""
        for path in self.folder.glob(f"*-{self.rank}"):
            if FILE.fullmatch(path.name) and int(path.name[:10]) < before:
                path.unlink()

    def _write(self, patches: Iterable[Patch], step: int, kind: str) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        there = [int(path.name[:10]) for path in self.folder.glob(f"[0-9]*-{kind}-{self.rank}")]
        if not max(there, default=-1) < step < 10**10:
            raise DeltaError(f"{self.folder}: {kind} of step {max(there)} is there; steps rise")
        path = self.folder / f"{step:010d}-{kind}-{self.rank}"
        replace(path, framed(patches), self.rank)
        replace(self.root / "current", [self.stream.name.encode()], self.rank)
        return path.stat().st_size


def framed(patches: Iterable[Patch]) -> Iterator[bytes]:
    for patch in patches:
        data = patch.to_bytes()
        yield len(data).to_bytes(LENGTH_NBYTES, "little")
        yield data


def replace(path: Path, parts: Iterable[bytes], rank: str) -> None:
    """Write a file that is there, on the disk, as a whole or not at all."""
    hidden = path.with_name(f".writing-{path.name}-{rank}")
    try:
        with hidden.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


class DeltaReader:
    """Applies to a receiver's tensors what the writers of a folder have written, step by step."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.stream: str | None = None
        self.step: int | None = None

    def apply(self, tensors: Mapping[str, Tensor], from_full: bool = False) -> int | None:
        """Apply the steps that are complete and new; returns the last one, or None without any.

        Begins with the newest complete `write_full` (again, with `from_full`), or without one with
        the first round, for tensors with the weights that the model had when the stream was made.

        Raises:
            DeltaError: a file is damaged or a link, or its patches do not fit the tensors. All
                files are read before anything is written.
        """
        if not (self.root / "current").exists():
            return None
        stream = regular(self.root / "current").read_text(errors="replace").strip()
        if not STREAM.fullmatch(stream):
            raise DeltaError(f"{self.root}: current names {stream!r:.100}, which is no stream")
        files, complete = files_in(self.root / stream)
        is_new = from_full or self.stream != stream
        at = None if is_new else self.step
        chosen = []
        if is_new and complete[FULL]:
            at = complete[FULL][-1]
            chosen = [path for step, path in files[FULL] if step == at]
        elif from_full:
            raise DeltaError(f"{self.root / stream}: has no complete full()")
        rounds = [step for step in complete[CHANGES] if at is None or step > at]
        if rounds:
            # A step that one rank could not write is behind: the others' files of it come, too.
            chosen += [
                path
                for step, path in files[CHANGES]
                if step <= rounds[-1] and (at is None or step > at)
            ]
            at = rounds[-1]
        if not chosen:
            return None
        for path in chosen:
            for _ in patches_of(path):
                pass
        for path in chosen:
            for patch in patches_of(path):
                apply_delta(tensors, patch)
        self.stream, self.step = stream, at
        return at


def files_in(folder: Path) -> tuple[dict[str, list[tuple[int, Path]]], dict[str, list[int]]]:
    """By kind, (step, file) in order of step and rank, and the steps that all ranks wrote."""
    if folder.is_symlink():
        raise DeltaError(f"{folder}: a symbolic link, which is not followed")
    files: dict[str, list[tuple[int, Path]]] = {CHANGES: [], FULL: []}
    missing: dict[str, dict[int, int]] = {CHANGES: {}, FULL: {}}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if found := FILE.fullmatch(path.name):
            step, kind, of = int(found[1]), found[2], int(found[4])
            files[kind].append((step, path))
            missing[kind][step] = missing[kind].get(step, of) - 1
    complete = {kind: [step for step, n in own.items() if not n] for kind, own in missing.items()}
    return files, complete


def regular(path: Path) -> Path:
    if path.is_symlink() or not path.is_file():
        raise DeltaError(f"{path}: no regular file, or a symbolic link")
    return path


def patches_of(path: Path) -> Iterator[Patch]:
    """The patches of a file, checked, in order."""
    found = FILE.fullmatch(path.name)
    assert found is not None
    with regular(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while start := file.read(LENGTH_NBYTES):
            length = int.from_bytes(start, "little")
            if length > size - file.tell():
                raise DeltaError(f"{path}: damaged: it ends inside a patch")
            try:
                patch = Patch.from_bytes(file.read(length))
            except DeltaError as error:
                raise DeltaError(f"{path}: {error}") from error
            if (patch.link.stream, patch.link.sender) != (path.parent.name, int(found[3])):
                raise DeltaError(f"{path}: has {patch.where}")
            yield patch


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).bfloat16()


def train(rank: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    model = ZeRO3(make_model().float(), auto_wrap_policy={nn.Linear})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    writer = DeltaWriter(f"{folder}/weights", DeltaStream(model, dtype=torch.bfloat16))
    writer.write_full(0)
    for step in range(1, steps + 1):
        x = torch.randn(8, 64)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        nbytes = writer.write(step)
        if rank == 0:
            print(f"step {step}: {nbytes} bytes of rank 0")
    expected = {name: full.clone() for name, full in stream_full(model, dtype=torch.bfloat16)}
    if rank == 0:
        torch.save(expected, f"{folder}/expected")
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Weights out as deltas, through a folder.")
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args(arguments).steps
    with tempfile.TemporaryDirectory() as folder:
        ranks = torch.multiprocessing.spawn(train, (steps, folder), nprocs=RANKS, join=False)
        tensors = dict(make_model().named_parameters())
        reader = DeltaReader(f"{folder}/weights")
        while reader.step != steps:
            if reader.apply(tensors) is not None:
                print(f"the reader is at step {reader.step}")
            else:
                ranks.join(timeout=0.05)  # Raises if a rank failed.
        while not ranks.join():
            pass
        expected = torch.load(f"{folder}/expected")
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    print("the reader has the bits of the trainer's weights")


if __name__ == "__main__":
    main()
