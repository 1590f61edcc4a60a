"""Arguments that `save` and `load` share: schedulers, one or several by name, and progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


ProgressCallback = Callable[[int, int], None]
"""Called with (bytes done, total bytes) of its rank."""


class ProgressReport:
    """Counts this rank's bytes, and reports them if requested."""

    def __init__(self, callback: ProgressCallback | None, total_nbytes: int) -> None:
        self.done_nbytes = 0
        self.total_nbytes = total_nbytes
        self._callback = callback

    def __call__(self, nbytes: int) -> None:
        self.done_nbytes += nbytes
        if self._callback is not None:
            self._callback(self.done_nbytes, self.total_nbytes)


def check_progress(callback: object) -> None:
    """Raise TypeError, before a save or load begins, if it is neither None nor a callable."""
    if callback is not None and not callable(callback):
        raise TypeError(f"progress: expected a callable(done, total) or None, got {callback!r}")
