"""A CPU backend whose messages carry no name: gloo's own collectives under another name.

The engine treats it as it treats NCCL: the backend's verbs, matched by order alone, and a watchdog.
"""

from datetime import timedelta

import torch.distributed as dist

PLAIN = "plain"


def _create(options: object, _: object) -> dist.Backend:
    return dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, options.timeout
    )


def make_plain_group(timeout: timedelta) -> dist.ProcessGroup:
    """All ranks as a group with the backend "plain". Collective."""
    if PLAIN.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(PLAIN, _create, extended_api=True, devices=["cpu"])
    return dist.new_group(None, timeout, PLAIN)
