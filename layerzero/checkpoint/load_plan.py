"""What a load reads: the tensors of a checkpoint that fit a model. Reads no tensor itself."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from layerzero.checkpoint.file_io.transfer import Transfer
from layerzero.checkpoint.format.inventory import (
    MODEL,
    OPTIMIZER,
    Entry,
    Places,
    extra_states,
    model_entries,
    split_state_name,
)
from layerzero.checkpoint.source import Source
from layerzero.state_dict.errors import CheckpointError, some
from layerzero.state_dict.json_codec import decode
from layerzero.state_dict.names import Names, name_in_group, named_buffers
from layerzero.state_dict.optimizer_state import options_of_groups, refuse_other_class


@dataclass(frozen=True)
class ModelPart:
    """A sharded parameter or buffer to load."""

    target: torch.Tensor
    transfer: int
    """Index in `LoadPlan.transfers` of the transfer that reads its new values."""


@dataclass(frozen=True)
class StatePart:
    """A tensor of optimizer state to load."""

    parameter: nn.Parameter
    key: str
    shape: torch.Size
    transfer: int
    follows_parameter: bool
    """Whether it was saved in the parameter's dtype; then it is cast to that of the new one."""


@dataclass
class LoadPlan:
    """Everything that this rank loads."""

    model_parts: list[ModelPart] = field(default_factory=list)
    state_parts: list[StatePart] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    """Their tensors are on meta until memory is allocated."""
    lives: list[Hashable] = field(default_factory=list)
    """Lifetime of each transfer's memory; equal values are freed at the same time."""
    options: list[dict[str, Any]] | None = None
    """Options of each optimizer group; None: the optimizer is not loaded."""
    state_values: list[tuple[nn.Parameter, dict[str, Any]]] = field(default_factory=list)
    """Optimizer state that is not a tensor."""
    extra_states: list[tuple[nn.Module, Any]] = field(default_factory=list)
    scheduler: dict[str, Any] | None = None
    wanted: set[str] = field(default_factory=set)
    """All names of the model's parameters and buffers, including those found through aliases."""
    missing: list[str] = field(default_factory=list)

    def memory(self, transfer: int) -> torch.Tensor:
        """The transfer's tensor: 1-D, on the CPU; on meta until memory is allocated."""
        return self.transfers[transfer].entry.tensor

    @property
    def nbytes(self) -> int:
        return sum(transfer.entry.tensor.nbytes for transfer in self.transfers)


class LoadPlanner:
    """Finds in a source what one model, its optimizer and scheduler load."""

    def __init__(self, source: Source, model: nn.Module, strict: bool) -> None:
        self._source = source
        self._model = model
        self._strict = strict
        self._names = Names(model)
        self._places = Places(self._names)
        keys = ((kind, name) for kind, tensors in source.tensors.items() for name in tensors)
        self._numbers = {key: number for number, key in enumerate(keys)}
        self._times_read: dict[tuple[str, str], int] = {}
        self.plan = LoadPlan()

    def match_model(self) -> None:
        """Find parameters, buffers and extra states.

        Raises:
            CheckpointError: shapes differ.
        """
        plan, misfits = self.plan, []
        targets: list[torch.Tensor] = [parameter for parameter, _ in self._names.parameters]
        targets += [buffer for buffer, _ in named_buffers(self._model)]
        entries = model_entries(self._model, self._names, self._places)
        for target, entry in zip(targets, entries, strict=True):
            names = (entry.name, *entry.aliases)
            plan.wanted.update(names)
            found = self._source.find(MODEL, names)
            if found is None:
                plan.missing.append(entry.name)
                continue
            name, place = found
            plan.wanted.add(name)
            if place.entry.shape != entry.extent.shape:
                misfits.append(
                    f"{name} is {place.entry.shape}, but {entry.extent.shape} in the model"
                )
            else:
                transfer = self._plan_read(MODEL, name, entry, MODEL)
                plan.model_parts.append(ModelPart(target, transfer))
        if misfits:
            raise CheckpointError(f"{self._source.folder}: shapes differ: {some(misfits)}")
        manifest = self._source.manifest
        saved = {} if manifest is None else manifest.extra_states
        for name, module in extra_states(self._model).items():
            if name in saved:
                plan.extra_states.append((module, decode(saved[name])))
            else:
                plan.missing.append(f"the extra state of {name}")

    def match_scheduler(self) -> None:
        manifest = self._source.manifest
        if manifest is None or manifest.scheduler is None:
            self._note_missing("scheduler")
        else:
            self.plan.scheduler = decode(manifest.scheduler)

    def match_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the options of its groups, and the state of its parameters.

        Raises:
            CheckpointError: a parameter does not belong to the model, a state has another shape, or
                the parameters of a group were saved in groups with different options.
        """
        manifest = self._source.manifest
        if manifest is None or manifest.optimizer_groups is None:
            self._note_missing("optimizer")
            return
        self._scalar_keys = manifest.optimizer_scalars
        saved: dict[str, list[str]] = {}
        for name in self._source.tensors[OPTIMIZER]:
            saved.setdefault(split_state_name(name)[0], []).append(name)
        known = {name for group in manifest.optimizer_groups for name in group["params"]}
        names_of = [
            [
                self._saved_name(name_in_group(self._names, parameter, number), known)
                for parameter in group["params"]
            ]
            for number, group in enumerate(optimizer.param_groups)
        ]
        before = [(group["options"], group["params"]) for group in manifest.optimizer_groups]
        options = options_of_groups(names_of, before, self._strict, str(self._source.folder))
        self.plan.options = [decode(each) for each in options]
        keys = {
            parameter: dict.fromkeys(
                [split_state_name(tensor)[1] for tensor in saved.get(name, ())]
                + list(manifest.optimizer_values.get(name, ()))
            )
            for group, names in zip(optimizer.param_groups, names_of, strict=True)
            for parameter, name in zip(group["params"], names, strict=True)
        }
        refuse_other_class(optimizer, self.plan.options, keys, self._name)
        for group, names in zip(optimizer.param_groups, names_of, strict=True):
            for index, (parameter, name) in enumerate(zip(group["params"], names, strict=True)):
                for tensor in saved.get(name, ()):
                    self._match_state(tensor, parameter, index)
                if name in manifest.optimizer_values:
                    values = decode(manifest.optimizer_values[name])
                    self.plan.state_values.append((parameter, values))

    def _name(self, parameter: nn.Parameter) -> str:
        found = self._names.of(parameter)
        assert found is not None, "name_in_group raised for others"
        return found[0]

    def _saved_name(self, name: str, known: set[str]) -> str:
        """The name that a parameter was saved under, which differs if it was tied to another."""
        return name if name in known else self._source.aliases.get(name, name)

    def _match_state(self, name: str, parameter: nn.Parameter, index: int) -> None:
        parameter_name, key = split_state_name(name)
        shape = self._source.tensors[OPTIMIZER][name].entry.shape
        # `like` only selects the place: that of a scalar, or that of the parameter.
        is_scalar = key in self._scalar_keys
        like = torch.empty(()) if is_scalar else parameter
        entry = self._places.entry(OPTIMIZER, (name,), parameter, like, index)
        if shape != entry.extent.shape:
            raise CheckpointError(
                f"{self._source.folder}: the optimizer state {name} has shape {shape}, but its "
                f"parameter has {entry.extent.shape} in the model"
            )
        dtype = self._source.tensors[OPTIMIZER][name].entry.dtype
        main = self._source.tensors[MODEL].get(parameter_name)
        follows = main is not None and main.entry.dtype == dtype and not is_scalar
        # On the CPU, the memory read into becomes the state; for a device it is copied, then freed.
        transfer = self._plan_read(OPTIMIZER, name, entry, (OPTIMIZER, parameter.device))
        self.plan.state_parts.append(StatePart(parameter, key, like.shape, transfer, follows))

    def _plan_read(self, kind: str, name: str, entry: Entry, life: Hashable) -> int:
        place = self._source.tensors[kind][name]
        part = torch.empty(entry.stop - entry.start, dtype=place.entry.dtype, device="meta")
        # A tensor that was saved tied may be read for several parameters. Each read gets a number
        # of its own, so that their checksums stay apart.
        times = self._times_read.get((kind, name), 0)
        self._times_read[kind, name] = times + 1
        number = self._numbers[kind, name] + times * len(self._numbers)
        entry = replace(entry, name=name, tensor=part)
        self.plan.transfers.append(Transfer(place.file, place.entry, number, entry))
        self.plan.lives.append(life)
        return len(self.plan.transfers) - 1

    def _note_missing(self, what: str) -> None:
        if self._strict:
            raise CheckpointError(
                f"{self._source.folder}: contains no {what} state; leave out {what}= or pass "
                "strict=False"
            )
        self.plan.missing.append(f"the {what}'s state")
