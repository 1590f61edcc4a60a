"""Records the program of a step from the engine itself, for `simulator.py`.

The process is one rank of a fake process group, which the engine takes for gloo. So the engine
issues what it would issue there, on the threads that it would use, and nothing is sent: a message
is answered at once with the one that this rank sends itself. Each thread's core seconds between two
operations become a `Compute`, the engine's own work included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from simulator import Await, Compute, Operation, Post, Program, Signal, Wait

from layerzero.comm.pending import Pending
from layerzero.comm.streams import OnThread


class Recorder:
    """Records the operations of each thread while `step` runs."""

    def __init__(self) -> None:
        self._threads: dict[int, list[Operation]] = {}
        self._since: dict[int, float] = {}
        self._items: dict[OnThread, int] = {}
        self._is_on = False

    def step(self, step: Callable[[], Any]) -> Program:
        """The program of one step; the caller's thread is the first."""
        self._threads, self._since, self._items = {}, {}, {}
        self._is_on = True
        self.note()
        step()
        self.note()
        self._is_on = False
        return {f"thread {n}": done for n, done in enumerate(self._threads.values())}

    def note(self, *operations: Operation) -> None:
        """The calling thread has come to `operations`."""
        if self._is_on:
            now, thread = time.thread_time(), threading.get_ident()
            seconds = now - self._since.get(thread, now)
            self._threads.setdefault(thread, []).extend([Compute(seconds), *operations])
            self.resume()

    def resume(self) -> None:
        """What the thread did since its last operation does not count."""
        self._since[threading.get_ident()] = time.thread_time()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let the engine run on a fake group as if it were gloo, and record what it does."""
        patch = mock.patch.object
        run, rest = OnThread.run, OnThread.come_to_rest
        recorder = self

        def number(item: OnThread) -> int:
            return recorder._items.setdefault(item, len(recorder._items))

        def make(item: OnThread, *args: Any, make: Any = OnThread.__init__) -> None:
            make(item, *args)
            # The stream queues it next.
            recorder.note(Signal(("queued", number(item))))

        def run_item(item: OnThread) -> None:
            recorder.note(Await(("queued", number(item))))
            run(item)
            recorder.note(Signal(("done", number(item))))

        def come_to_rest(item: OnThread) -> None:
            if item in recorder._items:
                recorder.note(Await(("done", number(item))))
            rest(item)
            recorder.resume()

        def new_group(ranks: Any = None, *_: Any, make: Any = dist.new_group, **__: Any) -> Any:
            return make(ranks, backend="fake")

        with (
            patch(dist, "get_backend_config", lambda group=None: "cpu:gloo"),
            patch(dist, "new_group", new_group),
            patch(Pending, "post", self._post()),
            patch(Pending, "_await", self._await()),
            patch(OnThread, "__init__", make),
            patch(OnThread, "run", run_item),
            patch(OnThread, "come_to_rest", come_to_rest),
            # Whether a reduction still runs depends on time. Say yes, as it mostly does on gloo.
            patch(OnThread, "is_done", False),
        ):
            yield

    def _post(self) -> Callable[..., None]:
        def post(
            pending: Pending,
            calls: Any,
            peers: Sequence[int],
            receives: Sequence[bool],
            incoming: Sequence[torch.Tensor],
            outgoing: Sequence[torch.Tensor],
        ) -> None:
            ranks = pending.group.ranks
            sizes: tuple[dict[int, int], dict[int, int]] = {}, {}
            for peer, is_received in zip(peers, receives, strict=True):
                tensors = incoming if is_received else outgoing
                sizes[is_received][ranks[peer]] = tensors[peer].nbytes
            self.note(Post(pending.name, ranks, *sizes))
            for peer in range(len(ranks)):
                if incoming[peer].shape == outgoing[peer].shape and peer != pending.group.rank:
                    incoming[peer].copy_(outgoing[peer])
            pending.works = ()
            self.resume()

        return post

    def _await(self) -> Callable[[Pending], None]:
        def wait(pending: Pending, wait: Any = Pending._await) -> None:
            self.note(Wait(pending.name, pending.group.ranks))
            wait(pending)

        return wait
