"""The user's optimizer over whole tensors: how it is made, and how it steps bucket by bucket.

Note [Several calls make one step]
    The optimizer's `step` is called once for each bucket, with the tensors of that bucket alone in
    its groups. Some classes count steps in a group or in an attribute; so before each call but the
    first, both get the values from before the first. A group without tensors in a call holds a
    stand-in without a gradient, which every optimizer skips.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from layerzero.optim.flat_optimizer import FlatOptimizer
from layerzero.optim.whole_tensor.members import fqn_of, shape_of

Group = dict[str, Any]
_NOT_OPTIONS = ("params", "param_names")
_PLAIN = (type(None), bool, int, float, complex, str)


def options_of(group: Mapping[str, Any]) -> Group:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def check_class(optimizer_class: Any, refused: Iterable[type]) -> None:
    """
    Args:
        refused: classes that need more than the gradients of one tensor.

    Raises:
        TypeError: it is no optimizer class, or its `step` needs a closure.
    """
    if isinstance(optimizer_class, torch.optim.Optimizer):
        raise TypeError(
            f"WholeTensorOptimizer: expected an optimizer class, got an instance of "
            f"{type(optimizer_class).__name__}; pass the class, and its options by keyword"
        )
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise TypeError(
            "WholeTensorOptimizer: expected a class derived from torch.optim.Optimizer, got "
            f"{optimizer_class!r}"
        )
    if issubclass(optimizer_class, FlatOptimizer):
        raise TypeError(
            f"WholeTensorOptimizer: layerzero.optim.{optimizer_class.__name__} works on shards; "
            "pass model.parameters() to it directly"
        )
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    if needs_closure or issubclass(optimizer_class, tuple(refused)):
        raise TypeError(
            f"WholeTensorOptimizer: {optimizer_class.__name__} needs a closure that it calls "
            "during its step, or the gradients of all parameters together; an owner has those of "
            "its own tensors. Use a class that treats each tensor by itself"
        )


def construct(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Group],
    options: Mapping[str, Any],
    is_flat: bool,
) -> torch.optim.Optimizer:
    """
    Args:
        is_flat: pass the parameters of the only group as a list, which is all that some classes
            take.

    Raises:
        TypeError: the class has rearranged the groups.
        Exception: whatever the class raises.
    """
    given = [{**options_of(group), "params": list(group["params"])} for group in groups]
    made = optimizer_class(given[0]["params"] if is_flat else given, **options)
    own = [[id(p) for p in group["params"]] for group in made.param_groups]
    if own != [[id(p) for p in group["params"]] for group in groups]:
        raise TypeError(
            f"WholeTensorOptimizer: {optimizer_class.__name__} makes parameter groups of its own; "
            "make one WholeTensorOptimizer for each of its groups"
        )
    return made


def make_prototype(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Group],
    options: Mapping[str, Any],
    is_flat: bool,
) -> torch.optim.Optimizer:
    """The optimizer over tensors without memory: for its checks, defaults and options.

    Raises:
        ValueError: the class refuses a parameter; names it.
        Exception: whatever else the class raises.
    """

    def make(
        chosen: Sequence[Group], like: Callable[[nn.Parameter], nn.Parameter]
    ) -> torch.optim.Optimizer:
        replaced = [{**group, "params": [like(p) for p in group["params"]]} for group in chosen]
        return construct(optimizer_class, replaced, options, is_flat)

    try:
        return make(groups, _on_meta)
    except Exception as error:
        # Options such as `fused` may be refused for the device without memory alone.
        made = _made(functools.partial(make, groups, stand_in_for))
        if made is not None:
            return made
        members = [(group, parameter) for group in groups for parameter in group["params"]]
        refused = [
            fqn_of(parameter)
            for group, parameter in members
            if _made(functools.partial(make, [{**group, "params": [parameter]}], _on_meta)) is None
        ]
        if not refused or len(refused) == len(members) > 1:
            raise
        shown = ", ".join(refused[:4]) + (f" and {len(refused) - 4} more" if refused[4:] else "")
        raise ValueError(
            f"WholeTensorOptimizer: {optimizer_class.__name__} refuses {shown}: {error}; give "
            "these parameters to another optimizer"
        ) from error


def stand_in_for(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of one element, with as many dimensions as the whole tensor."""
    ones = (1,) * len(shape_of(parameter))
    return nn.Parameter(parameter.detach().new_zeros(ones), requires_grad=parameter.requires_grad)


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    whole = torch.empty(shape_of(parameter), dtype=parameter.dtype, device="meta")
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _made(make: Callable[[], torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    try:
        return make()
    except Exception:
        return None


class Inner:
    """The user's optimizer over the whole tensors that this rank owns."""

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Sequence[Group],
        stand_ins: Sequence[nn.Parameter],
        options: Mapping[str, Any],
        is_flat: bool = False,
    ) -> None:
        """
        Args:
            groups: with whole tensors in "params"; may be empty lists.
            stand_ins: one for each group.
            is_flat: as for `construct`.
        """
        self._stand_ins = list(stand_ins)
        given = [
            {**group, "params": group["params"] or [stand_in]}
            for group, stand_in in zip(groups, stand_ins, strict=True)
        ]
        self.optimizer = construct(optimizer_class, given, options, is_flat)

    def add_group(self, group: Group, stand_in: nn.Parameter) -> None:
        self.optimizer.add_param_group(
            {**options_of(group), "params": group["params"] or [stand_in]}
        )
        self._stand_ins.append(stand_in)

    def keep_groups(self, number: int) -> None:
        """Drop groups after the first `number`, which another rank could not add."""
        del self._stand_ins[number:]
        del self.optimizer.param_groups[number:]

    def load(self, state_dict: Mapping[str, Any], tensors: Sequence[nn.Parameter | None]) -> None:
        """Load whole states, and options of the groups.

        Args:
            state_dict: as of a torch optimizer over `tensors`; None: not on this rank.
        """
        numbers = {id(p): number for number, p in enumerate(tensors) if p is not None}
        places: dict[int, Any] = {}
        groups: list[Group] = []
        own = self.optimizer.param_groups
        for group, saved in zip(own, state_dict["param_groups"], strict=True):
            start = len(places)
            for place, parameter in enumerate(group["params"], start):
                places[place] = numbers.get(id(parameter))
            groups.append({**options_of(saved), "params": [*range(start, len(places))]})
        given = state_dict["state"]
        states = {
            place: given[number]
            for place, number in places.items()
            if number is not None and number in given
        }
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})

    def begin_step(self, groups: Sequence[Group]) -> Step:
        """Give each group the options of `groups`, and begin the calls of one step."""
        for own, given in zip(self.optimizer.param_groups, groups, strict=True):
            own.update(options_of(given))
        return Step(self.optimizer, self._stand_ins)


class Step:
    """The calls of one step; see Note [Several calls make one step]."""

    def __init__(self, optimizer: torch.optim.Optimizer, stand_ins: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._stand_ins = stand_ins
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._options = [options_of(group) for group in optimizer.param_groups]
        self._attributes = _plain_attributes(optimizer)
        self._was_called = False
        self._error: Exception | None = None

    def call(self, tensors: Iterable[nn.Parameter]) -> None:
        """Step these tensors; their gradients are set, and dropped here. Keeps an error."""
        wanted = list(tensors)
        if wanted and self._error is None:
            self._call({id(tensor) for tensor in wanted})
        for tensor in wanted:
            tensor.grad = None

    def end(self) -> None:
        """Call once with stand-ins if there was no call, so that counters of groups stay equal.

        Raises:
            Exception: the first that a call raised.
        """
        if self._error is None and not self._was_called:
            self._call(set())
        if self._error is not None:
            raise self._error

    def _call(self, wanted: set[int]) -> None:
        groups = self._optimizer.param_groups
        if self._was_called:
            for group, options in zip(groups, self._options, strict=True):
                group.update(options)
            vars(self._optimizer).update(self._attributes)
        self._was_called = True
        for group, members, stand_in in zip(groups, self._groups, self._stand_ins, strict=True):
            group["params"] = [p for p in members if id(p) in wanted] or [stand_in]
        try:
            self._optimizer.step()
        except Exception as error:
            self._error = error
        finally:
            for group, members in zip(groups, self._groups, strict=True):
                group["params"] = members


def _plain_attributes(optimizer: torch.optim.Optimizer) -> Group:
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, _PLAIN)}
