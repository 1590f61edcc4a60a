"""What a load reads: the tensors of a checkpoint that fit a model. Reads no tensor itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
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
from layerzero.checkpoint.source import Source
from layerzero.checkpoint.transfer import Transfer
from layerzero.flat.buffer import prefer_huge_pages
from layerzero.notices import some
from layerzero.state_dict.errors import CheckpointError
from layerzero.state_dict.json_codec import decode
from layerzero.state_dict.names import Names, named_buffers, names_in_groups
from layerzero.state_dict.optimizer_state import options_of_groups, refuse_other_class
from layerzero.state_dict.optimizers import (
    Optimizers,
    Stateful,
    keeps_whole_states,
    parameters_with_state,
    refuse_shared,
    slots_of,
)


class StatePart(NamedTuple):
    """A tensor of optimizer state to load."""

    parameter: nn.Parameter
    key: str
    shape: torch.Size
    memory: torch.Tensor
    """What is read: 1-D, on the CPU."""
    follows_parameter: bool
    """Whether it was saved in the parameter's dtype; then it is cast to that of the new one."""


class LoadPlan:
    """Everything that this rank loads: what is in a source for one model and what goes with it."""

    model_parts: list[tuple[torch.Tensor, torch.Tensor]]
    """Sharded parameters and buffers, each with the memory that its values are read into."""
    state_parts: dict[str, list[StatePart]]
    """By the optimizer's name; "" for a single one."""
    transfers: list[Transfer]
    """Their tensors are the memory of all parts: 1-D, on the CPU."""
    options: dict[str, list[dict[str, Any]]]
    """Options of each group of each optimizer that is loaded."""
    state_values: dict[str, list[tuple[nn.Parameter, dict[str, Any]]]]
    """Optimizer state that is not a tensor."""
    wanted: set[str]
    """All names of the model's parameters and buffers, including those found through aliases."""

    def __init__(self, source: Source, model: nn.Module, strict: bool) -> None:
        self.model_parts, self.transfers = [], []
        self.state_parts, self.options, self.state_values = {}, {}, {}
        self.extra_states: list[tuple[nn.Module, Any]] = []
        self.schedulers: list[tuple[Stateful, dict[str, Any]]] = []
        self.wanted = set()
        self.missing: list[str] = []
        self._source = source
        self._model = model
        self._strict = strict
        self._names = Names(model)
        keys = ((kind, name) for kind, tensors in source.tensors.items() for name in tensors)
        self._numbers = {key: number for number, key in enumerate(keys)}
        self._times_read: Counter[tuple[str, str]] = Counter()

    def match_model(self) -> None:
        """Find parameters, buffers and extra states.

        Raises:
            CheckpointError: shapes differ.
        """
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
            if place.entry.shape != entry.extent.shape:
                misfits.append(
                    f"{name} is {place.entry.shape}, but {entry.extent.shape} in the model"
                )
            else:
                self.model_parts.append((target, self._plan_read(MODEL, name, entry)))
        if misfits:
            raise CheckpointError(f"{self._source.folder}: shapes differ: {some(misfits)}")
        manifest = self._source.manifest
        saved = {} if manifest is None else manifest.extra_states
        for name, module in extra_states(self._model).items():
            if name in saved:
                self.extra_states.append((module, decode(saved[name])))
            else:
                self.missing.append(f"the extra state of {name}")

    def match_schedulers(self, schedulers: Mapping[str, Stateful]) -> None:
        """
        Raises:
            CheckpointError: one is to be loaded and several were saved by name, or they have other
                names.
        """
        manifest = self._source.manifest
        if manifest is None or manifest.scheduler is None:
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
            self.schedulers.append((scheduler, states[name] if name else states))

    def match_optimizers(self, optimizers: Optimizers) -> None:
        """Find the state of each optimizer.

        Raises:
            CheckpointError: as `match_optimizer`; or, with `strict`, they have other names than
                those that were saved.
        """
        manifest = self._source.manifest
        if manifest is None or manifest.optimizer_groups is None:
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
        aliases = self._source.aliases
        names_of_groups = [
            [each if each in known else aliases.get(each, each) for each in group]
            for group in names_in_groups(self._names, optimizer, optimizer_name)
        ]
        before = [(group["options"], group["params"]) for group in saved_groups]
        where = str(self._source.folder)
        options = options_of_groups(names_of_groups, before, self._strict, where, optimizer_name)
        self.options[optimizer_name] = [decode(each) for each in options]
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
            inside = {slot for value in own.values() for slot in slots_of(value)}
            listed = [split_state_name(tensor)[1] for tensor in saved.get(name, ())]
            keys[parameter] = dict.fromkeys([*(k for k in listed if k not in inside), *own])
        refuse_other_class(optimizer, self.options[optimizer_name], keys, name_of.__getitem__)
        self.state_values[optimizer_name] = list(values.items())
        parts = self.state_parts[optimizer_name] = []
        for index, (parameter, name) in enumerate(name_of.items()):
            for tensor in saved.get(name, ()):
                listed_key = scalar_key(optimizer_name, split_state_name(tensor)[1])
                is_scalar = listed_key in manifest.optimizer_scalars
                is_whole = keeps_whole_states(optimizer)
                parts.append(self._match_state(tensor, parameter, is_whole, is_scalar, index))

    def _match_state(
        self, name: str, parameter: nn.Parameter, is_whole: bool, is_scalar: bool, index: int
    ) -> StatePart:
        parameter_name, key = split_state_name(name)
        saved = self._source.tensors[OPTIMIZER][name].entry
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
        follows = main is not None and main.entry.dtype == saved.dtype and not is_scalar
        memory = self._plan_read(OPTIMIZER, name, entry)
        return StatePart(parameter, key, like.shape, memory, follows)

    def _plan_read(self, kind: str, name: str, entry: Entry) -> torch.Tensor:
        place = self._source.tensors[kind][name]
        # Memory of its own for each: it may become the state, and others are freed before it.
        memory = torch.empty(entry.stop - entry.start, dtype=place.entry.dtype, device="cpu")
        prefer_huge_pages(memory, collapse=False)
        # A tensor that was saved tied may be read for several parameters. Each read gets a number
        # of its own, so that their checksums stay apart.
        number = self._numbers[kind, name] + self._times_read[kind, name] * len(self._numbers)
        self._times_read[kind, name] += 1
        entry = replace(entry, name=name, tensor=memory)
        self.transfers.append(Transfer(place.file, place.entry, number, entry))
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
