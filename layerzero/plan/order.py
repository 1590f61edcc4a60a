"""In which order units are expected to run, and what to gather ahead: from names alone, no torch.

A *step* is what is gathered together: the units of one layer, say. Within a series of layers the
layer is the step, with the units inside it (attention, experts) and those that are gathered by the
forward of a module in it. A unit around a whole series, such as an encoder, is a step of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Place:
    """One unit below the root, as far as the order is concerned."""

    fqn: str
    pattern: int
    """Index of the first pattern that names it; where none does, larger than any other."""
    is_member: bool
    """Whether that pattern names members of a series."""
    gathered_with: str
    """Name of the module whose forward gathers it: its own, or its hook module's."""


class Step(NamedTuple):
    """Units that are gathered together; the calls of the head are around those of the others."""

    head: str
    others: tuple[str, ...]
    is_around_steps: bool
    """Whether the head is around a whole series, and hence alone."""


def order_steps(places: Sequence[Place]) -> list[Step]:
    """Steps in the order they are expected to run in.

    Of the modules directly inside one module, those with units of earlier patterns come first;
    among equals the order of `places` stays, which is that of the module tree.

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
    """Depth first; below each module, parts in the order of their first patterns."""
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
    """Whether a series is inside it that it is no member of."""
    inside = [other for other in places if other.fqn.startswith(f"{place.fqn}.")]
    if any(other.pattern == place.pattern for other in inside):
        return True
    return not place.is_member and any(other.is_member for other in inside)


def _head(module: str, places: Sequence[Place], around_steps: set[str]) -> str | None:
    """The outermost unit around (or at) a module, apart from those around whole series."""
    around = (p.fqn for p in places if module == p.fqn or module.startswith(f"{p.fqn}."))
    return min((fqn for fqn in around if fqn not in around_steps), key=len, default=None)


Lists = Mapping[str, tuple[str, ...]]
"""What is gathered when a unit begins; the root is ""."""


def forward_lists(steps: Sequence[Step], num_ahead: int) -> Lists:
    """For the root and the head of each step: the rest of its step, and the next `num_ahead`."""
    return _lists([(step.head, *step.others) for step in steps], num_ahead)


def backward_lists(steps: Sequence[Step], num_ahead: int, when_done: bool) -> Lists:
    """The same for backward: siblings in reverse order, and a unit before those inside it, because
    the gradient of its output arrives first.

    Args:
        when_done: True for BACKWARD_POST: prefetch when the backward of a step ends instead of
            when it begins. A unit around others ends with them, so no prefetch waits for its end:
            it is gathered with the first step inside it.
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
    """Names in depth-first order with siblings turned around, each before those inside it."""
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
