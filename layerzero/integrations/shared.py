"""What several adapters do: an action of one rank, and one or several objects for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist


def on_first_rank(action: Callable[[], Any], what: str) -> Any:
    """Run `action` on rank 0; all ranks return its result. Collective over all ranks.

    Args:
        what: begins the message of an error.

    Raises:
        RuntimeError: on all ranks: `action` raised an error, of any class.
    """
    outcome: list[Any] = [None, None]
    error = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as caught:
            error = caught
            name = "" if isinstance(caught, RuntimeError) else f"{type(caught).__name__}: "
            outcome[1] = f"{what}: {name}{caught}"
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise RuntimeError(outcome[1]) from error
    return outcome[0]


def by_number(objects: Sequence[Any]) -> Any:
    """One object; several by their numbers, as `layerzero.checkpoint` takes them; None for none."""
    if len(objects) < 2:
        return next(iter(objects), None)
    return {str(number): each for number, each in enumerate(objects)}
