"""Checks that main shards and optimizer state do not change between optimizer steps, and that ranks
that hold copies of the same weights hold the same bits.

Copies are the main shards of outer peers with `outer="replicate"`, and parameters that are
replicated over tensor-parallel ranks.

Note [Who may write]
    Checksums are taken right after a step of an optimizer, and compared before the next one. What
    was written in between through torch has another version (`Tensor._version`), or is another
    tensor, and is not compared. A write through `.data` changes no version and looks like a flipped
    bit: the error names both causes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from layerzero.comm.exchanges import gather_small
from layerzero.flat.flat_param import FlatParam
from layerzero.flat.parameter_info import get_info
from layerzero.flat.placement import ShardGroup
from layerzero.ops import word_sums
from layerzero.optim.adamw import AdamW
from layerzero.optim.checks import name_of
from layerzero.step.root import RootState
from layerzero.step.unit import Unit

_WHAT = "the model"


class _Noted(NamedTuple):
    """A tensor as the last optimizer step left it."""

    tensor_ref: weakref.ref[torch.Tensor]
    version: int
    checksum: int
    label: str


class Resting:
    """Main shards and optimizer state of one model, on this rank."""

    def __init__(self, units: Callable[[], Sequence[Unit]]) -> None:
        """`units`: returns those of the model; must not keep it alive."""
        self._units = units
        self._noted: dict[int, _Noted] = {}
        self._homes: dict[int, tuple[FlatParam, str]] = {}
        """Of each main shard and sharded parameter, by id: its flat parameter, and what to call its
        main shard."""

    def version_of(self, tensor: torch.Tensor) -> int:
        """Of a main shard, those of its pieces as well, which count their own, and the engine's."""
        handle = self.handle_of(tensor)
        if handle is None:
            return tensor._version
        return sum(handle.versions) + handle.num_rewrites

    def handle_of(self, tensor: torch.Tensor) -> FlatParam | None:
        """The flat parameter whose main shard it is, if any."""
        handle, _ = self._find_homes().get(id(tensor), (None, ""))
        return handle if handle is not None and handle.main_shard is tensor else None

    def checksum_of(self, tensor: torch.Tensor) -> int | None:
        """The checksum that `tensor` must have; None: it is not known."""
        noted = self._noted.get(id(tensor))
        is_same = noted is not None and noted.tensor_ref() is tensor
        if noted is None or not is_same or noted.version != self.version_of(tensor):
            return None
        return noted.checksum

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what the step has written. Blocks the host on a device with streams."""
        homes = self._find_homes()
        stepped = {
            id(home[0]): home
            for group in optimizer.param_groups
            for each in group["params"]
            if (home := homes.get(id(each))) is not None
        }
        if stepped:
            shards = [(handle.main_shard, label) for handle, label in stepped.values()]
            self._note([*shards, *_states_of(optimizer)])

    def forget(self) -> None:
        """Compare nothing until the next step that is noted."""
        self._noted.clear()

    def different(self, root: RootState) -> list[str]:
        """Which copies differ, in words. Collective over the ranks with copies; blocks the host."""
        return [*self._over_outer_peers(root), *_over_tensor_parallel_ranks(root)]

    def _over_outer_peers(self, root: RootState) -> list[str]:
        by_group: dict[ShardGroup, list[tuple[str, torch.Tensor]]] = {}
        for unit in root.units:
            for handle in unit.handles:
                outer = handle.placement.outer_group
                if outer is not None and outer.size > 1 and handle.placement.owned_slices > 1:
                    label = f"the main shard of {unit.label}"
                    by_group.setdefault(outer, []).append((label, handle.main_shard))
        found = []
        for group, entries in by_group.items():
            own = torch.tensor([self._checksum(each) for _, each in entries], device=root.device)
            operation = root.operations.next("comparison of replicas", _WHAT, group)
            table = gather_small(own, group, operation).tolist()
            for place, (label, _) in enumerate(entries):
                found += _difference(label, [row[place] for row in table], group)
        return found

    def _checksum(self, shard: torch.Tensor) -> int:
        known = self.checksum_of(shard)
        return int(word_sums([shard])) if known is None else known

    def _find_homes(self) -> dict[int, tuple[FlatParam, str]]:
        if not self._homes:
            self._homes = {
                id(tensor): (handle, f"the main shard of {unit.label}")
                for unit in self._units()
                for handle in unit.handles
                for tensor in (handle.main_shard, *handle.sharded_params)
            }
        return self._homes

    def _note(self, found: list[tuple[torch.Tensor, str]]) -> None:
        for number in [n for n, noted in self._noted.items() if noted.tensor_ref() is None]:
            del self._noted[number]
        checksums = _checksums([tensor for tensor, _ in found])
        for (tensor, label), checksum in zip(found, checksums, strict=True):
            self._noted[id(tensor)] = _Noted(
                weakref.ref(tensor), self.version_of(tensor), checksum, label
            )

    def changed(self) -> list[str]:
        """What has changed though nobody wrote it, in words. Not collective; may block the host."""
        alive = [
            (tensor, noted)
            for noted in self._noted.values()
            if (tensor := noted.tensor_ref()) is not None
            and self.version_of(tensor) == noted.version
        ]
        checksums = _checksums([tensor for tensor, _ in alive])
        return [
            noted.label
            for (_, noted), checksum in zip(alive, checksums, strict=True)
            if checksum != noted.checksum
        ]


def _states_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str]]:
    if isinstance(optimizer, AdamW):
        yield from optimizer.memory()
        return
    name = type(optimizer).__name__
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for parameter in parameters:
        state = optimizer.state.get(parameter)
        for key, value in (state or {}).items():
            for tensor in _tensors_in(value):
                yield tensor, f"{key!r} of {name_of(parameter)} in the state of {name}"


def _tensors_in(value: object) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,) if value.layout is torch.strided else ()
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors_in(each)]
    return ()


def _checksums(tensors: list[torch.Tensor]) -> list[int]:
    by_device: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(place)
    checksums = [0] * len(tensors)
    for places in by_device.values():
        for place, checksum in zip(
            places, word_sums(tensors[place] for place in places).tolist(), strict=True
        ):
            checksums[place] = checksum
    return checksums


def _over_tensor_parallel_ranks(root: RootState) -> list[str]:
    found = []
    for axis, group in enumerate(root.tensor_parallel_groups):
        if group.size == 1:
            continue
        names, rows = [], []
        for unit in root.units:
            for handle in unit.handles:
                for fqn, split, parameter in zip(
                    handle.fqns, handle.splits, handle.sharded_params, strict=True
                ):
                    if split is not None and split.placements[axis].is_replicate():
                        info = get_info(parameter)
                        assert info is not None
                        start, stop = info.range
                        names.append(fqn)
                        rows.append((start, stop, parameter.detach()))
        if not rows:
            continue
        sums = word_sums(tensor for _, _, tensor in rows).to(root.device)
        places = torch.tensor([row[:2] for row in rows], device=root.device)
        own = torch.cat([places, sums[:, None]], dim=1)
        operation = root.operations.next("comparison of replicas", _WHAT, group)
        table = gather_small(own, group, operation).tolist()
        for place, name in enumerate(names):
            each = [row[place] for row in table]
            # Ranks whose other parameters have other sizes may hold another range of this one.
            if len({tuple(entry[:2]) for entry in each}) == 1:
                found += _difference(f"parameter {name!r}", [e[2] for e in each], group)
    return found


def _difference(label: str, checksums: list[int], group: ShardGroup) -> list[str]:
    counts = Counter(checksums)
    if len(counts) == 1:
        return []
    (usual, number), *_ = counts.most_common(1)
    if number > len(checksums) // 2:
        others = [rank for rank, each in zip(group.ranks, checksums, strict=True) if each != usual]
        listed = " and ".join(f"rank {rank}" for rank in others)
        return [f"comparison of replicas: {label} on {listed} differs from its other copies"]
    listed = ", ".join(f"rank {rank}" for rank in group.ranks)
    return [f"comparison of replicas: the copies of {label} on {listed} differ"]
