"""Records the program of a step from the engine itself, for `simulator.py`.

The process is one rank of a fake process group, which the engine takes for gloo. So the engine
issues what it would issue there, on the threads that it would use, and nothing is sent to others: a
message is answered with the one that this rank sends itself. Each thread's core seconds between two
operations become a `Compute`, the engine's own work included.

Compute beside gloo's copies takes more core seconds than alone: they take its caches and interrupt
it, and what arrives was written by another core. A `Loopback` therefore carries the messages
over gloo, within the process; what the copies cost themselves is no part of the program.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
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
        self._loopback: Loopback | None = None
        self._in_flight: dict[Pending, list[dist.Work]] = {}

    def step(self, step: Callable[[], Any]) -> Program:
        """The program of one step; the caller's thread is the first."""
        self._threads, self._since, self._items = {}, {}, {}
        self._is_on = True
        self.note()
        step()
        self.note()
        self._is_on = False
        for works in self._in_flight.values():
            _wait_for(works)
        self._in_flight.clear()
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
    def attached(self, loopback: Loopback | None = None) -> Iterator[None]:
        """Let the engine run on a fake group as if it were gloo, and record what it does.

        Args:
            loopback: carries the messages; None: they are copied at once.
        """
        self._loopback = loopback
        patch = mock.patch.object
        run, rest = OnThread.run, OnThread.wait_until_idle
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

        def wait_until_idle(item: OnThread) -> None:
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
            patch(Pending, "wait_for_data", self._wait_for_data()),
            patch(OnThread, "__init__", make),
            patch(OnThread, "run", run_item),
            patch(OnThread, "wait_until_idle", wait_until_idle),
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
            later: Sequence[Any] = (),
        ) -> None:
            # What is received later counts, too: to the links, all is under way at once.
            ranks = pending.group.ranks
            sent: dict[int, int] = {}
            received: dict[int, int] = {}
            of_peer: dict[int, tuple[list[Any], list[Any]]] = {}
            every = [*calls, *(call for _, call in later)]
            for call, peer, is_received in zip(every, peers, receives, strict=True):
                of_peer.setdefault(peer, ([], []))[is_received].append(call.args[0][0])
            messages = [
                (ranks[peer], *(torch.empty(0) if each is None else each for each in pair))
                for peer, tensors in of_peer.items()
                for pair in itertools.zip_longest(*tensors)
            ]
            for rank, outgoing, incoming in messages:
                for sizes, tensor in ((sent, outgoing), (received, incoming)):
                    if tensor.numel():
                        sizes[rank] = sizes.get(rank, 0) + tensor.nbytes
            self.note(Post(pending.name, ranks, sent, received))
            for _, outgoing, incoming in messages:
                if self._loopback is not None:
                    works = self._loopback.carry(outgoing, incoming)
                    self._in_flight.setdefault(pending, []).extend(works)
                elif incoming.shape == outgoing.shape:
                    incoming.copy_(outgoing)
            pending.works = ()
            self.resume()

        return post

    def _wait_for_data(self) -> Callable[[Pending], None]:
        def wait(pending: Pending, wait: Any = Pending.wait_for_data) -> None:
            self.note(Wait(pending.name, pending.group.ranks))
            if pending in self._in_flight:
                _wait_for(self._in_flight.pop(pending))
                self.resume()
            wait(pending)

        return wait


class Loopback:
    """Carries messages from this process to itself, over gloo.

    It has two gloo groups, of two ranks each, and is rank 0 of one and rank 1 of the other.
    """

    def __init__(self) -> None:
        store = dist.HashStore()
        made: dict[int, Any] = {}

        def join(rank: int) -> None:
            made[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(minutes=1))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._ends = made[0], made[1]
        self._tags = itertools.count()

    def carry(self, sent: torch.Tensor, received: torch.Tensor) -> list[dist.Work]:
        """Send `sent` to `received`; if they differ in size, to new memory."""
        if sent.nbytes == 0:
            return []
        if sent.shape != received.shape:
            received = torch.empty_like(sent)
        source, target = self._ends
        tag = next(self._tags)
        return [source.send([sent], 1, tag), target.recv([received], 0, tag)]


def _wait_for(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
