"""Refuses collectives of the user's own on shards, as in loops that average gradients by hand.

    for p in model.parameters():
        dist.all_reduce(p.grad)             # or dist.broadcast(p.data, 0) at the start

After wrapping these mix unequal parts of parameters: where parts happen to be of equal size in
silence, else in a hang, a crash or an error that names only sizes. Over ranks that hold the same
part, such as replicas outside of the engine, they are right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from layerzero.core.data_watch import grad_of
from layerzero.core.parameter_info import get_info
from layerzero.core.placement import Placement
from layerzero.runtime.root import RootState
from layerzero.runtime.sharded_params import Owner, live_roots, owners

_WHY = {
    "all_reduce": "the engine has averaged gradients in backward already: remove the call",
    "broadcast": "all ranks have their part of one model already: remove the call",
}
_MARK = "_layerzero_refuses_shards"
_sizes: WeakKeyDictionary[RootState, frozenset[int]] = WeakKeyDictionary()
"""Sizes of the parts that this rank holds, so that other tensors are told apart at once."""


def refuse_shards_in_collectives() -> None:
    """Have `torch.distributed.all_reduce` and `broadcast` refuse shards from now on."""
    for name, why in _WHY.items():
        plain = getattr(dist, name)
        if not hasattr(plain, _MARK):
            checked = _checked(plain, name, why)
            for module in (dist, distributed_c10d):
                setattr(module, name, checked)


def _checked(plain: Callable[..., Any], name: str, why: str) -> Callable[..., Any]:
    @functools.wraps(plain)
    def collective(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Parts and their gradients are 1-D.
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 1 and tensor.is_floating_point():
            group = next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
            found = _find(tensor, kwargs.get("group", group))
            if found is not None:
                raise RuntimeError(
                    f"torch.distributed.{name} of {found!r}, which is sharded: its ranks hold "
                    f"other parts of it, or of other parameters. {why[0].upper()}{why[1:]}"
                )
        return plain(tensor, *args, **kwargs)

    setattr(collective, _MARK, True)
    return collective


def _find(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> str | None:
    """Name of the sharded parameter whose part or gradient `tensor` is, if ranks of `group` hold
    other parts."""
    for owner in owners_of_part(tensor):
        if _is_split(owner.placement, group):
            info = get_info(owner.sharded_param)
            assert info is not None, "sharded parameters have ParameterInfo"
            return info.fqn
    return None


def owners_of_part(tensor: torch.Tensor) -> Iterator[Owner]:
    """Sharded parameters whose part or gradient `tensor`, which is 1-D, may be: one, unless it is
    empty. Most tensors are told apart by their size at once."""
    for root in live_roots():
        sizes = _sizes.get(root)
        if sizes is None:
            sizes = _sizes[root] = frozenset(each.sharded_param.numel() for each in owners(root))
        if tensor.numel() in sizes:
            for owner in owners(root):
                if _is_part(tensor, owner.sharded_param):
                    yield owner


def _is_part(tensor: torch.Tensor, sharded_param: nn.Parameter) -> bool:
    gradient = grad_of(sharded_param)
    if tensor.numel() != sharded_param.numel():
        return False
    if not tensor.numel():
        # No memory tells whose it is; nobody else has a reason to send nothing.
        return True
    start = tensor.data_ptr()
    return start == sharded_param.data_ptr() or (
        gradient is not None and gradient.is_contiguous() and start == gradient.data_ptr()
    )


def _is_split(placement: Placement, group: dist.ProcessGroup | None) -> bool:
    """Whether ranks of the group hold another part than this rank."""
    members = set(dist.get_process_group_ranks(group or dist.group.WORLD))
    same = {dist.get_rank()}
    if placement.owned_slices > 1 and placement.outer_group is not None:
        same.update(placement.outer_group.ranks)  # Replicas.
    return not members.intersection(placement.members) <= same
