"""Schedulers that a checkpoint saves: one, or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """A learning-rate scheduler, or another object with these two methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def check_schedulers(scheduler: Stateful | Mapping[str, Stateful] | None, verb: str) -> Any:
    """The argument as one object with `state_dict` and `load_state_dict`; None stays None.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(scheduler, Mapping):
        for name, each in scheduler.items():
            if not isinstance(name, str):
                raise TypeError(f"{verb}: scheduler: expected strings as names, got {name!r}")
            _check(each, f"{verb}: scheduler {name!r}")
        return _Several(dict(scheduler))
    if scheduler is not None:
        _check(scheduler, f"{verb}: scheduler")
    return scheduler


def names_of(scheduler: Stateful | None) -> list[str] | None:
    """Names of several schedulers, sorted; None for a single one."""
    return sorted(scheduler.schedulers) if isinstance(scheduler, _Several) else None


class _Several:
    def __init__(self, schedulers: dict[str, Stateful]) -> None:
        self.schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self.schedulers.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, state in state_dict.items():
            self.schedulers[name].load_state_dict(state)


def _check(scheduler: Any, what: str) -> None:
    if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise TypeError(
            f"{what}: expected an object with state_dict and load_state_dict, got "
            f"{type(scheduler).__name__}"
        )
