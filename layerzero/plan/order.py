"""Predicts the execution order of units, and prefetch lists, from names alone. No torch.

A *step* is a set of units that are unsharded together, such as those of one layer. In a series of
layers, each layer is a step: the layer's own unit, the units inside it (attention, experts) and
those whose hook module is inside it. A unit around a whole series, such as an encoder, is a step of
its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Place:
    """What the order needs to know of one unit below the root."""

    fqn: str
    pattern: int
    """Index of the first pattern that names it; the number of patterns if none does."""
    is_member: bool
    """Whether that pattern names members of a series, such as layers."""
    gathered_with: str
    """FQN of the module whose forward unshards it: the unit's own module or its hook module."""


class Step(NamedTuple):
    """Units that are unsharded together; the others run inside the calls of the head."""

    head: str
    others: tuple[str, ...]
    is_around_steps: bool
    """Whether the head contains a whole series, and so is alone in its step."""


def order_steps(places: Sequence[Place]) -> list[Step]:
    """Steps in their expected execution order.

    Siblings in the module tree are ordered by the earliest pattern that names a unit in them; ties
    keep the order of `places`.

    Args:
        places: units that have parameters, without the root, in the order of the module tree.
    """
    places = _sorted(places)
    around_steps = {place.fqn for place in places if _is_around_steps(place, places)}
    members: dict[str, list[str]] = {}
    for place in places:
        head = _head(place.gathered_with, places, around_steps) or place.fqn
        if place.fqn in around_steps:
            head = place.fqn
        members.setdefault(head, []).append(place.fqn)
    return [
        Step(head, tuple(fqn for fqn in fqns if fqn != head), head in around_steps)
        for head, fqns in members.items()
    ]


def _sorted(places: Sequence[Place]) -> list[Place]:
    """Depth first, siblings in the order of their earliest patterns."""
    earliest: dict[tuple[str, ...], int] = {}
    appearance: dict[tuple[str, ...], int] = {}
    for index, place in enumerate(places):
        for prefix in _prefixes(place.fqn):
            earliest[prefix] = min(earliest.get(prefix, place.pattern), place.pattern)
            appearance.setdefault(prefix, index)

    def key(place: Place) -> list[tuple[int, int]]:
        return [(earliest[prefix], appearance[prefix]) for prefix in _prefixes(place.fqn)]

    return sorted(places, key=key)


def _prefixes(fqn: str) -> Iterator[tuple[str, ...]]:
    parts = tuple(fqn.split("."))
    for length in range(1, len(parts) + 1):
        yield parts[:length]


def _is_around_steps(place: Place, places: Sequence[Place]) -> bool:
    """Whether a unit contains a series that it is not a member of."""
    inside = [other for other in places if other.fqn.startswith(f"{place.fqn}.")]
    if any(other.pattern == place.pattern for other in inside):
        return True
    return not place.is_member and any(other.is_member for other in inside)


def _head(module: str, places: Sequence[Place], around_steps: set[str]) -> str | None:
    """The outermost unit that contains (or is) a module and is not around a whole series."""
    around = (p.fqn for p in places if module == p.fqn or module.startswith(f"{p.fqn}."))
    return min((fqn for fqn in around if fqn not in around_steps), key=len, default=None)


Lists = Mapping[str, tuple[str, ...]]
"""Units to prefetch when the forward or backward of the key begins (BACKWARD_POST: ends).

The key "" is the root.
"""


def forward_lists(steps: Sequence[Step], num_ahead: int) -> Lists:
    """For the root and the head of each step: the rest of its step, and the next `num_ahead` steps.

    Empty if `num_ahead` is 0.
    """
    return _lists([(step.head, *step.others) for step in steps], num_ahead)


def backward_lists(steps: Sequence[Step], num_ahead: int, when_done: bool) -> Lists:
    """The same for backward: siblings in reverse order, each unit before those inside it.

    A unit comes before those inside it because the gradient of its output arrives first.

    Args:
        when_done: True for BACKWARD_POST: prefetch when the backward of a step ends instead of
            when it begins. A unit around a series ends only with the series, so no prefetch waits
            for its end: it is unsharded with the first step inside it.
    """
    by_head = {step.head: step for step in steps}
    back = [by_head[head] for head in _inner_last(list(by_head))]
    if not when_done:
        return _lists([(step.head, *_inner_last(step.others)) for step in back], num_ahead)
    groups: list[tuple[str, ...]] = []
    around: tuple[str, ...] = ()
    for step in back:
        around += (step.head, *_inner_last(step.others))
        if not step.is_around_steps:
            groups.append(around)
            around = ()
    heads = [step.head for step in back if not step.is_around_steps]
    lists = {
        head: tuple(fqn for group in groups[index + 1 : index + 1 + num_ahead] for fqn in group)
        for index, head in enumerate(heads)
    }
    return {head: names for head, names in lists.items() if names}


def _inner_last(fqns: Sequence[str]) -> list[str]:
    """Names in depth-first order with siblings reversed, each before those inside it."""
    outermost: list[int] = []
    before: set[str] = set()
    for index, fqn in enumerate(fqns):
        if not any(".".join(prefix) in before for prefix in list(_prefixes(fqn))[:-1]):
            outermost.append(index)
        before.add(fqn)
    turned: list[str] = []
    end = len(fqns)
    for index in reversed(outermost):
        turned += [fqns[index], *_inner_last(fqns[index + 1 : end])]
        end = index
    return turned


def _lists(steps: Sequence[tuple[str, ...]], num_ahead: int) -> Lists:
    lists: dict[str, tuple[str, ...]] = {}
    steps = [("",), *steps]
    for index, (head, *others) in enumerate(steps if num_ahead else ()):
        ahead = steps[index + 1 : index + 1 + num_ahead]
        if names := (*others, *(fqn for step in ahead for fqn in step)):
            lists[head] = names
    return lists
