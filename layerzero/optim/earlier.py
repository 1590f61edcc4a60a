"""Gives sharded parameters to optimizers that were built before wrapping, where possible."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from layerzero.notices import warn_once
from layerzero.optim import attach
from layerzero.runtime.unit import Unit


def replace_in_optimizers(built: Sequence[Unit]) -> None:
    """Replace original parameters by sharded ones in every optimizer that has them.

    Groups, their options and their order stay. State has the original shapes and cannot be kept, so
    an optimizer with state for these parameters is left unchanged, with a warning.
    """
    sharded_params: dict[int, tuple[str, nn.Parameter]] = {}
    for unit in built:
        for (fqn, reference), sharded_param in zip(
            unit.originals, unit.sharded_params, strict=True
        ):
            original = reference()
            if original is not None and original is not sharded_param:
                sharded_params[id(original)] = (fqn, sharded_param)
    if not sharded_params:
        return
    for optimizer in _optimizers():
        held = [p for g in optimizer.param_groups for p in g["params"] if id(p) in sharded_params]
        if not held:
            continue
        if any(parameter in optimizer.state for parameter in held):
            first = sharded_params[id(held[0])][0]
            warn_once(
                f"an optimizer was built before wrapping: {first}",
                f"an optimizer ({type(optimizer).__name__}) was built before wrapping and has "
                f"state for {len(held)} parameters that no longer belong to the model, such as "
                f"{first!r}: it updates nothing; build it again from the wrapped model's "
                "parameters()",
                is_first=_is_first(built),
                stacklevel=3,
            )
            continue
        for group in optimizer.param_groups:
            # In place: the optimizer may have other references to the list.
            group["params"][:] = [sharded_params.get(id(p), ("", p))[1] for p in group["params"]]
        attach.look_at(optimizer)


def _optimizers() -> Iterator[torch.optim.Optimizer]:
    for candidate in gc.get_objects():
        # Not isinstance: it reads `__class__` of the object, at which lazy objects load or warn.
        if issubclass(type(candidate), torch.optim.Optimizer):
            yield candidate


def _is_first(built: Sequence[Unit]) -> bool:
    """Whether this is the first of the ranks that share the model."""
    groups = [group for u in built for handle in u.handles[:1] for group in handle.placement.groups]
    return not any(group.rank for group in (*groups, *built[0].context.tensor_parallel_groups))
