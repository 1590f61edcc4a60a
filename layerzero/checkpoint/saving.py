"""save(): every rank writes its own shards in place; one rename commits the checkpoint.

    announce   every rank announces the tensors whose first element it has; all derive all files
    prepare    the first rank creates the folder, and the files with their headers; for a
               background save ranks copy their shards to host memory
    write      every rank writes its runs and fsyncs them, shards on a device through windows of
               host memory; ranks exchange checksums
    commit     the first rank writes the manifest and renames the folder

After each step the ranks exchange whether it succeeded, so an error on one rank is an error on all,
and nothing is committed. Ranks exchange names, sizes and checksums, but no parameters.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from layerzero.checkpoint.format import folder as folders
from layerzero.checkpoint.save_plan import SavePlan
from layerzero.checkpoint.transfer import Transfer, is_on_host, write_ranges
from layerzero.config import parse_nbytes
from layerzero.flat.device_streams import stream_interface
from layerzero.flat.host_memory import HostMemory
from layerzero.state_dict.checkpoint_group import CheckpointGroup, checkpoint_group_of
from layerzero.state_dict.optimizers import Stateful, check_optimizers, check_schedulers
from layerzero.state_dict.preconditions import root_state_of

_logger = logging.getLogger(__name__)


class SaveHandle:
    """A save that is finished or running."""

    path: Path
    """The checkpoint's folder, once it is committed."""
    step: int

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the save has committed or failed. Not collective; does not block."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Return the folder once it is committed. Blocks; not collective, any rank may call it.

        Raises:
            CheckpointError: the save failed; earlier checkpoints are unchanged.
            CollectiveError: a rank died or did not take part.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error
                _logger.error("the background save of %s failed: %s", self.path, error)

        # Not a daemon thread, so that a process that exits normally finishes its save.
        self._thread = threading.Thread(target=run, name="layerzero-save")
        self._thread.start()


def save(
    root: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
    *,
    step: int | None = None,
    scheduler: Stateful | Mapping[str, Stateful] | None = None,
    extra: Any = None,
    keep: int | None = None,
    blocking: bool = True,
    max_file_size: str = "5GB",
    process_group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Write the checkpoint `root/step-00000042`, then `root/latest`, which names it.

    Collective over the ranks that share the model. Nothing is gathered: every rank writes its own
    shards in place. Earlier checkpoints are untouched until the new one is complete and on the
    disk; until then, and after an error, `root/latest` names the previous one. See
    docs/reference/checkpoint_format.md for the format.

    Args:
        root: a folder on a file system that all ranks share; created if missing.
        model: a ZeRO3 module, between steps.
        optimizer: its state is saved under the parameters' names. Several optimizers: a dict of
            them, by names of letters, digits, "_", "-" and ".", the same on every rank.
        step: number of the checkpoint; None: the highest in `root` + 1. A checkpoint of that number
            is replaced.
        scheduler: an object with `state_dict()`, or several by name; the first rank's are saved.
        extra: other state of the run, such as random states and the position in the data: plain
            values, small tensors and numpy arrays, in any nesting. Saved for each rank.
        keep: number of checkpoints to keep in `root`, including this one; those with the lowest
            steps are removed after the commit. None: all.
        blocking: False: return when the shards are copied to host memory, and write in the
            background. The copy needs memory until the end. The next save or load on these ranks
            waits for the end, and raises the error if it failed.
        max_file_size: largest size of a file of weights or of optimizer state.
        process_group: the ranks that save together, if they are more than the model's own, as with
            pipeline stages. Each rank then passes its own modules, and names must not collide.

    Returns:
        A handle whose `wait()` returns the folder. A blocking save is finished already.

    Raises:
        CheckpointError: on all ranks, with the reason of the one that failed: the disk is full, a
            value cannot be saved without pickle, an optimizer is of another model, two optimizers
            share a parameter, another run is saving to `root`.
        CollectiveError: a rank died or did not take part.
        RuntimeError: the model is in backward.
        ValueError, TypeError: a bad argument.
    """
    path = Path(root)
    if keep is not None and keep < 1:
        raise ValueError(f"keep: expected at least 1 checkpoint or None, got {keep}")
    if step is not None and (not isinstance(step, int) or step < 0):
        raise ValueError(f"step: expected an int of 0 or more, or None, got {step!r}")
    max_file_nbytes = parse_nbytes(max_file_size, "max_file_size")
    optimizers = check_optimizers(optimizer, "save")
    schedulers = check_schedulers(scheduler, "save")
    state = root_state_of(model, "save", is_collective=True)
    together = checkpoint_group_of(state, process_group)

    arguments = [str(path), step, keep]
    plan = SavePlan(model, optimizers, schedulers, extra, together, max_file_nbytes, arguments)
    lock = folders.RootLock(path)
    made: list[Path] = []

    def prepare() -> tuple[int, str] | None:
        plan.match()
        if blocking:
            # What is on a device is copied while it is written, a window at a time.
            wait_for(_devices_of(plan.transfers))
        else:
            plan.transfers = _stage(plan.transfers)
        if not together.is_first:
            return None
        lock.acquire()
        number, partial = folders.prepare(path, step)
        made.append(partial)
        for file in itertools.chain.from_iterable(plan.files.values()):
            folders.write_durably(partial / file.name, file.head, file.nbytes)
        return number, partial.name

    try:
        number, partial_name = together.exchange("preparation", prepare)[0]
    except BaseException:
        for partial in made:
            shutil.rmtree(partial, ignore_errors=True)
        lock.release()
        raise
    final = path / folders.step_name(number)
    handle = SaveHandle(final, number)
    partial = path / partial_name
    work = functools.partial(_write_and_commit, partial, plan, together, number, keep, lock)
    if blocking:
        work()
    else:
        together.wait_for_save = handle.wait
        handle.start(work)
    return handle


def _stage(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Copy shards into new host memory, pinned if any is on a device. Blocks until copied."""
    devices = _devices_of(transfers)
    total = sum(-(-t.entry.tensor.nbytes // 64) * 64 for t in transfers)
    memory = HostMemory(bool(devices), next(iter(devices), torch.device("cpu"))).lasting(
        total, torch.uint8
    )
    staged = []
    end = 0
    for transfer in transfers:
        source = transfer.entry.tensor
        copy = memory[end : end + source.nbytes].view(source.dtype)
        copy.copy_(source, non_blocking=True)
        end += -(-source.nbytes // 64) * 64
        staged.append(transfer._replace(entry=replace(transfer.entry, tensor=copy)))
    wait_for(devices)
    return staged


def wait_for(devices: Iterable[torch.device]) -> None:
    """Block until the current stream of each is done."""
    for device in devices:
        stream_interface(device).current_stream(device).synchronize()


def _devices_of(transfers: Sequence[Transfer]) -> set[torch.device]:
    return {t.entry.tensor.device for t in transfers if not is_on_host(t.entry.tensor)}


def _write_and_commit(
    partial: Path,
    plan: SavePlan,
    together: CheckpointGroup,
    step: int,
    keep: int | None,
    lock: folders.RootLock,
) -> None:
    """The second half of a save. Runs in the caller or in a thread."""

    def commit() -> None:
        manifest = plan.manifest(step, tallies)
        folders.write_durably(partial / folders.MANIFEST, manifest.to_bytes())
        final = folders.commit(partial)
        if keep is not None:
            folders.prune(final.parent, keep, final)

    try:
        tallies = together.exchange(
            f"checksums written to {partial.name}",
            lambda: write_ranges(partial, plan.transfers),
            plan.nbytes_moved,
        )
        together.from_first("commit", commit)
    except BaseException:
        if together.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        lock.release()
