"""Checks, at an optimizer's first step, that its class can work on sharded parameters.

An element-wise optimizer updates each element as it would in a full parameter, so sharding does not
change training. One that uses a norm, a row or a matrix of its parameter uses that of the shard.
torch's element-wise classes and ours pass, classes known to be wrong are refused on every rank, and
of any other class one sentence says what it must not need.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layerzero.flat.parameter_info import get_info
from layerzero.notices import warn_once
from layerzero.optim import attach
from layerzero.optim.adamw import AdamW
from layerzero.optim.decay import original_ndim
from layerzero.optim.in_backward import is_narrowed
from layerzero.optim.sharded_params import Owner, first_owner
from layerzero.optim.whole_tensor import WholeTensorOptimizer

_ELEMENT_WISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    torch.optim.SparseAdam,
)
_ELEMENT_WISE_ONE = "one that treats each element by itself, such as torch.optim.AdamW or SGD"
_DISTRIBUTE = {"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "OSS"}
_DISTRIBUTE |= {"DistributedFusedAdam", "DistributedFusedLAMB"}
"""Names of classes that split or average parameters over ranks themselves."""
_REFUSED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "needs the gradients of all parameters together, and calls its collective "
    "closure until they are small, so ranks would call it different numbers of times",
    torch.optim.Muon: "orthogonalizes whole matrices",
    torch.optim.Adafactor: "needs whole parameters for its rows, columns and norms, and fails on a "
    "rank whose shard has no element",
}
"""Optimizers that shards would mislead, and why; LBFGS needs more than each parameter whole."""


@attach.on_sharded_params
def _refuse(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        TypeError: the optimizer distributes parameters itself.
        NotImplementedError: on every rank, if ranks would take different paths with it.
    """
    names = [cls.__name__ for cls in type(optimizer).__mro__ if cls.__name__ in _DISTRIBUTE]
    if names:
        raise TypeError(
            f"{names[0]} was given parameters of a ZeRO3 module: it would overwrite other ranks' "
            "shards with this rank's. ZeRO3 splits the optimizer state over ranks already: pass "
            "the parameters to an ordinary optimizer such as torch.optim.AdamW"
        )
    for cls, why in _REFUSED.items():
        if isinstance(optimizer, cls) and _are_parts(first_owner(_parameters(optimizer))):
            whole = f"{_whole_of(optimizer)}, which steps it on whole tensors, or "
            instead = "" if cls is torch.optim.LBFGS else whole
            raise NotImplementedError(
                f"{cls.__name__} {why}. It was given this rank's shards of a model. Use "
                f"{instead}{_ELEMENT_WISE_ONE}; or leave the model unsharded "
                "(DistributedDataParallel)"
            )


def _are_parts(owner: Owner | None) -> bool:
    """Otherwise this rank has all elements, and only shapes differ."""
    if owner is None:
        return False
    return owner.placement.num_main_shards > 1 or owner.is_tensor_parallel


def _whole_of(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__
    return f"layerzero.optim.WholeTensorOptimizer(model.parameters(), {name}, ...)"


@attach.on_first_step
def _check(optimizer: torch.optim.Optimizer) -> None:
    """Warn of an optimizer before its first step."""
    is_known = _is_known(type(optimizer))
    has_empty_groups = not all(group["params"] for group in optimizer.param_groups)
    if is_known and not has_empty_groups:
        return  # Early: with one optimizer per parameter, the search below would be quadratic.
    marked = [each for each in _parameters(optimizer) if get_info(each) is not None]
    owner = first_owner(marked)
    if owner is None:
        return
    if not is_narrowed(optimizer):
        _warn_of_decay(optimizer, owner)
    has_other_shapes = any(original_ndim(each) > each.ndim for each in marked)
    if not is_known and (has_other_shapes or _are_parts(owner)):
        warn_once(
            f"{type(optimizer).__name__} was given sharded parameters, which are this rank's "
            "parts. If it uses more than one element at a time (a norm, a mean, rows or matrices "
            f"of a parameter), it trains differently than unsharded: use {_whole_of(optimizer)}, "
            f"or {_ELEMENT_WISE_ONE}",
            is_first=owner.issues_warnings,
        )


def _is_known(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether its `step` is that of one of torch's element-wise optimizers, or of ours."""
    owner = next(each for each in cls.__mro__ if "step" in vars(each))
    return owner in _ELEMENT_WISE or issubclass(owner, (AdamW, WholeTensorOptimizer))


def _warn_of_decay(optimizer: torch.optim.Optimizer, owner: Owner) -> None:
    """Warn if groups were made by `parameter.ndim`: one has all shapes, and another is empty."""
    empty = {g.get("weight_decay") for g in optimizer.param_groups if not g["params"]}
    held = {g.get("weight_decay") for g in optimizer.param_groups if g["params"]}
    is_matrix = {original_ndim(each) > each.ndim for each in _parameters(optimizer)}
    if len(held) != 1 or is_matrix != {True, False} or not empty or empty == held:
        return
    decay = max(empty | held, key=lambda each: each or 0.0)
    name = type(optimizer).__name__
    warn_once(
        f"{name}: all parameters are in the group with weight_decay={held.pop()}, and the one with "
        f"weight_decay={empty.pop()} is empty. Sharded parameters are 1-D, so parameter.ndim "
        'cannot distinguish matrices from vectors: use parameter.layerzero.ndim, layout="rows", or '
        f"layerzero.optim.decay_groups(model, weight_decay={decay})",
        f"decay groups: {name}",
        is_first=owner.issues_warnings,
    )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
