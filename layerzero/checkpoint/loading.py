"""load(): every rank reads its own shards; nothing changes before all of them are verified.

    open      the first rank reads and checks names, sizes and the manifest, and sends them to all
    match     every rank finds its shards; missing or unfitting tensors are an error on all ranks
    read      every rank reads its runs into new host memory; ranks exchange checksums
    verify    checksums of what all ranks read are compared with those in the manifest
    apply     values are copied into parameters, optimizer and scheduler

Only the last step changes anything, and it reads no file.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from layerzero.checkpoint.format.inventory import MODEL
from layerzero.checkpoint.load_plan import LoadPlan
from layerzero.checkpoint.source import Source, check_crc, open_source
from layerzero.checkpoint.transfer import Tally, read_ranges, sum_tallies
from layerzero.notices import some
from layerzero.state_dict.checkpoint_group import CheckpointGroup, checkpoint_group_of
from layerzero.state_dict.errors import CheckpointError
from layerzero.state_dict.json_codec import decode
from layerzero.state_dict.optimizer_state import put_state
from layerzero.state_dict.optimizers import (
    Optimizers,
    Stateful,
    check_optimizers,
    check_schedulers,
    fill_slots,
    slots_of,
)
from layerzero.state_dict.preconditions import root_states_of

_logger = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
    *,
    scheduler: Stateful | Mapping[str, Stateful] | None = None,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Load a checkpoint, written at any number of ranks, into a wrapped model.

    Collective over the ranks that share the model; blocks the host. Every rank reads its own
    shards, regardless of the sharding they were written with, and casts them to the dtype of its
    main weights. Everything is read and verified before anything changes, so each rank needs
    additional host memory of the size of its shards.

    Args:
        path: a folder of checkpoints (loads its latest one), one checkpoint's folder, or
            safetensors from another source: a folder as `save_pretrained` writes it, or one file.
        model: a ZeRO3 module, between steps.
        optimizer: gets its state and the options of its groups (learning rate and so on). Several
            optimizers: a dict with the names that they were saved under.
        scheduler: gets its state, after the optimizer; several: as for `optimizer`.
        strict: False: load what fits, and log a warning that lists missing and unexpected names.
        rename: maps the name of a tensor in the checkpoint to its name in the model, or to None to
            leave it out. For weights from another source, without an optimizer; the same on all
            ranks.
        process_group: as for `save`.

    Returns:
        The `extra` of `save`: this rank's own if the checkpoint was written by as many ranks, else
        the first rank's. None if the checkpoint has none.

    Raises:
        CheckpointError: on all ranks; model, optimizer and scheduler are unchanged. There is no
            checkpoint, a file is missing or damaged, shapes differ, or, with `strict`, names are
            missing or unexpected, those of optimizers and schedulers included.
        CollectiveError: a rank died or did not take part.
        RuntimeError: the model is in backward.
        ValueError: `rename` together with an optimizer.
    """
    optimizers = check_optimizers(optimizer, "load")
    schedulers = check_schedulers(scheduler, "load")
    if rename is not None and optimizers:
        raise ValueError("rename: cannot be combined with an optimizer; it renames weights only")
    roots = root_states_of(model, "load", is_collective=True)
    together = checkpoint_group_of(roots[0], process_group)
    source = Source.from_json(
        together.from_first(
            f"contents of {path}",
            lambda: open_source(Path(path), with_optimizer=bool(optimizers)).to_json(),
        )
    )
    if rename is not None:
        source = source.renamed(rename)
    plan = LoadPlan(source, model, strict)

    def find() -> dict[str, Any]:
        plan.match_model()
        if optimizers:
            plan.match_optimizers(optimizers)
        if schedulers is not None:
            plan.match_schedulers(schedulers)
        nbytes = sum(transfer.entry.tensor.nbytes for transfer in plan.transfers)
        return {"wanted": sorted(plan.wanted), "missing": plan.missing, "nbytes": nbytes}

    summaries = together.exchange("names to load", find)
    _check_names(source, summaries, strict, together)
    tallies: list[Tally] = []

    def read() -> list[Tally]:
        tallies.extend(read_ranges(source.folder, plan.transfers))
        read = zip(tallies, plan.transfers, strict=True)
        return [tally for tally, t in read if not t.entry.is_whole]

    most = max(each["nbytes"] for each in summaries)
    of_all = together.exchange(f"checksums read from {source.folder.name}", read, most)
    together.exchange("verification", lambda: _verify(source, plan, tallies, of_all))
    extras = [] if source.manifest is None else source.manifest.extras
    own = together.rank if len(extras) == len(together.ranks) else 0
    extra = decode(extras[own]) if extras else None
    for unit in itertools.chain.from_iterable(root.units for root in roots):
        unit.before_load()
    together.exchange("application", lambda: _apply(plan, optimizers))
    return extra


def _check_names(
    source: Source, summaries: Sequence[dict[str, Any]], strict: bool, together: CheckpointGroup
) -> None:
    """Raise, or warn unless `strict`, about names missing on any rank or unexpected on all."""
    missing = sorted({name for each in summaries for name in each["missing"]})
    wanted = {name for each in summaries for name in each["wanted"]}
    unexpected = [name for name in source.tensors[MODEL] if name not in wanted]
    if not missing and not unexpected:
        return
    text = (
        f"{source.folder}: missing in the checkpoint: {some(missing)}; unexpected, because the "
        f"model has no such name: {some(unexpected)}"
    )
    if strict:
        raise CheckpointError(text + ". To load what fits, pass strict=False")
    if together.is_first:
        _logger.warning("%s", text)


def _verify(
    source: Source, plan: LoadPlan, tallies: Sequence[Tally], of_all: Sequence[Sequence[Tally]]
) -> None:
    """Compare the bytes that were read with the checksums. Not collective."""
    by_number = [
        (name, place) for tensors in source.tensors.values() for name, place in tensors.items()
    ]
    sums = sum_tallies(of_all)
    for tally, transfer in zip(tallies, plan.transfers, strict=True):
        if transfer.entry.is_whole:  # Every rank reads all of it, and checks it on its own.
            sums[tally.number, tally.replica] = (tally.nbytes, tally.crc)
    for (number, _), (nbytes, crc) in sorted(sums.items()):
        name, place = by_number[number % len(by_number)]
        where = f"{source.folder / place.file}: {name}"
        if nbytes != place.entry.nbytes:
            raise CheckpointError(
                f"{where}: ranks read {nbytes} of {place.entry.nbytes} bytes; process_group= has "
                "to contain every rank of the model"
            )
        check_crc(where, crc, place.crc)


def _apply(plan: LoadPlan, optimizers: Optimizers) -> None:
    with torch.no_grad():
        for target, memory in plan.model_parts:
            target.copy_(memory.view(target.shape))
    for module, value in plan.extra_states:
        module.set_extra_state(value)
    for name, options in plan.options.items():
        _apply_to_optimizer(plan, name, optimizers[name], options)
    for scheduler, state in plan.schedulers:
        scheduler.load_state_dict(state)


def _apply_to_optimizer(
    plan: LoadPlan,
    name: str,
    optimizer: torch.optim.Optimizer,
    options: Sequence[dict[str, Any]],
) -> None:
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for part in plan.state_parts[name]:
        memory = part.memory.view(part.shape)
        if part.follows_parameter:
            memory = memory.to(part.parameter.dtype)
        states.setdefault(part.parameter, {})[part.key] = memory
    for parameter, values in plan.state_values[name]:
        own = states.setdefault(parameter, {})
        for key, value in values.items():
            own[key] = fill_slots(value, {slot: own.pop(slot) for slot in slots_of(value)})
    put_state(optimizer, options, states, exact=True)
