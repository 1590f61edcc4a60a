"""Checks that main shards and optimizer state do not change between optimizer steps.

Note [Who may write]
    Checksums are taken right after a step of an optimizer, and compared before the next one. What
    was written in between through torch has another version (`Tensor._version`), or is another
    tensor, and is not compared. A write through `.data` changes no version and looks like a flipped
    bit: the error names both causes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from layerzero.flat.flat_param import FlatParam
from layerzero.ops import word_sums
from layerzero.optim.adamw import AdamW
from layerzero.optim.checks import name_of
from layerzero.step.unit import Unit


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
