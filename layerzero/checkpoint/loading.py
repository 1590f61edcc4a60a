"""load(): every rank reads its own shards; nothing changes before all of them are verified.

    open      the first rank reads and checks names, sizes and the manifest, and sends them to all
    match     every rank finds its shards; missing or unfitting tensors are an error on all ranks
    read      every rank reads its runs into new host memory, those of the model already while it
              finds those of the optimizer; ranks exchange checksums
    verify    every rank compares the checksums of what all read with those in the manifest
    apply     values are copied into parameters, optimizer and scheduler

Only the last step changes anything, and it reads no file.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from layerzero.checkpoint.format.inventory import (
    MODEL,
    OPTIMIZER,
    Entry,
    entry_of,
    extra_states,
    model_entries,
    scalar_key,
    split_state_name,
)
from layerzero.checkpoint.format.manifest import Manifest
from layerzero.checkpoint.source import Source, check_crc, open_source
from layerzero.checkpoint.transfer import ReadRanges, Tally, Transfer, sum_tallies
from layerzero.errors import CheckpointError
from layerzero.notices import some
from layerzero.optim.huge_pages import prefer_huge_pages
from layerzero.state_dict.checkpoint_group import CheckpointGroup, checkpoint_group_of
from layerzero.state_dict.json_codec import decode
from layerzero.state_dict.names import Names, named_buffers
from layerzero.state_dict.optimizer_state import options_of_groups, put_state, refuse_other_class
from layerzero.state_dict.optimizers import (
    Optimizers,
    Stateful,
    check_optimizers,
    check_schedulers,
    fill_slots,
    keeps_whole_states,
    parameters_with_state,
    refuse_shared,
)
from layerzero.state_dict.preconditions import root_states_of

_logger = logging.getLogger(__name__)
_copy_ = torch.no_grad()(torch.Tensor.copy_)


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
    with ReadRanges(source.folder) as reading:

        def find() -> dict[str, Any]:
            plan.match_model()
            reading.start(plan.transfers)
            num_read = len(plan.transfers)
            if optimizers:
                plan.match_optimizers(optimizers)
            if schedulers is not None:
                plan.match_schedulers(schedulers)
            reading.start(plan.transfers[num_read:])
            nbytes = sum(transfer.entry.tensor.nbytes for transfer in plan.transfers)
            return {"wanted": sorted(plan.wanted), "missing": plan.missing, "nbytes": nbytes}

        def read() -> list[Tally]:
            read = [*zip(plan.transfers, reading.finish(), strict=True)]
            # What every rank reads all of, it checks on its own.
            _verify(source, [[tally for each, tally in read if each.entry.is_whole]])
            return [tally for each, tally in read if not each.entry.is_whole]

        summaries = together.exchange("names to load", find)
        _check_names(source, summaries, strict, together)
        most = max(each["nbytes"] for each in summaries)
        of_all = together.exchange(f"checksums read from {source.folder.name}", read, most)
    _verify(source, of_all)
    extras = source.manifest.extras
    own = together.rank if len(extras) == len(together.ranks) else 0
    extra = decode(extras[own]) if extras else None
    for unit in itertools.chain.from_iterable(root.units for root in roots):
        unit.before_load()
    together.exchange("application", plan.apply)
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


def _verify(source: Source, tallies: Iterable[Iterable[Tally]]) -> None:
    """Compare the bytes that these ranks read together with the checksums. Not collective."""
    by_number = [
        (name, place) for tensors in source.tensors.values() for name, place in tensors.items()
    ]
    for (number, _), (nbytes, crc) in sorted(sum_tallies(tallies).items()):
        name, place = by_number[number % len(by_number)]
        where = f"{source.folder / place.file}: {name}"
        if nbytes != place.nbytes:
            raise CheckpointError(
                f"{where}: ranks read {nbytes} of {place.nbytes} bytes; process_group= has "
                "to contain every rank of the model"
            )
        check_crc(where, crc, place.crc)


class LoadPlan:
    """Everything that this rank loads: what is in a source for one model and what goes with it."""

    transfers: list[Transfer]
    """Their tensors are memory of this plan: 1-D, on the CPU."""
    wanted: set[str]
    """All names of the model's parameters and buffers, including those found through aliases."""

    def __init__(self, source: Source, model: nn.Module, strict: bool) -> None:
        self.transfers, self.wanted = [], set()
        self._changes: list[Callable[[], object]] = []
        """What applies the values of `transfers`, and others, once they are verified."""
        self.missing: list[str] = []
        self._source = source
        self._model = model
        self._strict = strict
        self._names = Names(model)
        keys = ((kind, name) for kind, tensors in source.tensors.items() for name in tensors)
        self._numbers = {key: number for number, key in enumerate(keys)}
        self._times_read: Counter[tuple[str, str]] = Counter()

    def apply(self) -> None:
        for change in self._changes:
            change()

    def match_model(self) -> None:
        """Find parameters, buffers and extra states."""
        misfits = []
        targets: list[torch.Tensor] = [parameter for parameter, _ in self._names.parameters]
        targets += [buffer for buffer, _ in named_buffers(self._model)]
        entries = model_entries(self._model, self._names)
        for target, entry in zip(targets, entries, strict=True):
            names = (entry.name, *entry.aliases)
            self.wanted.update(names)
            found = self._source.find(names)
            if found is None:
                self.missing.append(entry.name)
                continue
            name, place = found
            self.wanted.add(name)
            if place.shape != entry.extent.shape:
                misfits.append(f"{name} is {place.shape}, but {entry.extent.shape} in the model")
            else:
                memory = self._plan_read(MODEL, name, entry)
                self._changes.append(partial(_copy_, target, memory.view(target.shape)))
        if misfits:
            raise CheckpointError(f"{self._source.folder}: shapes differ: {some(misfits)}")
        saved = self._source.manifest.extra_states
        for name, module in extra_states(self._model).items():
            if name in saved:
                self._changes.append(partial(module.set_extra_state, decode(saved[name])))
            else:
                self.missing.append(f"the extra state of {name}")

    def match_schedulers(self, schedulers: Mapping[str, Stateful]) -> None:
        manifest = self._source.manifest
        if manifest.scheduler is None:
            self._note_missing("scheduler")
            return
        wanted, saved = _names_in(schedulers), manifest.scheduler_names
        if wanted != saved:
            raise CheckpointError(
                f"{self._source.folder}: contains the state of {_text('scheduler', saved)}, but "
                f"scheduler= has {_text('scheduler', wanted)}; pass what was saved"
            )
        states = decode(manifest.scheduler)
        for name, scheduler in schedulers.items():
            own = states[name] if name else states
            self._changes.append(partial(scheduler.load_state_dict, own))

    def match_optimizers(self, optimizers: Optimizers) -> None:
        """Find the state of each optimizer."""
        manifest = self._source.manifest
        if manifest.optimizer_groups is None:
            self._note_missing("optimizer")
            return
        refuse_shared(optimizers, self._names)
        saved = manifest.groups_of_optimizers()
        if saved.keys() != optimizers.keys():
            text = (
                f"contains the state of {_text('optimizer', _names_in(saved))}, but optimizer= has "
                f"{_text('optimizer', _names_in(optimizers))}"
            )
            if self._strict:
                raise CheckpointError(
                    f"{self._source.folder}: {text}; pass the optimizers that were saved, or "
                    "strict=False to load those with the same names"
                )
            self.missing.append(f"optimizers: the checkpoint {text}")
        for name, optimizer in optimizers.items():
            if name in saved:
                self._match_optimizer(name, optimizer, saved[name], manifest)

    def _match_optimizer(
        self,
        optimizer_name: str,
        optimizer: torch.optim.Optimizer,
        saved_groups: list[dict[str, Any]],
        manifest: Manifest,
    ) -> None:
        saved: dict[str, list[str]] = {}
        for name in self._source.tensors.get(OPTIMIZER, ()):
            saved.setdefault(split_state_name(name)[0], []).append(name)
        known = {name for group in saved_groups for name in group["params"]}
        # A parameter that was tied to another may have been saved under that one's name.
        aliases = manifest.aliases
        names_of_groups = [
            [each if each in known else aliases.get(each, each) for each in group]
            for group in self._names.in_groups(optimizer, optimizer_name)
        ]
        before = [(group["options"], group["params"]) for group in saved_groups]
        where = str(self._source.folder)
        encoded = options_of_groups(names_of_groups, before, self._strict, where, optimizer_name)
        options = [decode(each) for each in encoded]
        wanted = set(parameters_with_state(optimizer))
        name_of = {
            parameter: name
            for group, names in zip(optimizer.param_groups, names_of_groups, strict=True)
            for parameter, name in zip(group["params"], names, strict=True)
            if name in known and parameter in wanted
        }
        values = {
            parameter: decode(manifest.optimizer_values[name])
            for parameter, name in name_of.items()
            if name in manifest.optimizer_values
        }
        keys = {}
        for parameter, name in name_of.items():
            own = values.get(parameter, {})
            inside: list[str] = []
            fill_slots(own, inside.append)
            listed = [split_state_name(tensor)[1] for tensor in saved.get(name, ())]
            keys[parameter] = dict.fromkeys([*(k for k in listed if k not in inside), *own])
        refuse_other_class(optimizer, options, keys, name_of.__getitem__)
        parts: list[tuple[nn.Parameter, str, Callable[[], torch.Tensor]]] = []
        for index, (parameter, name) in enumerate(name_of.items()):
            for tensor in saved.get(name, ()):
                key = split_state_name(tensor)[1]
                is_scalar = scalar_key(optimizer_name, key) in manifest.optimizer_scalars
                is_whole = keeps_whole_states(optimizer)
                value = self._match_state(tensor, parameter, is_whole, is_scalar, index)
                parts.append((parameter, key, value))

        def change() -> None:
            states: dict[nn.Parameter, dict[str, Any]] = {}
            for parameter, key, value_of in parts:
                states.setdefault(parameter, {})[key] = value_of()
            for parameter, others in values.items():
                own = states.setdefault(parameter, {})
                for key, value in others.items():
                    own[key] = fill_slots(value, own.pop)
            put_state(optimizer, options, states, exact=True)

        self._changes.append(change)

    def _match_state(
        self, name: str, parameter: nn.Parameter, is_whole: bool, is_scalar: bool, index: int
    ) -> Callable[[], torch.Tensor]:
        """Returns what makes a tensor of optimizer state of what was read, on the CPU: it is in the
        parameter's dtype now, if it was saved in the parameter's then."""
        parameter_name, _ = split_state_name(name)
        saved = self._source.tensors[OPTIMIZER][name]
        is_scalar = is_scalar and not saved.shape  # It may be a tensor for other parameters.
        # `like` only selects the place: that of a scalar, or that of the parameter.
        like = torch.empty((), device="cpu") if is_scalar else parameter.detach()
        if is_whole:
            like = torch.empty(saved.shape, dtype=saved.dtype, device="meta")
        entry = entry_of(self._names, OPTIMIZER, (name,), parameter, like, index, is_whole)
        if saved.shape != entry.extent.shape:
            raise CheckpointError(
                f"{self._source.folder}: the optimizer state {name} has shape {saved.shape}, but "
                f"its parameter has {entry.extent.shape} in the model. State of other shapes fits "
                "a layerzero.optim.WholeTensorOptimizer"
            )
        main = self._source.tensors[MODEL].get(parameter_name)
        follows = main is not None and main.dtype == saved.dtype and not is_scalar
        memory = self._plan_read(OPTIMIZER, name, entry)
        dtype = parameter.dtype if follows else saved.dtype
        return partial(memory.view(like.shape).to, dtype)

    def _plan_read(self, kind: str, name: str, entry: Entry) -> torch.Tensor:
        place = self._source.tensors[kind][name]
        # Memory of its own for each: it may become the state, and others are freed before it.
        memory = torch.empty(entry.stop - entry.start, dtype=place.dtype, device="cpu")
        prefer_huge_pages(memory, collapse=False)
        # A tensor that was saved tied may be read for several parameters. Each read gets a number
        # of its own, so that their checksums stay apart.
        number = self._numbers[kind, name] + self._times_read[kind, name] * len(self._numbers)
        self._times_read[kind, name] += 1
        entry = replace(entry, name=name, tensor=memory)
        self.transfers.append(Transfer(place, number, entry))
        return memory

    def _note_missing(self, what: str) -> None:
        if self._strict:
            raise CheckpointError(
                f"{self._source.folder}: contains no {what} state; leave out {what}= or pass "
                "strict=False"
            )
        self.missing.append(f"the {what}'s state")


def _names_in(optimizers: Mapping[str, Any]) -> list[str] | None:
    return None if list(optimizers) == [""] else sorted(optimizers)


def _text(what: str, names: Sequence[str] | None) -> str:
    if names is None:
        return f"one {what} without a name"
    return f"{what}s named {', '.join(map(repr, names)) or 'nothing'}"
