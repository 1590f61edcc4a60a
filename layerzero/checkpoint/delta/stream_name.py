"""A name for a DeltaStream on which ranks agree without waiting for each other."""

from __future__ import annotations

import itertools
import secrets

import torch.distributed as dist

_numbers = itertools.count()
"""Numbers the streams of this process."""


def agreed_name() -> str:
    """The same random name on all ranks whose n-th call this is. Not collective.

    The first rank that calls stores its name, and the others find it there. Where the default
    group's store cannot do that, every rank has a name of its own.
    """
    number, own = next(_numbers), secrets.token_hex(6)
    if not dist.is_initialized():
        return own
    try:
        store = dist.distributed_c10d._get_default_store()
        return bytes(store.compare_set(f"layerzero/delta/{number}", "", own)).decode()
    except (RuntimeError, NotImplementedError):
        return own
