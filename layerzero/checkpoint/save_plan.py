"""Plans a save: each rank lists its content, and all ranks derive the same plan from the lists."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

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
from layerzero.checkpoint.transfer import Tally, Transfer, sum_tallies
from layerzero.state_dict.checkpoint_group import CheckpointGroup
from layerzero.state_dict.errors import CheckpointError
from layerzero.state_dict.json_codec import encode
from layerzero.state_dict.names import Names
from layerzero.state_dict.optimizers import Optimizers, Stateful


class SavePlan:
    """The files and values of a checkpoint, the same on all ranks, and what this rank writes.

    Construction is collective over `together`.

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
        messages = together.exchange(
            f"names to save to {arguments[0]}",
            lambda: self._collect(model, optimizers, schedulers, extra, arguments),
        )
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

    def _collect(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        schedulers: Mapping[str, Stateful] | None,
        extra: Any,
        arguments: list[Any],
    ) -> dict[str, Any]:
        """List this rank's content; returns the announcement for all ranks. Not collective."""
        names = Names(model)
        self._groups = optimizer_groups(optimizers, names) if optimizers else None
        parts = optimizer_parts(optimizers, names)
        self._entries = [*model_entries(model, names), *parts.entries]
        states = {name: each.state_dict() for name, each in (schedulers or {}).items()}
        is_single = schedulers is None or list(states) == [""]
        self._scheduler = encode(states.get("") if is_single else states, "the scheduler's state")
        self._scheduler_names = None if is_single else sorted(states)
        return {
            "arguments": arguments,
            "optimizers": list(optimizers),
            "groups": hashlib.sha256(json.dumps(self._groups).encode()).hexdigest(),
            "scalar_keys": parts.scalar_keys,
            "values": parts.values,
            "extra": encode(extra, "extra"),
            "extra_states": {
                name: encode(module.get_extra_state(), f"the extra state of {name}")
                for name, module in extra_states(model).items()
            },
            "nbytes": sum(entry.tensor.nbytes for entry in self._entries),
            "entries": announce(self._entries),
        }

    def match(self) -> None:
        """Find the place of each shard that this rank writes. Not collective.

        Raises:
            CheckpointError: the rank that should announce a tensor does not have it.
        """
        places = {
            (kind, name): (file.name, entry)
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
                self.transfers.append(Transfer(*places[key], self._numbers[key], entry))
        del self._entries  # The tensors of a background save are copies, which need no others.

    def manifest(self, step: int, tallies: Sequence[Sequence[Tally]]) -> Manifest:
        """Check that everything was written, and combine the checksums.

        Args:
            tallies: of each rank.

        Raises:
            CheckpointError: some bytes of a tensor were written by no rank, or by two.
        """
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
