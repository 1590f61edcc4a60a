"""Peaks of real training steps: all storages of one rank, those of its threads included."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from layerzero import ZeRO3
from layerzero.memory_budget.storages import CountingMode, StorageCount
from tests.harness.internals import root_state, threads
from tests.harness.models import tensors_of

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "fused adamw": partial(torch.optim.AdamW, fused=True),
    "sgd": torch.optim.SGD,
}


class Measured(NamedTuple):
    resting: int
    peak: int


def measure(
    make: Callable[[], nn.Module],
    batch: tuple[tuple[Any, ...], dict[str, Any]],
    optimizer: str,
    arguments: dict[str, Any],
    steps: int = 10,
) -> Measured:
    """The most that lives in any step after a first one. Collective.

    How late a thread of gloo frees what a reduction held depends on the machine: a plan has the
    highest peak. So two more steps finish a reduction only once something waits for it. `resting`
    is without the batch.
    """
    count = StorageCount()
    with watching(count):
        model = ZeRO3(make(), **arguments)
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, batch)
        stepper = OPTIMIZERS[optimizer](model.parameters(), lr=1e-4)
        _step(model, stepper, args, kwargs)
        gc.collect()
        count.restart()
        for _ in range(steps):
            _step(model, stepper, args, kwargs)
        streams = root_state(model).streams
        if isinstance(streams.reduce, threads.FinishingStream):
            streams.reduce.is_late = True
        for _ in range(2):
            _step(model, stepper, args, kwargs)
        del args, kwargs
        gc.collect()
        resting = count.live
    return Measured(resting, count.peak)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    output = model(*args, **kwargs)
    parts = [part for part in tensors_of(output) if part.requires_grad]
    loss = parts[0] if len(parts) == 1 and not parts[0].ndim else None
    if loss is None:
        loss = torch.stack([part.sum() for part in parts]).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def watching(count: StorageCount) -> Iterator[None]:
    """Count what operations of this thread allocate, and of threads of streams that are started
    inside; and what anything resizes, whether or not the engine tells its extensions."""
    run_all, resize = threads._run_all, torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        result = resize(storage, nbytes)
        count.resized(storage)
        return result

    def counted(work: SimpleQueue[Any]) -> None:
        with CountingMode(count):
            run_all(work)

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", resized),
        mock.patch.object(threads, "_run_all", counted),
        CountingMode(count),
    ):
        yield
