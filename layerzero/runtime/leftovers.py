"""Models that keep something of a step that did not end, until an optimizer begins the next one.

Either sums of micro-batches from before a pass that failed, or that the step is to be skipped.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet


class HasLeftovers(Protocol):
    """The root of a model."""

    def drop_leftovers(self) -> None:
        """The next step begins."""


_roots: WeakSet[HasLeftovers] = WeakSet()


def note(root: HasLeftovers) -> None:
    _roots.add(root)


def have() -> list[HasLeftovers]:
    """The models; usually none, which costs a test of an empty set."""
    return [*_roots] if _roots else []


def drop(root: HasLeftovers) -> None:
    """The next step begins."""
    root.drop_leftovers()
    _roots.discard(root)
