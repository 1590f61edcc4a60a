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

import contextlib
import functools
import hashlib
import itertools
import json
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
from layerzero.checkpoint.format.crc import combine, crc32
from layerzero.checkpoint.format.file_plan import announce, merge, plan_files
from layerzero.checkpoint.format.inventory import (
    MODEL,
    OPTIMIZER,
    extra_states,
    model_entries,
    optimizer_groups,
    optimizer_parts,
)
from layerzero.checkpoint.format.manifest import FileRecord, Manifest
from layerzero.checkpoint.transfer import Tally, Transfer, WriteRanges, is_on_host, sum_tallies
from layerzero.config import parse_nbytes
from layerzero.errors import CheckpointError
from layerzero.flat.host_memory import HostMemory
from layerzero.state_dict.checkpoint_group import CheckpointGroup, checkpoint_group_of
from layerzero.state_dict.json_codec import encode
from layerzero.state_dict.names import Names
from layerzero.state_dict.optimizers import (
    Optimizers,
    Stateful,
    check_optimizers,
    check_schedulers,
)
from layerzero.state_dict.preconditions import root_states_of
from layerzero.watch.events import stream_interface

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
    state = root_states_of(model, "save", is_collective=True)[0]
    together = checkpoint_group_of(state, process_group)

    arguments = [str(path), step, keep]
    plan = SavePlan(model, optimizers, schedulers, extra, together, max_file_nbytes, arguments)
    held = contextlib.ExitStack()
    """On the first rank: the lock, and the folder, which is removed unless it is committed."""

    def prepare() -> tuple[int, str] | None:
        plan.match()
        if blocking:
            # What is on a device is copied while it is written, a window at a time.
            wait_for(_devices_of(plan.transfers))
        else:
            plan.transfers = _stage(plan.transfers)
        if not together.is_first:
            return None
        held.enter_context(folders.locked(path))
        number, partial = folders.prepare(path, step)
        held.callback(shutil.rmtree, partial, ignore_errors=True)
        for file in itertools.chain.from_iterable(plan.files.values()):
            folders.write_durably(partial / file.name, file.head, file.nbytes)
        return number, partial.name

    try:
        number, partial_name = together.exchange("preparation", prepare)[0]
    except BaseException:
        held.close()
        raise
    final = path / folders.step_name(number)
    handle = SaveHandle(final, number)
    partial = path / partial_name
    work = functools.partial(_write_and_commit, partial, plan, together, number, keep, held)
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
    held: contextlib.ExitStack,
) -> None:
    """The second half of a save. Runs in the caller or in a thread."""

    def commit() -> None:
        manifest = plan.manifest(step, tallies)
        folders.write_durably(partial / folders.MANIFEST, manifest.to_bytes())
        final = folders.commit(partial)
        if keep is not None:
            folders.prune(final.parent, keep, final)

    def write() -> list[Tally]:
        with WriteRanges(partial) as writing:
            writing.start(plan.transfers)
            return writing.finish()

    with held:
        what = f"checksums written to {partial.name}"
        tallies = together.exchange(what, write, plan.nbytes_moved)
        together.from_first("commit", commit)


class SavePlan:
    """The files and values of a checkpoint, the same on all ranks, and what this rank writes.

    Construction is collective over `together`: each rank lists its content, and all ranks derive
    the same plan from the lists.

    Attributes:
        files: by kind.
        transfers: what this rank writes, from `match` on; the caller may replace the tensors by
            copies.
        nbytes_moved: bytes that the rank with the most moves.

    Args:
        arguments: of the save, which must be the same on all ranks.

    Raises:
        CheckpointError: a value cannot be encoded, an optimizer does not fit the model, or ranks
            passed different arguments or optimizers.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        schedulers: Mapping[str, Stateful] | None,
        extra: Any,
        together: CheckpointGroup,
        max_file_nbytes: int,
        arguments: list[Any],
    ) -> None:
        def collect() -> dict[str, Any]:
            """List this rank's content; returns the announcement for all ranks."""
            names = Names(model)
            self._groups = optimizer_groups(optimizers, names) if optimizers else None
            entries, scalar_keys, values = optimizer_parts(optimizers, names)
            self._entries = [*model_entries(model, names), *entries]
            states = {name: each.state_dict() for name, each in (schedulers or {}).items()}
            is_single = schedulers is None or list(states) == [""]
            self._scheduler = encode(
                states.get("") if is_single else states, "the scheduler's state"
            )
            self._scheduler_names = None if is_single else sorted(states)
            return {
                "arguments": arguments,
                "optimizers": list(optimizers),
                "groups": hashlib.sha256(json.dumps(self._groups).encode()).hexdigest(),
                "scalar_keys": scalar_keys,
                "values": values,
                "extra": encode(extra, "extra"),
                "extra_states": {
                    name: encode(module.get_extra_state(), f"the extra state of {name}")
                    for name, module in extra_states(model).items()
                },
                "nbytes": sum(entry.tensor.nbytes for entry in self._entries),
                "entries": announce(self._entries),
            }

        messages = together.exchange(f"names to save to {arguments[0]}", collect)
        _check_same("root, step and keep", [each["arguments"] for each in messages], together)
        given = [sorted(each["optimizers"]) for each in messages]
        _check_same("names of optimizers", given, together)
        announced, self._writers = merge([each["entries"] for each in messages])
        self._rank = together.rank
        self.nbytes_moved: int = max(each["nbytes"] for each in messages)
        groups = self._groups
        if any(each["groups"] != messages[0]["groups"] for each in messages):
            groups = _merge_groups(together.exchange("groups", lambda: self._groups))
        kinds = [MODEL] if groups is None else [MODEL, OPTIMIZER]
        self.files = {kind: plan_files(kind, announced, max_file_nbytes) for kind in kinds}
        extras = [each["extra"] for each in messages]
        self._manifest = Manifest(
            step=0,
            world_size=len(messages),
            files={},
            tensors={},
            optimizer_groups=groups,
            optimizer_scalars=sorted({key for each in messages for key in each["scalar_keys"]}),
            optimizer_values={name: v for each in messages for name, v in each["values"].items()},
            scheduler=self._scheduler,
            scheduler_names=self._scheduler_names,
            extras=extras[:1] if all(each == extras[0] for each in extras) else extras,
            extra_states={n: v for each in messages for n, v in each["extra_states"].items()},
            aliases={alias: each.name for each in announced for alias in each.aliases},
        )

    def match(self) -> None:
        """Find the place of each shard that this rank writes. Not collective."""
        places = {
            (kind, name): entry._replace(file=file.name)
            for kind, files in self.files.items()
            for file in files
            for name, entry in file.tensors.items()
        }
        self._numbers = {key: number for number, key in enumerate(places)}
        self.transfers = []
        for entry in self._entries:
            key = (entry.kind, entry.name)
            if key not in places or (entry.is_whole and key not in self._writers):
                raise CheckpointError(
                    f"{entry.name} is on this rank, but the rank with the first element of its "
                    "parameter has none like it; an optimizer has to keep the same on every rank"
                )
            writes = self._writers[key] == self._rank if entry.is_whole else entry.replica == 0
            if writes and entry.tensor.numel():
                self.transfers.append(Transfer(places[key], self._numbers[key], entry))
        del self._entries  # The tensors of a background save are copies, which need no others.

    def manifest(self, step: int, tallies: Sequence[Sequence[Tally]]) -> Manifest:
        """Check that each byte was written by one rank, and combine the checksums. `tallies`: of
        each rank."""
        sums = sum_tallies(tallies)
        crcs: dict[str, dict[str, int]] = {}
        records: dict[str, FileRecord] = {}
        for kind, files in self.files.items():
            own = crcs.setdefault(kind, {})
            for file in files:
                parts, sizes = [crc32(file.head)], [len(file.head)]
                for name, entry in file.tensors.items():
                    nbytes, crc = sums.get((self._numbers[kind, name], 0), (0, 0))
                    if nbytes != entry.nbytes:
                        raise CheckpointError(
                            f"{name}: ranks wrote {nbytes} of {entry.nbytes} bytes; process_group= "
                            "has to contain every rank of the model"
                        )
                    own[name] = crc
                    parts.append(crc)
                    sizes.append(nbytes)
                records[file.name] = FileRecord(file.nbytes, combine(parts, sizes))
        return replace(self._manifest, step=step, files=records, tensors=crcs)


def _check_same(what: str, values: Sequence[Any], together: CheckpointGroup) -> None:
    if any(value != values[0] for value in values):
        pairs = zip(together.ranks, values, strict=True)
        listed = "; ".join(f"rank {rank}: {value}" for rank, value in pairs)
        raise CheckpointError(f"{what} differ between ranks: {listed}; pass the same on every rank")


def _merge_groups(everyone: Sequence[list[dict[str, Any]] | None]) -> list[dict[str, Any]] | None:
    merged: dict[str, dict[str, Any]] = {}
    for groups in everyone:
        for number, group in enumerate(groups or ()):
            own = {key: value for key, value in group.items() if key != "params"}
            into = merged.setdefault(json.dumps([number, own]), {**own, "params": []})
            into["params"] = list(dict.fromkeys([*into["params"], *group["params"]]))
    names = [name for group in merged.values() for name in group["params"]]
    if len(names) != len(set(names)):
        raise CheckpointError("options of optimizer groups differ between ranks; set them alike")
    return list(merged.values())
