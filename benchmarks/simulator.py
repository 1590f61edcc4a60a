"""Simulates a training step: threads of ranks, the cores they share, and the links between ranks.

A *program* is what one rank does in a step: for each of its threads a list of operations, in order.
`dry_run.py` records programs from the engine. The simulation is one of discrete events: a thread
computes, posts collectives, and waits; what is simulated is only when.

    cores    the runnable threads of a machine share its cores evenly: each runs at
             min(1, cores / threads) of a core's speed (processor sharing)
    links    what a rank sends at the same time over one link shares its bandwidth in the same way

A collective runs in one of two ways (`Transport`):

    Messages  a message to every peer, as the engine sends on gloo. Sending and receiving are work
              of a thread of the process, on the same cores. A message starts when both ends have
              posted it.
    Rings     k - 1 rounds of latency and the rank's bytes, through the rank's own link, beside the
              cores; it starts when all of its simulated ranks have posted it.

Not simulated: time slices, caches, locks (of the interpreter and of gloo), how long a thread takes
to wake, and congestion between ranks in switches.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

# Programs -------------------------------------------------------------------------------------


class Compute(NamedTuple):
    """The thread needs a core for so long."""

    seconds: float


class Post(NamedTuple):
    """The rank enters a collective, and goes on."""

    collective: str
    """Name of the collective; the same on every rank of its group."""
    ranks: Sequence[int]
    """Global ranks of its group, in ascending order: a tuple or a range."""
    sends: Mapping[int, float]
    """Bytes for each peer, by global rank."""
    receives: Mapping[int, float]


class Wait(NamedTuple):
    """The thread stands still until the rank's part of a collective is complete."""

    collective: str
    ranks: Sequence[int]


class Signal(NamedTuple):
    """Lets the rank's `Await`s of this name go on, earlier and later ones."""

    name: Hashable


class Await(NamedTuple):
    name: Hashable


Operation = Compute | Post | Wait | Signal | Await
Program = Mapping[str, Sequence[Operation]]
"""Operations of each thread of a rank, by the thread's name."""


# Events ---------------------------------------------------------------------------------------


class Clock:
    """Runs callbacks in the order of their times; of equal times, in the order they were given."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), callback))

    def run(self) -> None:
        while self._queue:
            self.now, _, callback = heapq.heappop(self._queue)
            callback()

    def sleep(self, seconds: float) -> Event:
        event = Event(self)
        self.after(seconds, event.set)
        return event

    def start(self, process: Process) -> Event:
        """Run a process, which goes on when the event that it yields is set.

        Returns:
            An event that is set when it has ended.
        """
        ended = Event(self)

        def go_on() -> None:
            event = next(process, None)
            if event is None:
                ended.set()
            else:
                event.then(go_on)

        self.after(0.0, go_on)
        return ended


class Event:
    """Happens once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._callbacks: list[Callable[[], None]] = []
        self.is_set = False

    def set(self) -> None:
        self.is_set = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._clock.after(0.0, callback)

    def then(self, callback: Callable[[], None]) -> None:
        if self.is_set:
            self._clock.after(0.0, callback)
        else:
            self._callbacks.append(callback)


Process = Generator[Event, None, None]


class Shared:
    """A resource of `capacity` servers that jobs share evenly, at most one server a job."""

    def __init__(self, clock: Clock, capacity: float = 1.0) -> None:
        self._clock, self._capacity = clock, capacity
        self._jobs: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()
        self._served = self._since = 0.0
        self._version = 0
        self.busy_s = 0.0
        """Seconds of service, over all servers."""

    def work(self, seconds: float) -> Event:
        """An event that is set once a job has had `seconds` of service."""
        done = Event(self._clock)
        self._advance()
        # All jobs advance alike: the one that needs `served` to grow least ends first.
        heapq.heappush(self._jobs, (self._served + seconds, next(self._numbers), done))
        self._plan()
        return done

    def _speed(self) -> float:
        return min(1.0, self._capacity / len(self._jobs)) if self._jobs else 0.0

    def _advance(self) -> None:
        served = (self._clock.now - self._since) * self._speed()
        self._served += served
        self.busy_s += served * len(self._jobs)
        self._since = self._clock.now

    def _plan(self) -> None:
        self._version += 1
        if self._jobs:
            left = max(0.0, self._jobs[0][0] - self._served) / self._speed()
            self._clock.after(left, partial(self._end_first, self._version))

    def _end_first(self, version: int) -> None:
        if version != self._version:
            return  # Another job came since.
        self._advance()
        end, _, done = heapq.heappop(self._jobs)
        self._served = max(self._served, end)  # Without the rounding of the division.
        done.set()
        self._plan()


# Transports -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """The connection of a rank with its peers inside a machine, or on other machines."""

    latency_s: float
    bandwidth: float = float("inf")
    """Bytes per second that one rank sends."""


@dataclass(frozen=True)
class MessageCosts:
    """Seconds of a core that a message takes."""

    post_s: float = 0.0
    """Of the thread that posts it, or its counterpart, and of the one that waits for it."""
    send_s: float = 0.0
    """Of the sender's transport thread."""
    send_s_per_byte: float = 0.0
    receive_s: float = 0.0
    """Of the receiver's transport thread."""
    receive_s_per_byte: float = 0.0


@dataclass(frozen=True)
class Machines:
    """Where ranks run: `ranks` of them on each machine."""

    ranks: int
    cores: float
    inside: Link
    between: Link

    def link(self, ranks: Sequence[int]) -> Link:
        """The slowest link between these ranks, which are in order."""
        is_inside = ranks[0] // self.ranks == ranks[-1] // self.ranks
        return self.inside if is_inside else self.between


class Transport(Protocol):
    def post(self, rank: int, post: Post) -> tuple[float, Event]:
        """Returns core seconds for the thread that posts, and when the rank's part is complete."""


class _World:
    """The clock, the cores of each machine, and each rank's links."""

    def __init__(self, machines: Machines) -> None:
        self.clock, self.machines = Clock(), machines
        self._cores: dict[int, Shared] = {}
        self._links: dict[tuple[int, Link], Shared] = {}

    def cores(self, rank: int) -> Shared:
        machine = rank // self.machines.ranks
        return self._cores.setdefault(machine, Shared(self.clock, self.machines.cores))

    def core_seconds(self) -> float:
        return sum(cores.busy_s for cores in self._cores.values())

    def transfer(self, rank: int, nbytes: float, link: Link, rounds: int = 1) -> Process:
        shared = self._links.setdefault((rank, link), Shared(self.clock))
        yield shared.work(nbytes / link.bandwidth)
        yield self.clock.sleep(link.latency_s * rounds)


class _Thread:
    """A thread that serves jobs in turn, one part of each."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._jobs: list[tuple[float, Event]] = []
        self._runs = False

    def serve(self, seconds: float) -> Event:
        done = Event(self._world.clock)
        self._jobs.append((seconds, done))
        if not self._runs:
            self._runs = True
            self._world.clock.start(self._run())
        return done

    def _run(self) -> Process:
        while self._jobs:
            seconds, done = self._jobs.pop(0)
            yield self._world.cores(self._rank).work(seconds)
            done.set()
        self._runs = False


class Messages:
    """Point-to-point messages, sent and received by a thread for each rank and group."""

    PARTS = 4
    """A message travels in parts, so that it is sent and received at the same time."""

    def __init__(self, world: _World, costs: MessageCosts) -> None:
        self._world, self._costs = world, costs
        self._posted: dict[Hashable, Event] = {}
        self._threads: dict[Hashable, _Thread] = {}

    def post(self, rank: int, post: Post) -> tuple[float, Event]:
        name, ranks = post.collective, post.ranks
        ends = [
            self._end(name, ranks, rank, peer, nbytes, is_sent)
            for is_sent, sizes in ((True, post.sends), (False, post.receives))
            for peer, nbytes in sizes.items()
        ]
        return self._costs.post_s * len(ends), _all(self._world.clock, ends)

    def _end(
        self, name: str, ranks: Sequence[int], rank: int, peer: int, nbytes: float, is_sent: bool
    ) -> Event:
        """One end of a message is posted; the second one starts it."""
        source, target = (rank, peer) if is_sent else (peer, rank)
        sent, received = (self._event(name, ranks, source, target, end) for end in ("s", "r"))
        key = (name, ranks, source, target)
        if key in self._posted:
            self._world.clock.start(self._travel(ranks, source, target, nbytes, sent, received))
        self._posted[key] = sent
        return sent if is_sent else received

    def _event(self, *key: Hashable) -> Event:
        return self._posted.setdefault(key, Event(self._world.clock))

    def _thread(self, rank: int, ranks: Sequence[int]) -> _Thread:
        return self._threads.setdefault((rank, ranks), _Thread(self._world, rank))

    def _travel(
        self,
        ranks: Sequence[int],
        source: int,
        target: int,
        nbytes: float,
        sent: Event,
        received: Event,
    ) -> Process:
        costs, clock, part = self._costs, self._world.clock, nbytes / self.PARTS
        link = self._world.machines.link((source, target))

        def arrive() -> Process:
            yield from self._world.transfer(source, part, link)
            seconds = costs.receive_s / self.PARTS + part * costs.receive_s_per_byte
            yield self._thread(target, ranks).serve(seconds)

        arrivals = []
        for _ in range(self.PARTS):
            seconds = costs.send_s / self.PARTS + part * costs.send_s_per_byte
            yield self._thread(source, ranks).serve(seconds)
            arrivals.append(clock.start(arrive()))
        sent.set()
        yield from arrivals
        received.set()


class Rings:
    """Rings of a backend that needs no cores, such as NCCL's.

    Ranks that are not simulated do what those do that are: it is enough to simulate one of several
    that run the same program.
    """

    def __init__(self, world: _World, simulated: Sequence[int]) -> None:
        self._world, self._simulated = world, frozenset(simulated)
        self._entered: dict[Hashable, int] = {}
        self._started: dict[Hashable, Event] = {}
        self._last: dict[Hashable, Event] = {}
        """A rank's last collective of each group: the backend runs them one after the other."""

    def post(self, rank: int, post: Post) -> tuple[float, Event]:
        key = post.collective, post.ranks
        start = self._started.setdefault(key, Event(self._world.clock))
        self._entered[key] = self._entered.get(key, 0) + 1
        if self._entered[key] == sum(rank in post.ranks for rank in self._simulated):
            start.set()
        before = self._last.get((rank, post.ranks), start)
        done = self._world.clock.start(self._run(rank, post, [before, start]))
        self._last[rank, post.ranks] = done
        return 0.0, done

    def _run(self, rank: int, post: Post, after: Sequence[Event]) -> Process:
        yield from after
        link, nbytes = self._world.machines.link(post.ranks), sum(post.sends.values())
        yield from self._world.transfer(rank, nbytes, link, rounds=len(post.ranks) - 1)


# The simulation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    step_s: float
    """Until the last rank's last thread has ended."""
    core_s: float
    """Core seconds of all ranks."""
    ends: dict[tuple[int, str], float] = field(default_factory=dict)
    """When each thread ended, by rank and name."""


def simulate(
    programs: Mapping[int, Program], machines: Machines, costs: MessageCosts | None = None
) -> Result:
    """Simulate one step of the given ranks, which begin together.

    Args:
        programs: by global rank.
        costs: of messages; None: collectives are rings.

    Raises:
        RuntimeError: threads wait for each other.
    """
    world = _World(machines)
    transport = Rings(world, [*programs]) if costs is None else Messages(world, costs)
    ends: dict[tuple[int, str], float] = {}
    for rank, program in programs.items():
        events: dict[Hashable, Event] = {}
        for name, operations in program.items():
            ended = world.clock.start(_run(world, transport, rank, operations, events))
            ended.then(lambda key=(rank, name): ends.setdefault(key, world.clock.now))
    world.clock.run()
    stuck = [
        (rank, name) for rank in programs for name in programs[rank] if (rank, name) not in ends
    ]
    if stuck:
        raise RuntimeError(f"these threads, of rank and name, wait forever: {stuck}")
    return Result(max(ends.values(), default=0.0), world.core_seconds(), ends)


def _run(
    world: _World,
    transport: Transport,
    rank: int,
    operations: Sequence[Operation],
    events: dict[Hashable, Event],
) -> Process:
    def event(name: Hashable) -> Event:
        return events.setdefault(name, Event(world.clock))

    for operation in operations:
        match operation:
            case Compute(seconds):
                if seconds > 0:
                    yield world.cores(rank).work(seconds)
            case Post(collective, ranks):
                seconds, done = transport.post(rank, operation)
                done.then(event((collective, ranks)).set)
                if seconds > 0:
                    yield world.cores(rank).work(seconds)
            case Wait(collective, ranks):
                yield event((collective, ranks))
            case Signal(name):
                event(name).set()
            case Await(name):
                yield event(name)


def _all(clock: Clock, events: Sequence[Event]) -> Event:
    def wait() -> Process:
        yield from events

    return clock.start(wait())
