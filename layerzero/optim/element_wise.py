"""Warns about optimizers that are not element-wise: known ones by name, others by a trial step.

An element-wise optimizer updates each element as it would in a full parameter, so sharding does not
change training. An optimizer that uses a norm, a row or a matrix of its parameter uses that of the
shard, and silently trains differently. A class does not show which kind it is; but a few steps on a
small parameter, and on the same elements cut into parts, do.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakSet

import torch

from layerzero.core.parameter_info import get_info
from layerzero.notices import warn_once
from layerzero.optim import attach
from layerzero.optim.decay import original_ndim
from layerzero.optim.flat_optimizer import FlatOptimizer
from layerzero.optim.in_backward import is_narrowed
from layerzero.optim.probe import differs_on_parts
from layerzero.optim.whole_tensor import WholeTensorOptimizer
from layerzero.runtime.sharded_params import Owner, owner_of_each

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

_USES: list[tuple[str, str, bool]] = [
    (r"(?i)adafactor|^came$|^sm3$|lomo$|^adalite$", "rows, columns and norms of a parameter", True),
    (
        r"(?i)muon|shampoo|^soap|kron|psgd|k-?fac|galore|^scion|^dion|^apollo|^flora|^fira|^racs"
        r"|^alice|spectral|adahessian|^polargrad",
        "matrices of a parameter",
        True,
    ),
    (r"(?i)lamb$|lars|^larc$|novograd|fromage|^nero$", "the norm of a parameter", True),
    (
        r"(?i)prodigy|dadapt|^mechanic|^dog$|^ldog$|^adams$",
        "a step size or decay from sums over the elements of all parameters",
        False,
    ),
    (
        r"(?i)^stableadamw|^adamp$|^sgdp$|^adai|mini$|^aida$",
        "norms or means over a parameter",
        True,
    ),
    (r"(?i)^ranger", "the mean over rows of a gradient, which a shard lacks", True),
    (
        r"(?i)(8|4)bit|fp8$",
        "blocks of neighbouring elements to quantize its state, which shards cut elsewhere",
        True,
    ),
]
"""Patterns of class names, what these optimizers use that a sharded parameter lacks, and whether
each parameter, if whole, is enough for them."""

_REFUSED: dict[type[torch.optim.Optimizer], tuple[str, bool]] = {
    torch.optim.LBFGS: (
        "needs the gradients of all parameters together, and calls its collective closure until "
        "they are small, so ranks would call it different numbers of times",
        False,
    ),
    torch.optim.Adafactor: (
        "needs whole parameters for its rows, columns and norms, and fails on a rank whose shard "
        "has no element",
        True,
    ),
}
"""Optimizers with which ranks would take different paths: the reason, for the message, and whether
each parameter, if whole, is enough for them."""

_PERTURBS = re.compile(r"(?<!B)S(AM|am)$")
_perturbing: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Sharpness-aware optimizers: wrappers whose own `step` may never be called."""


class _ShardedParams(NamedTuple):
    """The sharded parameters that an optimizer has of one model."""

    owner: Owner
    ndim: int
    """Largest number of dimensions of an original parameter."""

    @property
    def are_parts(self) -> bool:
        """Whether other ranks hold some of the elements; otherwise only shapes differ."""
        return self.owner.placement.num_main_shards > 1 or self.owner.is_tensor_parallel

    @property
    def change_anything(self) -> bool:
        return self.are_parts or self.ndim != 1


@attach.on_sharded_params
def _note(optimizer: torch.optim.Optimizer) -> None:
    if _PERTURBS.search(type(optimizer).__name__):
        _perturbing.add(optimizer)


@attach.on_sharded_params
def _refuse_muon(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what torch's Muon refuses with the shape of a shard, which says nothing to the user.

    Raises:
        ValueError: on every rank.
    """
    if not isinstance(optimizer, torch.optim.Muon):
        return
    infos = [info for each in _parameters(optimizer) if (info := get_info(each)) is not None]
    others = [info for info in infos if info.ndim != 2]
    also = (
        f" It takes matrices only: {others[0].fqn!r} has shape {tuple(others[0].shape)}; give such "
        "parameters to torch.optim.AdamW."
        if others
        else ""
    )
    raise ValueError(
        f"{type(optimizer).__name__} orthogonalizes whole matrices, but was given sharded "
        f"parameters such as {infos[0].fqn!r}, which are this rank's 1-D parts of them. Use "
        f"{_whole_of(optimizer)} with matrices = [p for p in model.parameters() if "
        f"p.layerzero.ndim == 2].{also}"
    )


def _whole_of(optimizer: torch.optim.Optimizer, parameters: str = "matrices") -> str:
    name = type(optimizer).__name__
    return f"layerzero.optim.WholeTensorOptimizer({parameters}, {name}, ...)"


def _instead(optimizer: torch.optim.Optimizer, whole_is_enough: bool) -> str:
    element_wise = "one that treats each element by itself, such as torch.optim.AdamW or SGD"
    if not whole_is_enough:
        return f"Use {element_wise}"
    whole = _whole_of(optimizer, "model.parameters()")
    return f"Use {whole}, which steps it on whole tensors, or {element_wise}"


@attach.on_first_step
def _check(optimizer: torch.optim.Optimizer) -> None:
    """Check an optimizer before its first step, and warn if needed.

    Raises:
        NotImplementedError: on every rank, if ranks would take different paths with it.
    """
    uses, whole_is_enough = _what_it_uses(optimizer)
    may_be_split = not all(g["params"] for g in optimizer.param_groups) or _decays_nothing(
        optimizer
    )
    if uses is None and not may_be_split and not _perturbing and _is_known(type(optimizer)):
        return  # Early: with one optimizer per parameter, the search below would be quadratic.
    sharded_params = _sharded_params_of(optimizer)
    if sharded_params is None:
        return
    for cls, (why, whole_would_do) in _REFUSED.items():
        if isinstance(optimizer, cls) and sharded_params.are_parts:
            raise NotImplementedError(
                f"{cls.__name__} {why}. It was given this rank's shards of a model. "
                f"{_instead(optimizer, whole_would_do)}; or leave the model unsharded "
                "(DistributedDataParallel)"
            )
    if not is_narrowed(optimizer):
        _warn_of_decay(optimizer, sharded_params)
    held = {id(parameter) for parameter in _parameters(optimizer)}
    for each in list(_perturbing):
        if sharded_params.are_parts and any(
            id(parameter) in held for parameter in _parameters(each)
        ):
            name = type(each).__name__
            warn_once(
                f"not element-wise: {name}",
                f"{name} perturbs weights by the norm of all gradients, but was given this rank's "
                "shards only: use the norm over all ranks, layerzero.global_norm(model), instead",
                is_first=sharded_params.owner.issues_warnings,
                stacklevel=5,
            )
    if isinstance(optimizer, WholeTensorOptimizer):
        _warn_of_sums(optimizer, sharded_params)
        return
    if optimizer in _perturbing or not sharded_params.change_anything:
        return
    if uses is None and sharded_params.owner.issues_warnings and not _is_known(type(optimizer)):
        ndim = 2 if sharded_params.ndim > 1 else 1
        if differs_on_parts(optimizer, ndim, 2 if sharded_params.are_parts else 1):
            uses = "more than one element at a time (shown by a step on stand-in parameters)"
            whole_is_enough = True
    if uses is not None:
        name = type(optimizer).__name__
        warn_once(
            f"not element-wise: {name}",
            f"{name} uses {uses}: with shards, which are 1-D parts, it trains differently than "
            f"with whole parameters. {_instead(optimizer, whole_is_enough)}",
            is_first=sharded_params.owner.issues_warnings,
            stacklevel=5,
        )


def _warn_of_sums(optimizer: WholeTensorOptimizer, sharded_params: _ShardedParams) -> None:
    """Warn if the optimizer inside needs more than the tensors that its rank owns."""
    inner = optimizer.inner
    uses, whole_is_enough = (None, True) if inner is None else _what_it_uses(inner)
    if uses is not None and not whole_is_enough and sharded_params.are_parts:
        name = type(inner).__name__
        warn_once(
            f"not tensor by tensor: {name}",
            f"{name} uses {uses}: inside WholeTensorOptimizer each rank has those that it owns, so "
            "it trains differently than in one process. Use one that treats each tensor by itself",
            is_first=sharded_params.owner.issues_warnings,
            stacklevel=6,
        )


def _what_it_uses(optimizer: torch.optim.Optimizer) -> tuple[str | None, bool]:
    """What its class is known to use, or None; and whether each parameter, if whole, is enough."""
    for cls in type(optimizer).__mro__[:-1]:
        for pattern, uses, whole_is_enough in _USES:
            if issubclass(cls, torch.optim.Optimizer) and re.search(pattern, cls.__name__):
                return uses, whole_is_enough
    return None, False


def _is_known(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether its `step` is that of one of torch's element-wise optimizers."""
    owner = next(each for each in cls.__mro__ if "step" in vars(each))
    return owner in _ELEMENT_WISE or issubclass(owner, FlatOptimizer)


def _decays_nothing(optimizer: torch.optim.Optimizer) -> bool:
    """Whether groups turn off the weight decay that was asked for as the optimizer's default.

    One group alone counts, too, if the default is the class's own: who wants no decay at all passes
    `weight_decay=0` instead.
    """
    default = optimizer.defaults.get("weight_decay")
    if not default or any(group.get("weight_decay") for group in optimizer.param_groups):
        return False
    given = inspect.signature(type(optimizer)).parameters.get("weight_decay")
    return len(optimizer.param_groups) == 1 or (given is not None and given.default != default)


def _warn_of_decay(optimizer: torch.optim.Optimizer, sharded_params: _ShardedParams) -> None:
    """Warn if groups were made by `parameter.ndim`: one has all shapes, and no other has any."""
    groups = optimizer.param_groups
    empty = {group.get("weight_decay") for group in groups if not group["params"]}
    held = {group.get("weight_decay") for group in groups if group["params"]}
    if len(held) != 1 or {original_ndim(each) > 1 for each in _parameters(optimizer)} != {
        True,
        False,
    }:
        return
    decay = max(empty | held, key=lambda each: each or 0.0)
    if empty and empty != held:
        what = f", and the one with weight_decay={empty.pop()} is empty"
    elif _decays_nothing(optimizer):
        decay = optimizer.defaults["weight_decay"]
        what = f", and none has the optimizer's weight_decay={decay}"
    else:
        return
    name = type(optimizer).__name__
    warn_once(
        f"decay groups: {name}",
        f"{name}: all parameters are in the group with weight_decay={held.pop()}{what}. Sharded "
        "parameters are 1-D, so parameter.ndim cannot distinguish matrices from vectors: use "
        f"layerzero.optim.decay_groups(model, weight_decay={decay}), or parameter.layerzero.ndim. "
        "If nothing shall decay, pass weight_decay=0 to the optimizer",
        is_first=sharded_params.owner.issues_warnings,
        stacklevel=6,
    )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _sharded_params_of(optimizer: torch.optim.Optimizer) -> _ShardedParams | None:
    marked = [each for each in _parameters(optimizer) if get_info(each) is not None]
    known = owner_of_each()
    owners = [known[id(sharded_param)] for sharded_param in marked if id(sharded_param) in known]
    if not owners:
        return None
    return _ShardedParams(owners[0], max(original_ndim(sharded_param) for sharded_param in marked))
