"""Operations: names one model's collectives, watches them, and remembers the first that failed.

Every collective of a model gets its name here; once one has failed, no other gets a name.

Note [A failed collective is final]
    After a timeout or a lost peer the connections are unusable, and the transport may still write
    into buffers. Nothing is freed or retried; every later use repeats the first error.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from layerzero.comm.exchanges import number_model
from layerzero.comm.pending import Operation, messages_carry_names
from layerzero.comm.streams import Streams
from layerzero.errors import CollectiveError
from layerzero.flat.groups import raise_backend_timeout
from layerzero.flat.placement import Placement, ShardGroup
from layerzero.step.extension import Extensions
from layerzero.watch.desync import DesyncDetector
from layerzero.watch.watchdog import Watchdog

_Method = TypeVar("_Method", bound=Callable[..., Any])


def uncompiled(function: _Method) -> _Method:
    """Decorator that has `torch.compile` skip a function and all that it calls, at no cost.

    A compiled program may run it without tracing its caller: as a hook of autograd, or once a
    caller has been compiled too often. Each function inside would then be compiled by itself.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


def remembers_failure(method: _Method) -> _Method:
    """Decorator that records a failed collective; see Note [A failed collective is final].

    The function's first argument has the `operations` of its model, as the root state does.
    """

    @uncompiled
    @functools.wraps(method)
    def wrapped(model: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(model, *args, **kwargs)
        except CollectiveError as error:
            _raise_first(model, error)
            raise

    @uncompiled
    @functools.wraps(method)
    def with_one(model: Any, argument: Any) -> Any:  # `*args` take longer than all the rest.
        try:
            return method(model, argument)
        except CollectiveError as error:
            _raise_first(model, error)
            raise

    return with_one if method.__code__.co_argcount == 2 else wrapped  # type: ignore


def _raise_first(model: Any, error: CollectiveError) -> None:
    first: CollectiveError = model.operations.remember(error)
    if str(first) not in str(error):
        raise first from error  # A watchdog reported first, and in more detail.


class Operations:
    """The collectives of one model, in order of issue."""

    prefix = ""
    """Prefix of unit names; distinguishes models that share a group."""
    phases: Phases
    """The phases of `model.timeout`."""
    failure: CollectiveError | None = None
    """The error of the first collective that failed; see Note [A failed collective is final]."""
    count = 0
    """Number of the last collective."""
    is_watched = True
    """False: no watchdog watches what a graph records. It runs when that is replayed."""
    expert_count = 0
    """Number of the last collective of experts; these are counted apart, downwards."""
    _tensor_parallel_count = 0

    def __init__(
        self,
        device: torch.device,
        streams: Streams,
        extensions: Extensions,
        placements: Iterable[Placement],
        tensor_parallel_groups: tuple[ShardGroup, ...] = (),
    ) -> None:
        """Collective over the groups of `placements` seen the first time."""
        self._device = device
        self._streams = streams
        self._extensions = extensions
        self._watchdogs: dict[dist.ProcessGroup, Watchdog | None] = {}
        self._tensor_parallel_groups = tensor_parallel_groups
        experts = [replace(each, data_parallel=None) for each in placements if each.data_parallel]
        self._of_experts = {g.process_group for each in experts for g in each.all_groups}
        groups = [*(g for each in placements for g in each.all_groups), *tensor_parallel_groups]
        self.phases = Phases(device, groups)
        self._numbers = number_model(groups, device)
        named = {g.process_group for g in groups if messages_carry_names(g, device)}
        if named:
            from layerzero.comm.gloo.threads import wake_without_preempting

            wake_without_preempting()
        places = {pg: number.place for pg, number in self._numbers.items() if pg in named}
        self._detector = DesyncDetector(places) if places else None

    def next(self, verb: str, unit: str, group: ShardGroup) -> Operation:
        """Name the next collective, which runs over `group`. Every rank must name the same ones.

        Raises:
            CollectiveError: an earlier collective of this model failed.
        """
        if self.failure is not None:
            self.refuse()
        unit, detector, timer = self.prefix + unit, None, None
        own = group.process_group
        # Ranks with different parts of a model may need different numbers of collectives, for
        # example if only some experts are frozen. So these are counted apart, and not compared.
        if group in self._tensor_parallel_groups:
            number = self._tensor_parallel_count = self._tensor_parallel_count + 1
        else:
            detector = self._detector
            if own in self._of_experts:
                number = self.expert_count = self.expert_count - 1
            else:
                number = self.count = self.count + 1
                if detector is not None:
                    detector.issued.append((number, verb, unit))
            for make_timer in self._extensions.timer:
                timer = make_timer(verb, group, number)
        counted = self._numbers.get(own)
        model = self._number_on(group) if counted is None else counted.number
        watchdog = self._watchdogs[own] if own in self._watchdogs else self._watchdog_of(group)
        if not self.is_watched and self._streams.is_capturing():
            watchdog = None
        return Operation(verb, unit, number, watchdog, detector, model, timer)

    def next_on_host(self, verb: str, unit: str, group: ShardGroup) -> Operation:
        """`next` for an exchange between hosts, over a group of gloo."""
        if self.failure is not None:
            self.refuse()
        self.count += 1
        unit = self.prefix + unit
        if self._detector is not None:
            self._detector.issued.append((self.count, verb, unit))
        return Operation(verb, unit, self.count, None, self._detector, self._number_on(group))

    def _number_on(self, group: ShardGroup) -> int:
        """Number of the model on the group; 0 where it was not counted."""
        try:
            return self._numbers[group.process_group].number
        except KeyError:
            self.phases.cover(group)  # A group made later, as for an optimizer.
            return 0

    def remember(self, error: CollectiveError) -> CollectiveError:
        """Record the error of a failed collective.

        Returns:
            The error of the first one that failed.
        """
        if self.failure is None:
            self.failure = error
        return self.failure

    def wait_until_idle(self) -> None:
        """Wait for messages in flight without a handle, because something raised right after they
        were posted. Call it once all others have been waited for."""
        if self._detector is not None:
            for pending in [*self._detector.in_flight]:
                pending.wait()

    def refuse(self) -> None:
        """Called instead of starting a collective after `failure`.

        Raises:
            CollectiveError: always; repeats the first error.
        """
        raise CollectiveError(
            "an earlier collective of this model failed, and its connections are unusable: "
            f"restart the ranks. The earlier error:\n{self.failure}"
        )

    def _watchdog_of(self, group: ShardGroup) -> Watchdog | None:
        """Make a group's watchdog; none for groups of one, and where messages carry names."""
        watchdog = None
        if group.size > 1 and not messages_carry_names(group, self._device):
            streams, number = self._streams, self._numbers.get(group.process_group)
            marks = streams.record_event, streams.events_before
            place = None if number is None else number.place
            remember = weakref.WeakMethod(self.remember)  # A watchdog keeps no model alive.

            def note(error: CollectiveError) -> None:
                if (method := remember()) is not None:
                    method(error)

            watchdog = Watchdog(group, self._device, *marks, note, place)
        return self._watchdogs.setdefault(group.process_group, watchdog)


class Phases:
    """Stretches of a run in which the waits of one model may last longer (`model.timeout`): those
    that are open, and the groups that they apply to."""

    def __init__(self, device: torch.device, groups: Iterable[ShardGroup]) -> None:
        self._device = device
        self._open: list[tuple[timedelta, ExitStack]] = []
        # By identity: equal groups may be different objects, each with its own limit.
        self._groups: WeakValueDictionary[int, ShardGroup] = WeakValueDictionary()
        for group in groups:
            self.cover(group)

    def cover(self, group: ShardGroup) -> None:
        """Let phases apply to a group that the model also uses from now on."""
        if id(group) not in self._groups:
            self._groups[id(group)] = group
            if self._open:
                self._begin(group, *self._open[-1])

    @contextmanager
    def phase(self, limit: timedelta) -> Iterator[None]:
        """A context in which waits that begin may last `limit`. Not collective."""
        with ExitStack() as backends:
            phase = limit, backends
            self._open.append(phase)
            try:
                for group in list(self._groups.values()):
                    self._begin(group, *phase)
                yield
            finally:
                # Not always the last: a generator may leave its phase after a later one began.
                self._open.remove(phase)
                now = self._open[-1][0] if self._open else None
                for group in list(self._groups.values()):
                    group.set_limit(now)

    def _begin(self, group: ShardGroup, limit: timedelta, backends: ExitStack) -> None:
        """`backends` gives the backend its timeout back at the end of the phase."""
        group.set_limit(limit)
        if group.size > 1:
            serves = torch.device("cpu") if group.backend == "gloo" else self._device
            backends.callback(raise_backend_timeout(group, serves, limit))
