"""step_signature: one number for all weights and optimizer state of a model, over all ranks.

Note [Sums of mixed elements]
    Each element is mixed with its index in the original tensor and a hash of the tensor's name, to
    64 bits, and these are added modulo 2**64. A sum does not depend on order, so it is the same
    however elements are split into units and over ranks; the mixing makes it depend on where each
    value is. (The steps of the mixing are those of MurmurHash3's finalizer.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from layerzero.comm.exchanges import Name, gather_along
from layerzero.flat.parameter_info import ParameterInfo, get_info
from layerzero.flat.placement import ShardGroup
from layerzero.flat.tensor_parallel import TensorParallelSplit, local_of
from layerzero.ops.reference import bits_of
from layerzero.optim.sharded_params import owners
from layerzero.optim.whole_tensor import WholeTensorOptimizer
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState
from layerzero.verify.wire import MODULUS, signed

Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None

_BLOCK = 1 << 16


def step_signature(
    root: RootState, whole: Iterable[tuple[str, torch.Tensor]], optimizer: Optimizers
) -> str:
    """Implements `ZeRO3.step_signature`.

    Args:
        whole: what every rank has a copy of (ignored parameters), by name.
    """
    root.check_between_steps("step_signature: called inside forward or backward; call it between")
    root.before_call("step_signature")
    return _gather(root, list(whole), optimizer)


@remembers_failure
def _gather(root: RootState, whole: list[tuple[str, torch.Tensor]], optimizer: Optimizers) -> str:
    if isinstance(optimizer, Mapping):
        optimizers = [*optimizer.values()]
    else:
        optimizers = [] if optimizer is None else [optimizer]
    keeps_whole = [each for each in optimizers if isinstance(each, WholeTensorOptimizer)]
    states = _states_by_parameter(each for each in optimizers if each not in keeps_whole)
    whole_states = _states_by_parameter(keeps_whole)
    is_first = all(group.is_first for group in root.tensor_parallel_groups)
    own, on_owners = dict.fromkeys(root.placements, 0), dict.fromkeys(root.placements, 0)
    for _, placement, parameter in owners(root):
        info = get_info(parameter)
        assert info is not None, "it is sharded"
        own_states = states.pop(id(parameter), [])
        split = info.tensor_parallel
        if (split is None and is_first) or (split is not None and _counts(split)):
            # Of several copies along the groups that are added up, the first rank's counts.
            if placement.data_parallel is None or placement.replica == 0:
                own[placement] += _sum_of(parameter, info, own_states)
            for key, value in whole_states.pop(id(parameter), []):
                on_owners[placement] += _state(value, info, key)
    total, name = 0, partial(root.operations.next, "step signature", "the model")
    for placement in root.placements:
        total += _add_up(root, own[placement], placement.norm_groups, name)
        if keeps_whole:
            whole_groups = (placement.data_parallel or placement).groups
            total += _add_up(root, on_owners[placement], whole_groups, name)
    total = _add_up(root, total, root.tensor_parallel_groups, name)
    for fqn, tensor in whole:
        total += _elements(tensor.detach(), 0, fqn)
        for key, value in states.pop(id(tensor), []):
            total += _any(value, fqn, key)
    return f"{total % MODULUS:016x}"


def _add_up(root: RootState, own: int, groups: Sequence[ShardGroup], name: Name) -> int:
    own_sum = torch.tensor([signed(own)], device=root.device)
    return sum(gather_along(own_sum, groups, name).view(-1).tolist())


def _states_by_parameter(
    optimizers: Iterable[torch.optim.Optimizer],
) -> dict[int, list[tuple[str, Any]]]:
    found: dict[int, list[tuple[str, Any]]] = {}
    for optimizer in optimizers:
        for parameter in chain(*(group["params"] for group in optimizer.param_groups)):
            state = optimizer.state.get(parameter) or {}
            items = state.items() if isinstance(state, Mapping) else ()
            found.setdefault(id(parameter), []).extend((str(key), item) for key, item in items)
    return found


def _sum_of(parameter: nn.Parameter, info: ParameterInfo, states: list[tuple[str, Any]]) -> int:
    """This rank's part of the sum: of the sharded parameter and of its state."""
    start, stop = info.range
    total = _elements(parameter.detach(), start, info.fqn, info.tensor_parallel)
    for key, value in states:
        is_tensor = isinstance(value, torch.Tensor) and value.ndim > 0
        if is_tensor and value.shape == parameter.shape:
            label = f"{info.fqn}\0{key}"
            total += _elements(value.detach(), start, label, info.tensor_parallel)
        elif start == 0 and stop > 0:
            # What belongs to the whole parameter counts where its first element is.
            total += _state(value, info, key)
    return total


def _state(value: Any, info: ParameterInfo, key: str) -> int:
    """A state of a whole parameter, or of its tensor-parallel part."""
    split = info.tensor_parallel
    if split is None:
        return _any(value, info.fqn, key)
    if isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == split.local_shape:
        return _elements(local_of(value), 0, f"{info.fqn}\0{key}", split)
    return 0 if any(split.offset) else _any(value, info.fqn, key)


def _counts(split: TensorParallelSplit) -> bool:
    """Whether this rank is the first tensor-parallel one that has this part."""
    coordinate = split.mesh.get_coordinate()
    assert coordinate is not None, "it has a part"
    return all(
        place == 0
        for place, placement in zip(coordinate, split.placements, strict=True)
        if placement.is_replicate()
    )


def _any(value: Any, name: str, key: str) -> int:
    """What is not sharded like its parameter: numbers, tensors of other shapes, containers."""
    label = f"{name}\0{key}"
    if isinstance(value, torch.Tensor):
        return _elements(local_of(value), 0, label)
    if isinstance(value, (bool, int, float)):
        return _elements(torch.tensor([float(value)], dtype=torch.float64, device="cpu"), 0, label)
    if isinstance(value, Mapping):
        return sum(_any(each, label, str(inner)) for inner, each in value.items())
    if isinstance(value, (list, tuple)):
        return sum(_any(each, label, str(inner)) for inner, each in enumerate(value))
    return 0


def _elements(
    tensor: torch.Tensor, start: int, label: str, split: TensorParallelSplit | None = None
) -> int:
    """The sum over a tensor; its first element is number `start` of what `label` names."""
    if tensor.is_complex():
        tensor, start = torch.view_as_real(tensor), 2 * start
    bits = bits_of(tensor.contiguous().view(-1))
    name = int.from_bytes(
        hashlib.blake2b(label.encode(), digest_size=8).digest(), "big", signed=True
    )
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for place in range(0, bits.numel(), _BLOCK):
        block = bits[place : place + _BLOCK].to(torch.int64)
        index = torch.arange(
            start + place, start + place + block.numel(), device=bits.device, dtype=torch.int64
        )
        if split is not None:
            index = whole_index(index, split.shape, split.local_shape, split.offset)
        total += _mix(block, index, name).sum()
    return int(total)


def whole_index(
    index: torch.Tensor, shape: Sequence[int], local_shape: Sequence[int], offsets: Sequence[int]
) -> torch.Tensor:
    """Indices in a flattened whole tensor, from those in a flattened block of it."""
    found = torch.zeros_like(index)
    for dim, place in enumerate(torch.unravel_index(index, tuple(local_shape))):
        found += (place + offsets[dim]) * math.prod(shape[dim + 1 :])
    return found


def _mix(bits: torch.Tensor, index: torch.Tensor, name: int) -> torch.Tensor:
    mixed = bits * -7046029254386353131 + index * -4417276706812531889
    mixed += name
    for multiplier in (-49064778989728563, -4265267296055464877):
        mixed ^= (mixed >> 33) & 0x7FFFFFFF
        mixed *= multiplier
    mixed ^= (mixed >> 33) & 0x7FFFFFFF
    return mixed
