"""Reads and checks the parameters that a WholeTensorOptimizer is given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from layerzero.config import parse_nbytes
from layerzero.flat.parameter_info import get_info
from layerzero.optim.claims import refuse_taken
from layerzero.optim.whole_tensor.inner import Group, options_of
from layerzero.optim.whole_tensor.members import Cost, fqn_of, shape_of
from layerzero.step.root import RootState
from layerzero.step.sharded_params import Owner, owner_of_each

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
    given = [{"params": members}] if is_flat else members
    groups = [_read_group(group) for group in given]
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
    listed: list[Any] = [members] if isinstance(members, torch.Tensor) else list(members)
    if any(isinstance(each, tuple) for each in listed):
        names, listed = [each[0] for each in listed], [each[1] for each in listed]
        return {**group, "params": listed, "param_names": names}
    return {**group, "params": listed}


def check(given: Given, held: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """
    Args:
        held: parameters that the optimizer has already.

    Raises:
        TypeError, ValueError: a parameter is none of the model's, occurs twice, or belongs to
            another optimizer; names it.
        RuntimeError: inside forward or backward.
    """
    if given.root is not None:
        given.root.check_between_steps(
            f"{_NAME}: made inside forward or backward; make it between steps"
        )
    seen = {id(parameter) for parameter in held}
    for parameter in given.parameters:
        owner = given.owners.get(id(parameter))
        if owner is None:
            raise _unknown(parameter)
        if owner.root is not given.root:
            raise ValueError(
                f"{_NAME}: {name_of(parameter)} belongs to another model than "
                f"{name_of(given.parameters[0])}: make one optimizer for each wrapped model"
            )
        if id(parameter) in seen:
            raise ValueError(f"{_NAME}: {name_of(parameter)} was given twice")
        seen.add(id(parameter))
    refuse_taken(optimizer, given.parameters)


def _unknown(parameter: object) -> Exception:
    if not isinstance(parameter, torch.Tensor):
        return TypeError(f"{_NAME}: expected parameters, got {type(parameter).__name__}")
    if get_info(parameter) is not None:
        return ValueError(
            f"{_NAME}: the model of {name_of(parameter)} was deleted, or wrapped again; pass the "
            "parameters of the model that is trained"
        )
    return ValueError(
        f"{_NAME}: a parameter of shape {tuple(parameter.shape)} belongs to no ZeRO3 module: it "
        "was taken before wrapping, is ignored (ignored_modules, ignored_parameters), or is full "
        "(summon_full_params). Pass parameters of the wrapped model, and others to another "
        "optimizer"
    )


def nbytes_of(bucket_bytes: int | str) -> int:
    """
    Raises:
        ValueError: no number of bytes, or not a positive one.
    """
    return parse_nbytes(bucket_bytes, f"{_NAME}: bucket_bytes")


def rows_of(given: Given, cost: Cost, options: Mapping[str, Any]) -> list[str]:
    """What must be the same on all ranks, in short lines.

    Raises:
        ValueError: a cost is no number >= 0.
    """
    rows = [f"{key}={_text_of(value)}" for key, value in options.items()]
    for number, group in enumerate(given.groups):
        rows += [
            f"group {number} with {key}={_text_of(value)}"
            for key, value in options_of(group).items()
        ]
        for parameter in group["params"]:
            shape, fqn = shape_of(parameter), fqn_of(parameter)
            own = float(cost(shape))
            if not 0.0 <= own < math.inf:
                raise ValueError(
                    f"{_NAME}: cost of {fqn} with shape {tuple(shape)}: expected a number >= 0, "
                    f"got {own}"
                )
            if given.owners[id(parameter)].placement.data_parallel is not None:
                fqn = "an expert's tensor"  # Ranks may have different experts.
            rows.append(f"{fqn} of shape {tuple(shape)} and cost {own:g} in group {number}")
    return rows


def _text_of(value: Any) -> str:
    """A text that is the same on all ranks for equal values: without addresses of objects."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text_of, value))}]"
    plain = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
    return repr(value) if isinstance(value, plain) else type(value).__name__


def name_of(parameter: torch.Tensor) -> str:
    info = get_info(parameter)
    return f"a parameter of shape {tuple(parameter.shape)}" if info is None else info.fqn
