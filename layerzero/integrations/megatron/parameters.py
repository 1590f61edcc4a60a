"""Loads main parameters from a state dict, for `reload_model_params` of Megatron's optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from layerzero.checkpoint.adapters import local_part
from layerzero.integrations.engine import get_info
from layerzero.integrations.megatron.data_parallel import ZeRO3DataParallel


def main_parameters(
    chunks: Sequence[ZeRO3DataParallel],
    trained: Sequence[nn.Parameter],
    state_dict: Mapping[str, Any],
) -> list[dict[str, torch.Tensor]]:
    """The value of each trained parameter, by its name in each chunk. Not collective.

    Raises:
        ValueError: parameters are missing or do not fit; lists the first of them by name.
    """
    wanted = {id(parameter) for parameter in trained}
    values: list[dict[str, torch.Tensor]] = []
    problems = []
    for number, chunk in enumerate(chunks):
        entries = _entries_of(number, len(chunks), state_dict)
        by_name = {_bare(name): value for name, value in entries.items()}
        found = {}
        for name, parameter in chunk.module.named_parameters():
            if id(parameter) not in wanted:
                continue
            value = by_name.get(_bare(name))
            if not isinstance(value, torch.Tensor):
                problems.append(f"{name} is missing")
                continue
            try:
                _check_fits(parameter, value)
            except ValueError as error:
                problems.append(f"{name}: {error}")
            found[name] = value
        values.append(found)
    if problems:
        raise ValueError(
            f"reload_model_params: the state dict does not fit: {'; '.join(problems[:4])}"
            + (f", and {len(problems) - 4} more" if len(problems) > 4 else "")
            + "; expected full tensors or shards of this rank's part of the model by name, as "
            "state_dict_for_save_checkpoint returns them; nothing was changed"
        )
    return values


def _entries_of(number: int, num_chunks: int, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of one chunk: under Megatron's keys, under NeMo's, or at the top level."""
    for prefix in ("model", "model_"):
        if f"{prefix}0" in state_dict:
            found = state_dict.get(f"{prefix}{number}")
            if not isinstance(found, Mapping):
                raise ValueError(
                    f"reload_model_params: expected the entries of {num_chunks} chunks, but "
                    f"{prefix}{number!r} is not in the state dict; nothing was changed"
                )
            return found
    if num_chunks > 1:
        raise ValueError(
            f"reload_model_params: expected the entries of {num_chunks} chunks under 'model0', "
            f"'model1' and so on, got the keys {list(state_dict)[:4]}; nothing was changed"
        )
    inside = state_dict.get("model")
    return inside if isinstance(inside, Mapping) else state_dict


def _bare(name: str) -> str:
    """The name without the prefixes of wrappers such as Megatron's Float16Module."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _check_fits(parameter: nn.Parameter, value: torch.Tensor) -> None:
    if get_info(parameter) is not None:
        local_part(value, parameter)
    elif value.shape != parameter.shape:
        raise ValueError(
            f"size mismatch: the entry has shape {tuple(value.shape)}, the parameter "
            f"{tuple(parameter.shape)}"
        )
