"""One process as any rank of any world: its peers' part of a collective is missing or its own.

torch's fake process group answers every collective at once, with values that mean nothing. That is
enough where order and memory are asked for, not values, and takes a tenth of the time of real
ranks.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.mirror import Wires, fake_world
from tests.harness.ranks import KeptRanks

kept = KeptRanks()
"""Of one rank, which takes the part of any other."""


class _Done:
    """Handle of a collective that the fake group cannot do."""

    def wait(self, timeout: object = None) -> None: ...

    def is_completed(self) -> bool:
        return True


def _all_to_all_single(
    output: Tensor, given: Tensor, *splits: Any, async_op: bool = False, **kwargs: Any
) -> Any:
    """torch's fake group refuses parts of unequal sizes; for these, nothing is received."""
    if splits:
        return _Done() if async_op else None
    return _plain_all_to_all_single(output, given, async_op=async_op, **kwargs)


_plain_all_to_all_single = dist.all_to_all_single


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Inside, this process is rank `rank` of the default group."""
    with (
        fake_world(rank, world_size),
        mock.patch.object(dist, "all_to_all_single", _all_to_all_single),
    ):
        yield


def run_fake_ranks(
    ranks: Sequence[int], world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> list[Any]:
    """`fn(*args)` as each of `ranks`, one after the other in one process beside this one."""
    return kept(1, _each, ranks, world_size, fn, args, timeout=timeout)[0]


def as_fake_ranks(
    ranks: Sequence[int], world_size: int, timeout: float = 60.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test whose body runs as each of `ranks`, see `run_fake_ranks`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def as_each(**arguments: Any) -> None:
            run_fake_ranks(ranks, world_size, _body, as_each, arguments, timeout=timeout)

        as_each.body = test
        return as_each

    return decorate


def _body(test: Any, arguments: dict[str, Any]) -> None:
    test.body(**arguments)


def _each(ranks: Sequence[int], world_size: int, fn: Callable[..., Any], args: Any) -> list[Any]:
    if dist.is_initialized():
        dist.destroy_process_group()
    results = []
    for rank in ranks:
        with fake_rank(rank, world_size):
            results.append(fn(*args))
    return results


def run_mirrored(
    rank: int, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> Any:
    """`fn(*args)` as `rank`, whose peers send what it does: values are of a run that repeats."""
    [found] = run_fake_ranks((rank,), world_size, _mirrored, fn, args, timeout=timeout)
    return found


def _mirrored(fn: Callable[..., Any], args: Any) -> Any:
    with Wires(torch.device("cpu")).installed():
        return fn(*args)
