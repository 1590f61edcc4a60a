"""Names of this process's runs, one per process group, and its connection to torch's store."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist

_runs: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def remember_run(group: dist.ProcessGroup, run: str) -> None:
    """Record the run name that the ranks of `group` agreed on (model_numbers.py)."""
    _runs[group] = run


def live_runs() -> set[str]:
    """Run names of all groups that still exist."""
    return set(_runs.values())


def own_connection() -> dist.Store:
    """A new connection to the default group's store, so that a thread's request does not hold up
    the main thread's.

    Raises:
        RuntimeError, ValueError: there is no default group, or its store cannot be cloned.
    """
    store = dist.distributed_c10d._get_default_store()
    return store.clone()  # type: ignore[attr-defined]
