"""The user's optimizer over whole tensors: what it is given, and compared with other ranks; how it
is made, loaded and stepped. A group of which this rank owns nothing holds a stand-in without a
gradient, which every optimizer skips: all ranks have the same groups, and step them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from layerzero.build.compare import Exchange, hash_of
from layerzero.flat.parameter_info import info_of
from layerzero.optim.attach import with_sharded
from layerzero.optim.sharded_params import Owner, check_parameters, name_of, owner_of_each
from layerzero.optim.whole_tensor.owners import Cost
from layerzero.step.root import RootState

_NAME = "WholeTensorOptimizer"
Group = dict[str, Any]
_NOT_OPTIONS = ("params", "param_names")


def options_of(group: Mapping[str, Any]) -> Group:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def stand_in_for(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of one element, with as many dimensions as the whole tensor."""
    ones = (1,) * info_of(parameter).ndim
    return nn.Parameter(parameter.detach().new_zeros(ones), requires_grad=parameter.requires_grad)


class Given(NamedTuple):
    """Parameter groups, and the owner of each parameter, by its id."""

    groups: list[Group]
    owners: dict[int, Owner]
    root: RootState | None
    """The model of the first parameter that belongs to one."""
    is_flat: bool
    """Whether parameters were given without groups."""

    def check(self, held: Collection[nn.Parameter]) -> None:
        """`held`: parameters that the optimizer has already."""
        if self.root is not None:
            self.root.check_between_steps(
                f"{_NAME}: made inside forward or backward; make it between steps"
            )
        parameters = [parameter for group in self.groups for parameter in group["params"]]
        check_parameters(_NAME, parameters, [*held], takes_ignored=False)
        seen: set[nn.Parameter] = set()
        for parameter in parameters:
            if parameter in seen or parameter in held:
                raise ValueError(f"{_NAME}: {name_of(parameter)} was given twice")
            seen.add(parameter)

    def rows(self, cost: Cost, options: Mapping[str, Any]) -> list[str]:
        """What must be the same on all ranks, in short lines."""
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
    """Read parameters, (name, parameter) pairs, or groups of either, as torch's optimizers do."""
    if isinstance(params, (torch.Tensor, nn.Module)):
        raise TypeError(f"{_NAME}: expected parameters or groups, got a {type(params).__name__}")
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
    """Raise on all ranks if any has an error, or if their rows differ: lines about their arguments.
    Collective over the ranks that share the model."""
    exchange = Exchange([*root.groups, *root.tensor_parallel_groups], root.device, _NAME)
    texts = exchange.texts(None if error is None else str(error))
    if error is not None:
        raise error
    for other, each in texts.items():
        raise ValueError(f"{_NAME}: rank {other} refused its arguments: {each}")
    low, high = exchange.bounds(hash_of(rows)) if rows else (0, 0)
    if low != high:
        exchange.refuse_difference(_NAME, {"arguments": rows})


class Factory(NamedTuple):
    """How to make the user's optimizer."""

    cls: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    is_flat: bool
    """Pass the parameters of the only group as a list, which is all that some classes take."""

    def check(self, refused: tuple[type, ...]) -> None:
        """`refused`: classes that need more than the gradients of one tensor."""
        cls: Any = self.cls
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise TypeError(
                f"{_NAME}: expected a class derived from torch.optim.Optimizer, got {cls!r}"
            )
        closure = inspect.signature(cls.step).parameters.get("closure")
        needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        if needs_closure or issubclass(cls, refused):
            raise TypeError(
                f"{_NAME}: {cls.__name__} needs a closure that it calls during its step, or the "
                "gradients of all parameters together; use a class that treats each by itself"
            )

    def make(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        given = [{**options_of(group), "params": list(group["params"])} for group in groups]
        made = self.cls(given[0]["params"] if self.is_flat else given, **self.options)
        own = [[id(p) for p in group["params"]] for group in made.param_groups]
        if own != [[id(p) for p in group["params"]] for group in groups]:
            raise TypeError(f"{_NAME}: {self.cls.__name__} makes parameter groups of its own")
        return made


def load(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    tensors: Sequence[nn.Parameter | None],
) -> None:
    """Load whole states, and options of the groups. `state_dict`: as of a torch optimizer over
    `tensors`; None: not on this rank."""
    numbers = {id(p): number for number, p in enumerate(tensors) if p is not None}
    states: dict[int, Any] = {}
    groups: list[Group] = []
    end = 0
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        start, end = end, end + len(group["params"])
        for place, parameter in enumerate(group["params"], start):
            number = numbers.get(id(parameter))
            if number in state_dict["state"]:
                states[place] = state_dict["state"][number]
        groups.append({**options_of(saved), "params": [*range(start, end)]})
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def step(optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> Exception | None:
    """Step with the options of `groups`, and drop the gradients. Returns the error of the step: the
    values of the other ranks have to travel first."""
    for own, given in zip(optimizer.param_groups, groups, strict=True):
        own.update(options_of(given))
    try:
        optimizer.step()
    except Exception as error:
        return error
    finally:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.grad = None
    return None
