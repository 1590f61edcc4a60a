"""What the optimizers of this package refuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from layerzero.flat.parameter_info import get_info
from layerzero.optim.sharded_params import owner_of_each
from layerzero.step.root import RootState


def check_parameters(
    what: str,
    parameters: Sequence[nn.Parameter],
    earlier: Sequence[nn.Parameter] = (),
    takes_ignored: bool = True,
) -> None:
    """Check parameters that are given to an optimizer.

    Args:
        what: class of the optimizer, for messages.
        earlier: those that it has already.
        takes_ignored: accept the model's ignored parameters, too.

    Raises:
        TypeError: one is no tensor.
        ValueError: one belongs to no ZeRO3 module, or to another one than the others; names it.
    """
    known = owner_of_each()
    # Of the first sharded parameter; the one that belongs elsewhere is named by its own.
    first = next((known[id(p)] for p in (*earlier, *parameters) if id(p) in known), None)
    root = None if first is None else first.root
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"{what}: expected parameters, got {type(parameter).__name__}")
        owner = known.get(id(parameter))
        if owner is None and not (takes_ignored and root and _is_ignored(root, parameter)):
            raise ValueError(
                f"{what}: parameter {name_of(parameter)} belongs to no ZeRO3 module; wrap the "
                "model first, pass its parameters() outside summon_full_params, and give "
                "parameters that it does not shard to an optimizer of torch"
            )
        if owner is not None and first is not None and owner.root is not root:
            raise ValueError(
                f"{what}: parameter {name_of(parameter)} belongs to another ZeRO3 module than "
                f"{name_of(first.sharded_param)}; build one optimizer for each model"
            )


def _is_ignored(root: RootState, parameter: nn.Parameter) -> bool:
    ignored = root.structure.ignored_now()
    inside = (each for module in ignored.modules for each in module.parameters())
    return any(parameter is each for each in (*ignored.parameters, *inside))


def refuse_in_graph(what: str, root: RootState | None) -> None:
    """Raise RuntimeError if a graph records the step of an optimizer."""
    if root is not None and root.streams.is_capturing():
        raise RuntimeError(
            f"{what}.step: a graph would repeat the rate of this step; step after the replay, as "
            "layerzero.capture does, or use torch's optimizer with capturable=True"
        )


def name_of(parameter: torch.Tensor) -> str:
    """A parameter's FQN in quotes; of one that is not sharded, its shape."""
    info = get_info(parameter) if isinstance(parameter, nn.Parameter) else None
    return f"of shape {tuple(parameter.shape)}" if info is None else repr(info.fqn)
