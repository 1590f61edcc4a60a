"""Home: where the parameters of a flat optimizer lie, and which parts of them."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from layerzero.flat.huge_pages import prefer_huge_pages
from layerzero.flat.parameter_info import get_info
from layerzero.step.handle import FlatParamHandle
from layerzero.step.unit import Unit

_address_of = torch.Tensor.data_ptr


class Held(NamedTuple):
    """A parameter that an optimizer has, and where it lies."""

    parameter: nn.Parameter
    group: int
    offset: int
    """In the main shard."""
    start: int
    """Index of its first element in the whole parameter."""
    total: int
    """Elements of the whole parameter."""
    key: int
    """Number that stands for the whole parameter, the same on every rank and in every run."""


class Home:
    """Where parameters lie: the main shard of a flat parameter, or a tensor of its own."""

    def __init__(self, held: list[Held], handle: FlatParamHandle | None, unit: Unit | None) -> None:
        self.held = held
        # Weakly: an optimizer must not keep the buffers of a model that is gone.
        self._handle = None if handle is None else weakref.ref(handle)
        self._unit = None if unit is None else weakref.ref(unit)
        if handle is None:
            self.main = held[0].parameter.detach().view(-1)
        else:
            self.main = handle.main_shard
        prefer_huge_pages(self.main)
        self._addresses = [*map(_address_of, self.parameters)]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [each.parameter for each in self.held]

    @property
    def handle(self) -> FlatParamHandle | None:
        return None if self._handle is None else self._handle()

    @property
    def unit(self) -> Unit | None:
        return None if self._unit is None else self._unit()

    def is_where_it_was(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether its parameters, which these are, still are views of `main`."""
        return [*map(_address_of, parameters)] == self._addresses


def key_of(name: str) -> int:
    """A number for a parameter, from its name."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def homes_of(groups: Sequence[Sequence[nn.Parameter]], units: Iterable[Unit]) -> Iterator[Home]:
    """The homes of all parameters of an optimizer, those in `units` first."""
    group_of = {id(each): number for number, group in enumerate(groups) for each in group}
    for unit in units:
        for handle in unit.handles:
            ranges = handle.layout.shard_ranges(handle.placement.main_shard_index)
            held = []
            for parameter, owned in zip(handle.sharded_params, ranges, strict=True):
                group = group_of.pop(id(parameter), None)
                info = get_info(parameter)
                if group is not None and info is not None:
                    total = handle.layout.numels[owned.param]
                    place = owned.offset, owned.start, total, key_of(info.fqn)
                    held.append(Held(parameter, group, *place))
            if held:
                handle.reset_sharded_params(unit.label)
                yield Home(held, handle, unit)
    for number, members in enumerate(groups):
        for index, parameter in enumerate(members):
            if id(parameter) in group_of:
                key = key_of(f"parameter {index} of group {number}")
                yield Home([Held(parameter, number, 0, 0, parameter.numel(), key)], None, None)
