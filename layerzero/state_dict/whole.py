"""Replaces shards in a state dict by full tensors, also inside torch's `full_state_dict=True`.

torch_gather.py has torch's own functions call `gather_shards`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from layerzero.state_dict.gather import gather, root_of
from layerzero.state_dict.parameter_shard import ParameterShard
from layerzero.state_dict.preconditions import refuse_experts
from layerzero.state_dict.rank_local import RankLocal
from layerzero.step.root import RootState


def gather_shards(
    state_dict: dict[str, Any],
    *,
    cpu_offload: bool = False,
    ranks_only: Sequence[int] = (),
    are_alike: bool = False,
) -> dict[str, Any]:
    """The same nested dicts and lists, with full tensors in place of shards.

    Collective over the ranks that share the model, if there is any shard.

    Args:
        cpu_offload: move each full tensor to the CPU once it is gathered.
        ranks_only: ranks that get full tensors; the others get None instead. (): all ranks.
        are_alike: all ranks are known to have shards of the same parameters.

    Raises:
        ValueError: a shard was read from a file, or its model is gone.
        CheckpointError: on every rank, if ranks have different shards.
        NotImplementedError: a value is optimizer state of one rank only (`RankLocal`).
        CollectiveError: a rank died, or did not take part within the timeout.
    """
    by_root: dict[int, tuple[RootState, dict[int, ParameterShard]]] = {}
    for value in _values_in(state_dict):
        if isinstance(value, ParameterShard):
            root = root_of(value)
            by_root.setdefault(id(root), (root, {}))[1][id(value)] = value
        elif isinstance(value, RankLocal):
            value.refuse()
    if not by_root:
        return state_dict
    keeps = not ranks_only or dist.get_rank() in ranks_only
    full: dict[int, torch.Tensor | None] = {}
    for root, shards in by_root.values():
        if ranks_only:
            refuse_experts(root, "full tensors on some ranks only")
        for shard, value in gather(root, list(shards.values()), are_alike):
            full[id(shard)] = None
            if keeps:
                device = "cpu" if cpu_offload else value.device
                full[id(shard)] = value.detach().to(device, copy=True)
            del value
    replaced: dict[str, Any] = _replace(state_dict, full)
    return replaced


def _values_in(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _values_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _values_in(item)
    else:
        yield value


def _replace(value: Any, full: dict[int, torch.Tensor | None]) -> Any:
    if isinstance(value, dict):
        return {key: _replace(item, full) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace(item, full) for item in value)
    return full[id(value)] if isinstance(value, ParameterShard) else value
