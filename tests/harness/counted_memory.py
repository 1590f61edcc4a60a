"""Peaks of real training steps: all storages of one rank, those of its threads included."""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

import layerzero.comm.collectives as collectives
import layerzero.comm.gloo.messages as messages
import layerzero.comm.gloo.threads as threads
import layerzero.comm.pending as pending
from layerzero import ZeRO3
from layerzero.memory_budget.storages import CountingMode, StorageCount
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
    in_order: bool = False,
) -> Measured:
    """The most that lives in any step after a first one. Collective.

    How late a thread of gloo frees what a reduction held depends on the machine, and so does the
    peak: a plan has the highest. So `steps` run as they come, and then two in which a reduction
    is finished only once something waits for it or for what came after it. `resting` is without
    the batch.

    A thread that does not run although the data of its reduction is there, as on a machine with
    too few cores, is in no plan: `in_order`, who waits for a later gather waits for it, too.
    """
    count, pace = StorageCount(), _Pace(keeps_up=in_order)
    with count.watching(), _threads_counted(count), _threads_paced(pace):
        model = ZeRO3(make(), **arguments)
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, batch)
        stepper = OPTIMIZERS[optimizer](model.parameters(), lr=1e-4)
        _step(model, stepper, args, kwargs)
        gc.collect()
        count.restart()
        for _ in range(steps):
            _step(model, stepper, args, kwargs)
        pace.keeps_up = pace.is_late = True
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
def _threads_counted(count: StorageCount) -> Iterator[None]:
    """Count what threads of streams allocate that are started inside."""
    run_all = threads._run_all

    def counted(work: SimpleQueue[Any]) -> None:
        with CountingMode(count):
            run_all(work)

    threads._run_all = counted
    try:
        yield
    finally:
        threads._run_all = run_all


class _Pace:
    """When threads finish reductions; usually as soon as they can."""

    def __init__(self, keeps_up: bool) -> None:
        self.keeps_up = keeps_up
        """A collective's wait ends when the reductions queued before it are finished as well.
        Their data came first: that of one pair of ranks arrives in order."""
        self.is_late = False
        """None is finished before something waits for it."""


_LATEST = 0.4
"""Seconds after which a late one is finished all the same: other ranks may wait for its messages,
which nothing on this rank does."""


@contextlib.contextmanager
def _threads_paced(pace: _Pace) -> Iterator[None]:
    last: list[threads.OnThread | None] = [None]

    class OnThread(threads.OnThread):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._before = last[0] if pace.is_late else None
            self._is_awaited = threading.Event()

        def run(self) -> None:
            if pace.is_late:
                self._is_awaited.wait(_LATEST)
            super().run()

        def wait_until_idle(self) -> None:
            self.hurry()
            super().wait_until_idle()

        def hurry(self) -> None:
            item: Any = self
            while item is not None and not item._is_awaited.is_set():
                item._is_awaited.set()
                before, item._before = item._before, None
                item = before

    class Stream(threads.FinishingStream):
        def _enqueue(self, work: Callable[[], Any]) -> Any:
            last[0] = item = super()._enqueue(work)
            return item

    def paced(kind: Any) -> Any:
        class Paced(kind):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self._before = last[0] if pace.keeps_up else None

            def wait(self) -> None:
                before = self._before
                if before is not None:
                    before.hurry()
                super().wait()
                if before is not None and threading.current_thread() is not before._thread:
                    before._has_run.wait()

        return Paced

    with (
        mock.patch.object(threads, "FinishingStream", Stream),
        mock.patch.object(threads, "OnThread", OnThread),
        mock.patch.object(collectives, "Pending", paced(pending.Pending)),
        mock.patch.object(messages, "Messages", paced(messages.Messages)),
    ):
        yield
