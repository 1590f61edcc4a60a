"""Makes process groups of which only the members take part in the making.

Note [No split of the default group]
    A default group that is bound to a device (`init_process_group(device_id=)`) makes torch split
    each new NCCL communicator off its own. A split is collective over *all* ranks of the default
    group, but ranks outside the new group never call it (`use_local_synchronization`), so the
    members would hang. The binding is therefore taken away meanwhile: the members then connect
    among themselves, at their first collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def new_group(
    ranks: Sequence[int],
    backend: str,
    timeout: timedelta | None = None,
    options: Any = None,
    description: str | None = None,
) -> dist.ProcessGroup:
    """Make a group of `ranks` (global), this rank among them. Collective over `ranks` alone.

    Args:
        backend: a name such as "nccl", or pairs such as "cpu:gloo,cuda:nccl".
        timeout: None: the default of torch, or of the options.
        options: options of the backend (`options_like`).
        description: what the group is for, in torch's logs.
    """
    if options is not None:
        # Torch warns where the two differ.
        timeout = options._timeout if timeout is None else timeout
        options._timeout = timeout
    is_world = len(ranks) == dist.get_world_size()
    with nullcontext() if is_world else _unbound():
        group = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=description,
        )
    assert isinstance(group, dist.ProcessGroup), "this rank is one of them"
    return group


@contextmanager
def _unbound() -> Iterator[None]:
    """See Note [No split of the default group]."""
    world = dist.group.WORLD
    assert world is not None, "ZeRO3 needs torch.distributed"
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


_USERS_CHOICES = ("is_high_priority_stream", "config", "hccl_config")
"""Fields of a backend's options that say how to communicate, and not which group it is."""


def options_like(process_group: dist.ProcessGroup, device: torch.device) -> Any:
    """Options for a group that is to communicate as `process_group` does; None: it has none.

    A new object each time: a backend writes the name, ranks and timeout of its group into it.
    """
    given = _options_of(process_group, device)
    chosen = {name: getattr(given, name) for name in _USERS_CHOICES if hasattr(given, name)}
    if not chosen:
        return None
    options = type(given)()
    for name, value in chosen.items():
        setattr(options, name, value)
    return options


def _options_of(process_group: dist.ProcessGroup, device: torch.device) -> Any:
    try:
        return getattr(process_group._get_backend(device), "options", None)
    except RuntimeError:
        return None  # No backend of the group serves the device.
