"""A CPU backend whose messages carry no name: gloo's own collectives under another name.

The engine treats it as it treats NCCL: the backend's verbs, matched by order alone, and a watchdog.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

PLAIN = "plain"


def _create(options: object, _: object) -> dist.Backend:
    return dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, options.timeout
    )


def make_plain_group(
    timeout: timedelta, parts: Sequence[Sequence[int]] | None = None
) -> dist.ProcessGroup:
    """All ranks, or this rank's one of `parts`, as a group with the backend "plain". Collective."""
    if PLAIN.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(PLAIN, _create, extended_api=True, devices=["cpu"])
    groups = [dist.new_group(ranks, timeout, PLAIN) for ranks in parts or [None]]
    return next(group for group in groups if isinstance(group, dist.ProcessGroup))
