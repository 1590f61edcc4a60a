"""Plans a save: each rank lists its content, and all ranks derive the same plan from the lists."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from layerzero.checkpoint.file_io.transfer import Transfer, sum_tallies
from layerzero.checkpoint.format.crc import combine, crc32
from layerzero.checkpoint.format.file_plan import announce, merge, plan_files
from layerzero.checkpoint.format.inventory import (
    MODEL,
    OPTIMIZER,
    Entry,
    OptimizerParts,
    Places,
    extra_states,
    model_entries,
    optimizer_groups,
    optimizer_parts,
)
from layerzero.checkpoint.format.manifest import FileRecord, Manifest
from layerzero.checkpoint.schedulers import Stateful
from layerzero.state_dict.checkpoint_group import CheckpointGroup
from layerzero.state_dict.errors import CheckpointError
from layerzero.state_dict.json_codec import encode
from layerzero.state_dict.names import Names
from layerzero.state_dict.optimizers import Optimizers


class Content:
    """What this rank contributes to the checkpoint."""

    entries: list[Entry]
    scheduler_names: list[str] | None

    def collect(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        schedulers: Mapping[str, Stateful] | None,
        extra: Any,
        arguments: list[Any],
    ) -> bytes:
        """List this rank's content; returns the announcement for the other ranks. Not collective.

        `optimizers` are those of `check_optimizers`.

        Raises:
            CheckpointError: a value cannot be encoded, or the optimizer does not fit the model.
        """
        names = Names(model)
        places = Places(names)
        self.entries = model_entries(model, names, places)
        self.groups = None
        parts = OptimizerParts([], [], {})
        if optimizers:
            self.groups = optimizer_groups(optimizers, names)
            parts = optimizer_parts(optimizers, names, places)
            self.entries += parts.entries
        self.scheduler, self.scheduler_names = None, None
        if schedulers is not None:
            states = {name: each.state_dict() for name, each in schedulers.items()}
            is_single = list(states) == [""]
            self.scheduler = encode(states[""] if is_single else states, "the scheduler's state")
            self.scheduler_names = None if is_single else sorted(states)
        message = {
            "arguments": arguments,
            "optimizers": list(optimizers),
            "groups": hashlib.sha256(json.dumps(self.groups).encode()).hexdigest(),
            "scalar_keys": parts.scalar_keys,
            "values": parts.values,
            "extra": encode(extra, "extra"),
            "extra_states": {
                name: encode(module.get_extra_state(), f"the extra state of {name}")
                for name, module in extra_states(model).items()
            },
            "nbytes": sum(entry.tensor.nbytes for entry in self.entries),
            "entries": announce(self.entries).decode(),
        }
        return json.dumps(message, separators=(",", ":")).encode()


class SavePlan:
    """The files and values of a checkpoint, derived from all announcements; the same on all ranks.

    Construction is collective if ranks have different parameter groups.
    """

    def __init__(
        self,
        answers: Sequence[bytes],
        content: Content,
        together: CheckpointGroup,
        max_file_nbytes: int,
    ) -> None:
        messages = [json.loads(answer) for answer in answers]
        _check_same("root, step and keep", [each["arguments"] for each in messages])
        given = [sorted(each["optimizers"]) for each in messages]
        if [] in given and any(given):
            raise CheckpointError("some ranks passed an optimizer and some did not")
        _check_same("names of optimizers", given)
        self._rank = together.rank
        announced, self._writers = merge([each["entries"].encode() for each in messages])
        self.nbytes_moved: int = max(each["nbytes"] for each in messages)
        extras = [each["extra"] for each in messages]
        self._aliases = {a: each.name for each in announced for a in each.aliases}
        self._extras = extras[:1] if all(each == extras[0] for each in extras) else extras
        self._values = {name: v for each in messages for name, v in each["values"].items()}
        self._scalar_keys = sorted({key for each in messages for key in each["scalar_keys"]})
        self._extra_states = {n: v for each in messages for n, v in each["extra_states"].items()}
        self._scheduler = content.scheduler
        self._scheduler_names = content.scheduler_names
        self._groups = content.groups
        if any(each["groups"] != messages[0]["groups"] for each in messages):
            everyone = together.exchange("groups", lambda: json.dumps(content.groups).encode())
            self._groups = _merge_groups([json.loads(each) for each in everyone])
        kinds = [MODEL] if self._groups is None else [MODEL, OPTIMIZER]
        self.files = [plan_files(kind, announced, max_file_nbytes) for kind in kinds]
        self._world_size = len(messages)
        self._places = {
            (plan.kind, name): (file.name, entry)
            for plan in self.files
            for file in plan.files
            for name, entry in file.tensors.items()
        }
        self._numbers = {key: number for number, key in enumerate(self._places)}

    def transfers(self, entries: Iterable[Entry]) -> list[Transfer]:
        """The transfers that this rank writes, of its own `entries`."""
        transfers = []
        for entry in entries:
            key = (entry.kind, entry.name)
            writes = self._writers[key] == self._rank if entry.is_whole else entry.replica == 0
            if writes and entry.tensor.numel():
                transfers.append(Transfer(*self._places[key], self._numbers[key], entry))
        return transfers

    def manifest(self, step: int, packed: Sequence[bytes]) -> Manifest:
        """Check that everything was written, and combine the checksums.

        Args:
            packed: the packed tallies of each rank.

        Raises:
            CheckpointError: some bytes of a tensor were written by no rank, or by two.
        """
        sums = sum_tallies(packed)
        crcs: dict[str, dict[str, int]] = {}
        records: dict[str, FileRecord] = {}
        for plan in self.files:
            own = crcs.setdefault(plan.kind, {})
            for file in plan.files:
                parts, sizes = [crc32(file.head)], [len(file.head)]
                for name, entry in file.tensors.items():
                    nbytes, crc = sums.get((self._numbers[plan.kind, name], 0), (0, 0))
                    if nbytes != entry.nbytes:
                        raise CheckpointError(
                            f"{name}: ranks wrote {nbytes} of {entry.nbytes} bytes; their shards "
                            "leave a gap, or overlap"
                        )
                    own[name] = crc
                    parts.append(crc)
                    sizes.append(nbytes)
                records[file.name] = FileRecord(file.nbytes, combine(parts, sizes))
            if plan.index is not None:
                records[plan.index_name] = FileRecord(len(plan.index), crc32(plan.index))
        return Manifest(
            step=step,
            world_size=self._world_size,
            files=records,
            tensors=crcs,
            optimizer_groups=self._groups,
            optimizer_scalars=self._scalar_keys,
            optimizer_values=self._values,
            scheduler=self._scheduler,
            scheduler_names=self._scheduler_names,
            extras=self._extras,
            extra_states=self._extra_states,
            aliases=self._aliases,
        )


def _check_same(what: str, values: Sequence[Any]) -> None:
    if any(value != values[0] for value in values):
        listed = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        raise CheckpointError(f"{what} differ between ranks: {listed}")


def _merge_groups(everyone: Sequence[list[dict[str, Any]] | None]) -> list[dict[str, Any]] | None:
    """Merge the groups of ranks with different parameters, by index and options."""
    merged: dict[str, dict[str, Any]] = {}
    for groups in everyone:
        for number, group in enumerate(groups or ()):
            own = {key: value for key, value in group.items() if key != "params"}
            into = merged.setdefault(json.dumps([number, own]), {**own, "params": []})
            into["params"] = list(dict.fromkeys([*into["params"], *group["params"]]))
    return list(merged.values())
