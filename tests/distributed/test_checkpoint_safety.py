"""Whatever is killed, full, flipped or cut: a checkpoint is whole, or it is refused."""

import errno
import functools
import itertools
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from layerzero import CollectiveError, ZeRO3
from layerzero.checkpoint import CheckpointError, get_model_state_dict, load, save, transfer
from layerzero.checkpoint.format.folder import locked
from layerzero.checkpoint.source import open_source
from tests.harness.checks import assert_same_parameters
from tests.harness.internals import diagnosis
from tests.harness.models import Block, Mlp
from tests.harness.ranks import KeptRanks, on_ranks, run_ranks
from tests.harness.recording import observed
from tests.harness.saved_models import build, train
from tests.harness.served_store import serve_store

FILE_CALLS = (
    "mkdir",
    "open",
    "write",
    "pwritev",
    "ftruncate",
    "fsync",
    "close",
    "rename",
    "replace",
    "unlink",
    "rmdir",
)
# What a kill leaves behind changes with these; around an fsync or a close it is the same.
CHANGE_FOLDERS = ("mkdir", "write", "pwritev", "rename", "replace", "unlink", "rmdir")
Losses = dict[int, float]


@contextmanager
def _killed_at(number: int) -> Iterator[list[str]]:
    """`kill -9` this process before its `number`-th call that changes files. Yields the calls."""
    calls: list[str] = []

    def note(name: str, *_: Any, **__: Any) -> None:
        calls.append(name)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    with ExitStack() as stack:
        for name in FILE_CALLS:
            stack.enter_context(observed(os, name, functools.partial(note, name)))
        yield calls


def _run(root: str, num_steps: int, kill: tuple[int, int] | None) -> Losses:
    """Train with a checkpoint every two steps, from the latest one.

    Args:
        kill: (rank, number of the call) at which its first save ends.
    """
    diagnosis.REPORT_SECONDS = 0.1  # the others need not find out who is dead
    model, optimizer = build()
    begin = 0
    if any(Path(root).iterdir()):
        begin = load(root, model, optimizer)["step"]
    losses = {}
    for step in range(begin, num_steps):
        (losses[step],) = train(model, optimizer, 1, step)
        if step % 2:
            at = kill[1] if kill is not None and kill[0] == dist.get_rank() else -1
            with _killed_at(at):
                save(root, model, optimizer, step=step + 1, extra={"step": step + 1}, keep=1)
    return losses


def _interrupted(root: str, num_steps: int, kill: tuple[int, int]) -> None:
    """The others fail, unless rank 0 had only the checkpoint before left to remove."""
    try:
        _run(root, num_steps, kill)
    except (CollectiveError, CheckpointError):
        return
    assert kill[0] == 0 and Path(root, f"step-{num_steps:08d}").exists()


def _leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def _calls_of_the_next_save(root: str) -> list[str]:
    """Those that `_run` makes when it goes on from two steps."""
    model, optimizer = build()
    load(root, model, optimizer)
    with _killed_at(-1) as calls:
        save(root, model, optimizer, step=4, extra={"step": 4}, keep=1)
    return calls


def _stages(calls: list[str], kinds: tuple[str, ...] = FILE_CALLS) -> list[int]:
    """Numbers, from 1 on, of calls of these kinds: of several of one kind in a row the first."""
    chosen = [number for number, name in enumerate(calls, 1) if name in kinds]
    return [n for n in chosen if n - 1 not in chosen or calls[n - 2] != calls[n - 1]]


def _resume(roots: list[str]) -> list[Losses]:
    return [_run(root, 6, None) for root in roots]


@pytest.mark.parametrize(
    ("rank", "kinds"),
    [
        (0, ("pwritev", "rename", "replace")),
        pytest.param(0, CHANGE_FOLDERS, marks=pytest.mark.slow),
        pytest.param(1, FILE_CALLS, marks=pytest.mark.slow),
    ],
    ids=["0", "0, folders", "1"],
)
def test_a_rank_killed_at_any_stage_leaves_a_checkpoint_to_resume_from(
    tmp_path: Path, rank: int, kinds: tuple[str, ...], pytestconfig: pytest.Config, ranks: KeptRanks
) -> None:
    """At the first call of each stage; with `--every-fault`: at every call."""
    (whole := tmp_path / "whole").mkdir()
    expected = ranks(2, _run, str(whole), 6, None)
    (first := tmp_path / "first").mkdir()
    ranks(2, _run, str(first), 2, None)
    shutil.copytree(first, counted := tmp_path / "counted")
    calls = ranks(2, _calls_of_the_next_save, str(counted))[rank]
    numbers = _stages(calls, kinds)
    assert len(numbers) >= 3
    if pytestconfig.getoption("--every-fault") and kinds is not CHANGE_FOLDERS:
        numbers = list(range(1, len(calls) + 1))

    def killed(number: int) -> Path:
        root = tmp_path / f"{number}, {calls[number - 1]}"
        shutil.copytree(first, root)
        dead = {rank: int(-signal.SIGKILL)}
        run_ranks(2, _interrupted, str(root), 4, (rank, number), expect_exit=dead)
        assert (root / "latest").exists()
        return root

    with ThreadPoolExecutor(3) as pool:
        roots = [*pool.map(killed, numbers)]
    begins = set()
    for rank, found in enumerate(ranks(2, _resume, [str(root) for root in roots])):
        for root, losses in zip(roots, found, strict=True):
            assert losses == {step: expected[rank][step] for step in losses}, root.name
            assert _leftovers(root) == [".lock", "latest", "step-00000006"], root.name
            begins.add(min(losses))
    # From the one before, and from the one being written.
    assert begins <= {2, 4} and (begins == {2, 4} or kinds is not CHANGE_FOLDERS)


@on_ranks(2)
def test_what_one_rank_misreads_is_refused_by_all(tmp_path: Path) -> None:
    """What one rank alone misreads is noticed too, also where another rank has the same shard; and
    damage of a tensor that every rank reads as a whole."""
    torch.manual_seed(0)
    module = Mlp()
    module.register_buffer("mean", torch.ones(3))
    model = ZeRO3(module, auto_wrap_policy={Block}, zero3_size=1, outer="replicate")
    folder = save(tmp_path, model).path
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def misread(moved: int, descriptor: int, views: list[memoryview], offset: int) -> None:
        if dist.get_rank() == 1:
            views[-1][moved - 1] ^= 4  # The first bytes may be of a page before the shard.

    with observed(os, "preadv", after=misread), pytest.raises(CheckpointError, match="damaged"):
        load(tmp_path, model)
    load(tmp_path, model)
    if dist.get_rank() == 0:
        path = folder / "model.safetensors"
        damaged = bytearray(path.read_bytes())
        damaged[open_source(folder).tensors["model"]["mean"].begin] ^= 1
        path.write_bytes(damaged)
    dist.barrier()
    with pytest.raises(CheckpointError, match="mean: damaged"):
        load(tmp_path, model)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def _full_disk(root: str, store_folder: str) -> None:
    rank = dist.get_rank()
    serve_store(0, Path(store_folder))  # a file's would meet the limit below, too
    model, optimizer = build()
    train(model, optimizer, 1, 0)
    save(root, model, optimizer, step=1, max_file_size="2KB")
    train(model, optimizer, 1, 1)
    state = get_model_state_dict(model, full=True)
    before = _leftovers(Path(root))

    def refused(message: str) -> None:
        for blocking in (True, False):
            with pytest.raises(CheckpointError, match=message):
                save(root, model, optimizer, step=2, blocking=blocking).wait()
            dist.barrier()  # the first rank cleans up
            assert _leftovers(Path(root)) == before
            dist.barrier()

    written = itertools.count()

    def fill(*_: Any) -> None:
        if rank == 1 and next(written):  # Not at first.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with observed(os, "pwritev", fill):
        refused(r"rank 1: .*safetensors: .*No space left on device")
    # A limit of the system's own, on rank 0 alone: heads, runs and manifest.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (64, 2048, 5000):
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        refused(r"rank 0: .*File too large")
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        dist.barrier()
    other, other_optimizer = build(seed=2)
    load(root, other, other_optimizer)
    save(root, model, optimizer, step=2)
    load(root, other, other_optimizer)
    assert_same_parameters(get_model_state_dict(other, full=True), state)


def test_a_full_disk_is_an_error_on_every_rank_and_harms_nothing(tmp_path: Path) -> None:
    for name in ("root", "store"):
        (tmp_path / name).mkdir()
    run_ranks(2, _full_disk, str(tmp_path / "root"), str(tmp_path / "store"))


def _dead_in_the_background(root: str) -> str:
    diagnosis.REPORT_SECONDS = 0.1
    model, optimizer = build()
    save(root, model, optimizer, step=1)
    with _killed_at(3 if dist.get_rank() == 1 else -1):
        handle = save(root, model, optimizer, step=2, blocking=False)
        with pytest.raises(CollectiveError, match="rank 1") as error:
            handle.wait()
    assert (Path(root) / "latest").read_text() == "step-00000001\n"
    return str(error.value)


def test_a_rank_that_dies_in_the_background_is_named(tmp_path: Path) -> None:
    told = run_ranks(2, _dead_in_the_background, str(tmp_path), expect_exit={1: -signal.SIGKILL})[0]
    assert "checksums written to .writing-step-00000002" in told
    assert json.loads((tmp_path / "step-00000001" / "checkpoint.json").read_text())["step"] == 1


@on_ranks(2)
def test_a_second_run_is_refused_while_a_first_one_saves(tmp_path: Path) -> None:
    is_first, model = dist.get_rank() == 0, ZeRO3(Mlp())
    (tmp_path / ".lock").write_text("process 1 on elsewhere")  # As a killed run left it.
    dist.barrier()
    go_on = threading.Event()
    with observed(transfer.WriteRanges, "finish", lambda *_: go_on.wait(20)):
        handle = save(tmp_path, model, step=8, blocking=False)
        with (
            pytest.raises(CheckpointError, match=f"{tmp_path}: process .* is saving here"),
            locked(tmp_path),
        ):
            pass
        go_on.set()
        handle.wait()
    dist.barrier()
    is_saving = f"rank 0: {tmp_path}: process .* is saving here"
    other = locked(tmp_path) if is_first else nullcontext()
    with other, pytest.raises(CheckpointError, match=is_saving):
        save(tmp_path, model, step=9)
    save(tmp_path, model, step=9)
    dist.barrier()
    assert _leftovers(tmp_path) == [".lock", "latest", "step-00000008", "step-00000009"]
