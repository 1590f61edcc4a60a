"""Makes process groups; only their members take part.

Note [No split of the default group]
    A default group that is bound to a device (`init_process_group(device_id=)`) makes torch split
    each new NCCL communicator off its own. A split is collective over *all* ranks of the default
    group, but ranks outside the new group never call it (`use_local_synchronization`), so the
    members would hang. The binding is therefore taken away meanwhile: the members then connect
    among themselves, at their first collective.

Note [Names of groups that only some ranks make]
    torch derives the name of a group that only its members create (`use_local_synchronization`)
    from its ranks and from a number: of the groups that the creating process has, or, from torch
    2.14 on, of the groups that it has created. After a group was made on some ranks only, as for
    the first and last stage of a pipeline, these numbers differ: ranks would wait for each other
    under different names until the timeout. So ranks agree on the number first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from layerzero.comm.exchanges import gather_along
from layerzero.comm.pending import Operation
from layerzero.flat.groups import DEFAULT_TIMEOUT, options_of
from layerzero.flat.placement import ShardGroup
from layerzero.watch.diagnosis import diagnose


def new_group(
    ranks: Sequence[int], backend: str, timeout: timedelta, options: Any = None
) -> dist.ProcessGroup:
    """Make a group of `ranks` (global), this rank among them. Collective over `ranks` alone.

    Args:
        backend: a name such as "nccl", or pairs such as "cpu:gloo,cuda:nccl".
        options: options of the backend (`options_like`).

    Raises:
        CollectiveError: a rank is dead, or did not take part within the timeout.
    """
    if options is not None:
        options._timeout = timeout  # Torch warns where the two differ.
    is_world = len(ranks) == dist.get_world_size()
    # A thread without a current device can make one of gloo alone.
    is_gloo = all(part.rpartition(":")[2] == "gloo" for part in backend.split(","))

    def make() -> object:
        return dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
        )

    with nullcontext() if is_world else _unbound():
        try:
            group = _within(timeout, make) if is_gloo else make()
        except (RuntimeError, TimeoutError) as error:
            # Another rank or the store failed; else the caller did something wrong.
            is_of_others = isinstance(error, (TimeoutError, dist.DistError))
            if len(ranks) == 1 or not (is_of_others or "gloo" in str(error).lower()):
                raise
            world, together = dist.group.WORLD, tuple(sorted(ranks))  # As torch numbers them.
            assert world is not None, "ZeRO3 needs torch.distributed"
            kind = "gloo" if is_gloo else backend
            members = ShardGroup(world, together.index(dist.get_rank()), together, kind, timeout)
            what = f"creation of a process group of {len(together)} ranks"
            raise diagnose(what, members, -1, error) from error
    assert isinstance(group, dist.ProcessGroup), "this rank is one of them"
    return group


def _within(limit: timedelta, make: Callable[[], object]) -> object:
    """Return `make()`. Torch's timeouts do not bound its calls of a store that never answers.

    Raises:
        TimeoutError: it took longer; its thread is left behind.
    """
    made: Future[object] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    thread = threading.Thread(target=run, name="layerzero-new-group", daemon=True)
    thread.start()
    thread.join(limit.total_seconds())
    if not made.done():
        raise TimeoutError("timed out")
    return made.result()


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
"""Fields of a backend's options that define how to communicate, and not which group it is."""


def options_like(process_group: dist.ProcessGroup, device: torch.device) -> Any:
    """Options for a group that is to communicate as `process_group` does; None: it has none.

    A new object each time: a backend writes the name, ranks and timeout of its group into it.
    """
    given = options_of(process_group, device)
    chosen = {name: getattr(given, name) for name in _USERS_CHOICES if hasattr(given, name)}
    if not chosen:
        return None
    options = type(given)()
    for name, value in chosen.items():
        setattr(options, name, value)
    return options


def agree_on_group_names(
    groups: Sequence[ShardGroup], device: torch.device, what: str = "the number of process groups"
) -> None:
    """Give the next group that ranks create the same name on all of them.

    Collective over `groups`, in order. A rank whose number is below another's creates
    single-rank groups until the numbers match.

    Args:
        groups: groups that together connect all ranks: of a grid of ranks, one along each axis.
        device: a device that all their backends serve.
        what: what the groups are for, which the error names if a rank does not take part.

    Raises:
        CollectiveError: a rank did not take part within the timeout.
    """
    own = torch.tensor([_number_in_names()], device=device)
    highest = gather_along(own, groups, lambda _: Operation("exchange", what, 0)).max()
    for _ in range(int(highest) - _number_in_names()):
        new_group([dist.get_rank()], "gloo", DEFAULT_TIMEOUT)  # Counts only.


def _number_in_names() -> int:
    """The number that torch puts into the next name; there is no public way to read it."""
    c10d = dist.distributed_c10d
    counts_created = "group_count" in c10d._hash_ranks_to_str.__code__.co_names
    return c10d._world.group_count if counts_created else len(c10d._world.pg_names)
