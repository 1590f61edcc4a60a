"""Refuses two parameters over one memory: each would become shards of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from layerzero.flat.names import clean_name
from layerzero.flat.parameter_info import foreign_class, get_info
from layerzero.flat.tensor_parallel import local_of


class _Held(NamedTuple):
    """The memory of one parameter, in bytes: [start, stop) on a device, perhaps with gaps."""

    device: str
    start: int
    stop: int
    name: str
    local: torch.Tensor
    is_ignored: bool


def refuse_shared_memory(
    sharded: Iterable[tuple[str, nn.Parameter]], ignored: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Raise ValueError if two parameters share elements, and one of them is to be sharded.

    Takes n log n steps for n parameters, and reads no values.
    """
    memory = (held for named in (sharded, ignored) for held in _memory_of(named, named is ignored))
    around: list[_Held] = []
    """Parameters whose ranges overlap, directly or by others of these."""
    end = ("", 0)
    for held in sorted(memory, key=lambda each: each[:3]):
        if (held.device, held.start) >= end:
            _check(around)
            around = []
        around.append(held)
        end = max(end, (held.device, held.stop))
    _check(around)


def _memory_of(named: Iterable[tuple[str, nn.Parameter]], is_ignored: bool) -> Iterator[_Held]:
    for name, parameter in named:
        if get_info(parameter) is not None or foreign_class(parameter) is not None:
            continue
        local = local_of(parameter)
        if local.layout is not torch.strided or not local.numel():
            continue
        if local.untyped_storage().device.type != "meta":  # That of a fake tensor is, too.
            start = local.data_ptr()
            stop = start + local.nbytes
            if not local.is_contiguous():
                steps = zip(local.shape, local.stride(), strict=True)
                stop = start + (sum((n - 1) * step for n, step in steps) + 1) * local.itemsize
            yield _Held(str(local.device), start, stop, clean_name(name), local, is_ignored)


def _check(around: list[_Held]) -> None:
    """Check parameters with overlapping ranges. Those of one matrix's columns share no element."""
    if len(around) < 2:
        return
    dense = [held for held in around if held.local.is_contiguous()]
    for one, other in pairwise(dense):
        if other.start < one.stop and not (one.is_ignored and other.is_ignored):
            _refuse(one, other)
    start = around[0].start
    is_taken = np.zeros(max(held.stop for held in around) - start, bool)
    around.sort(key=lambda held: held.is_ignored)
    for index, held in enumerate(around):
        own = _bytes_of(held, is_taken, start)
        if own.any():
            is_taken[:] = False
            own[...] = True
            _refuse(next(e for e in around[:index] if _bytes_of(e, is_taken, start).any()), held)
        own[...] = not held.is_ignored


def _bytes_of(held: _Held, memory: Any, start: int) -> Any:
    """The elements of `memory`, one for each byte from address `start`, where `held` lies."""
    itemsize = held.local.itemsize
    steps = (*(step * itemsize for step in held.local.stride()), 1)
    shape = (*held.local.shape, itemsize)
    return np.lib.stride_tricks.as_strided(memory[held.start - start :], shape, steps)


def _refuse(one: _Held, other: _Held) -> None:
    raise ValueError(
        f"parameters {one.name!r} and {other.name!r} are two Parameters over the same memory: each "
        "would get shards of its own, and a write to one would no longer change the other; make "
        "them one Parameter, which stays tied (b.weight = a.weight, without nn.Parameter or "
        ".data), or give one of them memory of its own (clone)"
    )
