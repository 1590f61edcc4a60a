"""Parameters without those of which this rank has nothing, for optimizers that cannot take them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def nonempty_parameters(
    parameters: nn.Module
    | Iterable[torch.Tensor]
    | Iterable[tuple[str, torch.Tensor]]
    | Iterable[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Parameter groups without tensors of 0 elements.

    A rank of a sharded model has sharded parameters of 0 elements. torch's optimizers skip them;
    some others fail on them, or skip their neighbours. Not collective.

    Args:
        parameters: what an optimizer takes: parameters, (name, parameter) pairs or groups, such as
            those of `decay_groups`; or a module, for all its parameters.

    Returns:
        One group for each that was given, with its options; one in all, if none were given. A group
        of which this rank has nothing stays, so that every rank has the same groups.
    """
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    members: list[Any] = list(given)
    groups = members if members and isinstance(members[0], dict) else [{"params": members}]
    return [{**group, "params": _nonempty(group["params"])} for group in groups]


def _nonempty(members: Any) -> list[Any]:
    listed = [members] if isinstance(members, torch.Tensor) else members
    return [m for m in listed if (m[1] if isinstance(m, tuple) else m).numel()]
