"""Names of the runs that this process takes part in, and torch's store, where notes are left."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist

_runs: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def remember_run(group: dist.ProcessGroup, run: str) -> None:
    """The ranks of a group agreed on a name (model_numbers.py)."""
    _runs[group] = run


def known_runs() -> set[str]:
    """Of all groups that are still there."""
    return set(_runs.values())


def own_connection() -> dist.Store:
    """The default group's store, so that what a thread asks does not hold up the main one.

    Raises:
        RuntimeError, ValueError: there is none.
    """
    store = dist.distributed_c10d._get_default_store()
    return store.clone()  # type: ignore[attr-defined]
