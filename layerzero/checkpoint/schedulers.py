"""Schedulers that a checkpoint saves: one, or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """A learning-rate scheduler, or another object with these two methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def check_schedulers(
    scheduler: Stateful | Mapping[str, Stateful] | None, verb: str
) -> dict[str, Stateful] | None:
    """The schedulers of an argument: one, whose name is "", or several by name; None for None.

    Raises:
        TypeError: it is something else.
    """
    if scheduler is None:
        return None
    named: Mapping[Any, Any] = scheduler if isinstance(scheduler, Mapping) else {"": scheduler}
    for name, each in named.items():
        if not isinstance(name, str):
            raise TypeError(f"{verb}: scheduler: expected strings as names, got {name!r}")
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise TypeError(
                f"{verb}: scheduler{f' {name!r}' if name else ''}: expected an object with "
                f"state_dict and load_state_dict, got {type(each).__name__}"
            )
    return dict(named)
