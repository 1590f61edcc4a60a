"""What a WholeTensorOptimizer is given: read, checked, and the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from layerzero.build.compare import Exchange, hash_of
from layerzero.flat.parameter_info import info_of
from layerzero.optim.attach import with_sharded
from layerzero.optim.checks import check_parameters, name_of
from layerzero.optim.sharded_params import Owner, owner_of_each
from layerzero.optim.whole_tensor.inner import Group, options_of
from layerzero.optim.whole_tensor.owners import Cost
from layerzero.step.root import RootState

_NAME = "WholeTensorOptimizer"


class Given(NamedTuple):
    """Parameter groups, and the owner of each parameter, by its id."""

    groups: list[Group]
    owners: dict[int, Owner]
    root: RootState | None
    """The model of the first parameter that belongs to one."""
    is_flat: bool
    """Whether parameters were given without groups."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.groups for parameter in group["params"]]

    def check(self, held: Collection[nn.Parameter]) -> None:
        """
        Args:
            held: parameters that the optimizer has already.

        Raises:
            TypeError, ValueError: a parameter is none of the model's, or occurs twice; names it.
            RuntimeError: inside forward or backward.
        """
        if self.root is not None:
            self.root.check_between_steps(
                f"{_NAME}: made inside forward or backward; make it between steps"
            )
        check_parameters(_NAME, self.parameters, [*held], takes_ignored=False)
        seen: set[nn.Parameter] = set()
        for parameter in self.parameters:
            if parameter in seen or parameter in held:
                raise ValueError(f"{_NAME}: {name_of(parameter)} was given twice")
            seen.add(parameter)

    def rows(self, cost: Cost, options: Mapping[str, Any]) -> list[str]:
        """What must be the same on all ranks, in short lines.

        Raises:
            ValueError: a cost is no number >= 0.
        """
        rows = [f"{key}={_text_of(value)}" for key, value in options.items()]
        for number, group in enumerate(self.groups):
            rows += [
                f"group {number} with {key}={_text_of(value)}"
                for key, value in options_of(group).items()
            ]
            for parameter in group["params"]:
                shape, name = tuple(info_of(parameter).shape), name_of(parameter)
                own = float(cost(info_of(parameter).shape))
                if not 0.0 <= own < math.inf:
                    raise ValueError(
                        f"{_NAME}: cost of {name} with shape {shape}: expected a number >= 0, "
                        f"got {own}"
                    )
                if self.owners[id(parameter)].placement.data_parallel is not None:
                    name = "an expert's tensor"  # Ranks may have different experts.
                rows.append(f"{name} of shape {shape} and cost {own:g} in group {number}")
        return rows


def read(params: Any) -> Given:
    """Read parameters, (name, parameter) pairs, or groups of either, as torch's optimizers do.

    Raises:
        TypeError, ValueError: they are none of these.
    """
    if isinstance(params, (torch.Tensor, nn.Module)):
        raise TypeError(
            f"{_NAME}: expected an iterable of parameters or groups, got a "
            f"{type(params).__name__}; pass model.parameters()"
        )
    members = list(params)
    if not members:
        raise ValueError(f"{_NAME}: got no parameters; pass model.parameters(), or groups of them")
    is_flat = not isinstance(members[0], dict)
    groups = [_read_group(group) for group in ([{"params": members}] if is_flat else members)]
    known = owner_of_each()
    owners = {id(p): known[id(p)] for group in groups for p in group["params"] if id(p) in known}
    root = next((owner.root for owner in owners.values()), None)
    return Given(groups, owners, root, is_flat)


def _read_group(group: Any) -> Group:
    if not isinstance(group, dict) or "params" not in group:
        raise TypeError(f"{_NAME}: expected a group with 'params', got {type(group).__name__}")
    members = group["params"]
    if isinstance(members, (set, frozenset)):
        raise TypeError(f"{_NAME}: parameters in a set have another order in each run; use a list")
    listed = with_sharded(members)
    if any(isinstance(each, tuple) for each in listed):
        names, listed = [each[0] for each in listed], [each[1] for each in listed]
        return {**group, "params": listed, "param_names": names}
    return {**group, "params": listed}


def _text_of(value: Any) -> str:
    """A text that is the same on all ranks for equal values: without addresses of objects."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text_of, value))}]"
    plain = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
    return repr(value) if isinstance(value, plain) else type(value).__name__


def raise_together(root: RootState, error: Exception | None, rows: Sequence[str] = ()) -> None:
    """Raise on all ranks if any has an error, or if their rows differ.

    Collective over the ranks that share the model.

    Args:
        rows: description of this rank's arguments, in short lines.

    Raises:
        Exception: `error` on the ranks that have one; elsewhere ValueError with the first text.
        ValueError: for each rank, the first row in which it differs from the first rank.
    """
    exchange = Exchange([*root.groups, *root.tensor_parallel_groups], root.device, _NAME)
    texts = exchange.texts(None if error is None else str(error))
    if error is not None:
        raise error
    for other, each in texts.items():
        raise ValueError(f"{_NAME}: rank {other} refused its arguments: {each}")
    low, high = exchange.bounds(hash_of(rows)) if rows else (0, 0)
    if low != high:
        exchange.refuse_difference(_NAME, {"arguments": rows})
