"""Gathers the whole states of a WholeTensorOptimizer, each of which its owner rank has."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from layerzero.state_dict.checkpoint_group import CheckpointGroup
from layerzero.state_dict.dtype_names import DTYPES, dtype_name
from layerzero.state_dict.json_codec import decode, encode
from layerzero.state_dict.names import Names
from layerzero.state_dict.optimizers import fill_slots, parameters_with_state, take_tensors

_ROUND_NBYTES = 16 << 20
"""Bytes that a rank sends in one exchange."""


def gather_whole_states(
    optimizer: torch.optim.Optimizer, names: Names, together: CheckpointGroup, keeps: bool
) -> dict[str, dict[str, Any]]:
    """The state of every parameter that has one, by name, with tensors on the CPU.

    Collective over `together`; blocks the host.

    Args:
        keeps: whether this rank wants the result; it gets {} otherwise.

    Raises:
        CheckpointError: a value cannot be encoded.
    """
    states: Any = optimizer.state
    tensors: list[torch.Tensor] = []

    def describe() -> bytes:
        rows = []
        for parameter in parameters_with_state(optimizer):
            found = names.of(parameter)
            assert found is not None, "name_in_group raised for others"
            if parameter not in states:
                continue
            where = f"optimizer state of {found[0]}"
            rest, own = take_tensors(dict(states[parameter]), "")
            described = [[k, dtype_name(t.dtype, where), list(t.shape)] for k, t in own.items()]
            tensors.extend(own.values())
            rows.append([found[0], encode(rest, where), described])
        return json.dumps(rows).encode()

    everything = [json.loads(each) for each in together.exchange("whole states", describe)]
    received = _exchange(tensors, everything, together, keeps)
    if not keeps:
        return {}
    order = {found[0]: number for number, (_, found) in enumerate(names.parameters)}
    result: dict[str, dict[str, Any]] = {}
    for rows, data in zip(everything, received, strict=True):
        start = 0
        for name, rest, described in rows:
            own = {}
            for key, dtype, shape in described:
                nbytes = _nbytes(dtype, shape)
                part = data[start : start + nbytes].clone()  # Aligned, in memory of its own.
                own[key] = part.view(DTYPES[dtype]).view(shape)
                start += nbytes
            if name in order:  # Otherwise an expert of other ranks.
                result[name] = fill_slots(decode(rest), own)
    return dict(sorted(result.items(), key=lambda item: order[item[0]]))


def _nbytes(dtype: str, shape: list[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def _exchange(
    tensors: list[torch.Tensor],
    everything: list[list[Any]],
    together: CheckpointGroup,
    keeps: bool,
) -> list[torch.Tensor]:
    """The bytes of each rank's tensors, one behind the other: uint8 on the CPU."""
    totals = [
        sum(_nbytes(dtype, shape) for _, _, described in rows for _, dtype, shape in described)
        for rows in everything
    ]
    parts = [each.detach().reshape(-1).view(torch.uint8).cpu() for each in tensors]
    own = torch.cat([*parts, torch.empty(0, dtype=torch.uint8)])
    received = [torch.empty(total if keeps else 0, dtype=torch.uint8) for total in totals]
    for begin in range(0, max(totals, default=0), _ROUND_NBYTES):
        sent = own[begin : begin + _ROUND_NBYTES].numpy().tobytes()
        answers = together.gather("tensors of whole states", sent)
        for into, answer in zip(received if keeps else (), answers, strict=keeps):
            if answer:
                part = torch.frombuffer(bytearray(answer), dtype=torch.uint8)
                into[begin : begin + len(answer)] = part
    return received
