"""PlannedModel: the real engine around a module without memory, on one rank of a planned world.

Everything that allocates is the engine's own code: units, handles, the scheduler, the reducer.
Replaced is what would leave the process, and what needs values of other ranks. Nothing is sent: a
group (arguments.py) has the size, this rank's number and the backend of the planned one, so the
engine allocates what it would allocate there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import nn

from layerzero.build.build import Builder, Parts
from layerzero.build.compare import Digests
from layerzero.build.materialize import Materializer, Place
from layerzero.build.topology import Topology
from layerzero.comm.gloo.threads import OnThread
from layerzero.comm.streams import ChainedCollectives, InlineStream, Streams, Waitable
from layerzero.flat.placement import Placement, ShardGroup
from layerzero.memory_budget.learner import LateStream, Learner
from layerzero.memory_budget.storages import Meter, StorageCount
from layerzero.memory_plan.arguments import Prepared
from layerzero.optional.arguments import OptionalModules
from layerzero.optional.exchange import Exchange
from layerzero.state_dict import module_state
from layerzero.step.extension import Extension
from layerzero.step.handle import FlatParamHandle
from layerzero.step.operations import Operations
from layerzero.step.reduction import Reduction
from layerzero.step.root import RootState
from layerzero.step.unit import Unit
from layerzero.verify.verifier import Verifier
from layerzero.verify.wire import Checksums
from layerzero.watch.watchdog import Watchdog
from layerzero.zero3 import ZeRO3

ROOT = "the root"


class PlannedModel(ZeRO3):
    """A `ZeRO3` made of a plan, without an exchange between ranks."""

    def __init__(self, prepared: Prepared, topology: Topology, count: StorageCount) -> None:
        nn.Module.__init__(self)
        module, plan, arguments = prepared
        materializer = _WithoutValues(plan.device, None)
        digests = Digests(plan.device, is_needed=False)
        make = functools.partial(_PlannedRoot, count=count)
        parts = Parts(make_root=make, name_in_state_dicts=module_state.install)
        builder = Builder(plan, topology, arguments, parts, materializer, digests)
        root = builder.join(builder.build_units())
        if arguments.verify is not None:
            verifier = _PlannedVerifier(root, count)
            root.extensions.add(verifier)
            root.context.transport = verifier
        for feature in plan.features:
            if isinstance(feature, OptionalModules):
                # Every rank enters those optional units that this one enters.
                feature.install(root, lambda root: PlannedExchange(root.placements[0].rank))
        materializer.fill_the_rest(module)
        self._become(module, root)
        self.__dict__["_moments"] = moments = _Moments(root.units, count)
        root.extensions.add(moments)
        if arguments.memory_budget is not None:
            root.learner = _PlannedLearner(root, topology.placement, arguments.memory_budget, count)

    @property
    def learns(self) -> bool:
        """Whether the next step is one from which the memory budget is learned."""
        learner = self._root_state.learner
        return learner is not None and learner.choice is None

    def refuse_skipped(self) -> None:
        """Raise ValueError if the forward has entered not all optional modules."""
        for unit in self._root_state.units:
            if unit.is_optional and unit.handles and unit not in self.__dict__["_moments"].used:
                raise ValueError(
                    f"plan_memory: this batch does not enter {unit.fqn!r} of optional_modules; "
                    "the fullest rank enters all of them: plan with a batch that does"
                )

    @property
    def handles(self) -> Iterator[FlatParamHandle]:
        return (handle for unit in self._root_state.units for handle in unit.handles)


class _WithoutValues(Materializer):
    """Allocates meta tensors; nobody looks at their values."""

    def _initialise(self, label: str, module: nn.Module, places: list[Place]) -> None:
        for place in places:
            self._allocate(place)

    def fill_the_rest(self, module: nn.Module) -> None:
        """Allocate what the engine leaves alone: tensors of ignored modules."""
        for inner in module.modules():
            for tensors in (inner._parameters, inner._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and tensor.is_meta:
                        self._allocate(Place(tensors, name))


class _Moments(Extension):
    """Notes which unit is at work, and what its gradients and reductions hold."""

    def __init__(self, units: Sequence[Unit], count: StorageCount) -> None:
        self._units = {unit.label: unit for unit in units}
        self._count = count
        self._before = ("", ""), ""
        """Moment and kind before a reduction."""
        self.used: set[Unit] = set()

    def begin_call(self, unit: Unit) -> None:
        self.used.add(unit)
        self._count.now_at(unit.fqn or ROOT, "forward")

    def end_call(self, unit: Unit) -> None:
        self._count.now_at(ROOT, "forward")

    def begin_backward(self, unit: Unit) -> None:
        self._count.now_at(unit.fqn or ROOT, "backward")

    def begin_action(self, action: str, unit: str) -> None:
        if action == "reduce":
            count, reduced = self._count, self._units[unit]
            unsharded = (each for handle in reduced.handles for each in handle.unsharded_params)
            count.mark((each.grad for each in unsharded if each.grad is not None), "gradients")
            self._before = count.moment, count.kind
            count.now_at(reduced.fqn or ROOT, "reduction")
            count.kind = "reduction buffers"

    def end_action(self, action: str, unit: str) -> None:
        if action == "reduce":
            self._count.moment, self._count.kind = self._before


class _PlannedRoot(RootState):
    def __init__(self, *arguments: Any, count: StorageCount, **named: Any) -> None:
        self._count = count
        super().__init__(*arguments, **named)
        exchange = self.reducer.exchange_presence

        def exchange_alone(
            reductions: list[Reduction],
        ) -> Callable[[], list[tuple[Reduction, set[int]]]]:
            exchange(reductions)  # What it returns would read answers of other ranks.
            return lambda: [(reduction, reduction.present) for reduction in reductions]

        self.reducer.exchange_presence = exchange_alone

    def _make_streams(self, on_gloo: bool) -> Streams:
        return PlannedStreams(self.device, on_gloo, self._count)

    def _make_operations(self, groups: list[ShardGroup]) -> Operations:
        return PlannedOperations(self.device, self.streams)


class _PlannedVerifier(Verifier):
    """Sends, sums and keeps as a `Verifier`; compares nothing.

    Every step is one that is checked, which holds the most.
    """

    def __init__(self, root: RootState, count: StorageCount) -> None:
        self._storages = count
        super().__init__(root, every=1)

    def _watch_steps(self) -> None:
        """No real optimizer's step concerns it."""

    def _keep(self, checksums: torch.Tensor) -> Checksums:
        if self._root.streams.are_apart:
            self._storages.mark([checksums], "other")
            return checksums
        return [0] * checksums.numel()

    def _check_step(self) -> None:
        self._wire.clear(self._wire.used())


class _PlannedLearner(Learner):
    """Every rank holds what this one holds, in every step the same."""

    steps = 2

    def __init__(
        self, root: RootState, placement: Placement, budget: int, count: StorageCount
    ) -> None:
        super().__init__(root, placement, budget)
        self._count = count

    def _start_meter(self, root: RootState) -> Meter:
        self._count.restart()
        return Meter(self._count.restart, lambda: None)

    def _weights_changed(self) -> bool:
        return True

    def _highest(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def _everyones(self, own: Any) -> list[Any]:
        return [own]


class PlannedOperations(Operations):
    """Names collectives; counts no models on groups and starts no watchdog."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        super().__init__(device, streams, ())
        self._in_flight = WeakSet()  # Not all are waited for.

    def _watchdog_of(self, group: ShardGroup) -> Watchdog | None:
        return None


class PlannedExchange(Exchange):
    """Every rank does what this one does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def name(self, addition: str) -> None:
        pass

    def __call__(self, row: Sequence[int]) -> list[list[int]]:
        return [list(row)]


class _Reducing(LateStream):
    """The reduce stream on gloo: what its thread does is done when it is waited for, the latest
    that the thread of a real model does it."""

    def __init__(self, count: StorageCount) -> None:
        super().__init__()
        self._count = count
        self.last: OnThread | None = None
        """The work that runs, else what was queued last."""

    def _enqueue(self, work: Callable[[], Waitable | None]) -> Waitable:
        def counted() -> Waitable | None:
            # What was queued after it is not sent yet.
            queued, self.last = self.last, item
            with self._count.of_kind("reduction buffers"):
                started = work()
            self.last = queued
            return started

        item = self.last = cast("OnThread", super()._enqueue(counted))
        return item


class _Gathering(InlineStream):
    """The unshard stream on gloo: whatever waits for a gather finds earlier reductions done.

    Messages of a pair of ranks arrive in order.
    """

    def __init__(self, reduce: _Reducing) -> None:
        self._reduce = reduce

    def enqueue_wait(
        self, pending: Waitable, on_done: Callable[[], None] | None = None
    ) -> Waitable:
        return _Arriving(self._reduce.last, pending)


class _Arriving(NamedTuple):
    """A gather, and the last reduction before it."""

    before: OnThread | None
    pending: Waitable

    def wait(self) -> None:
        if self.before is not None and not self.before.is_done:
            self.before.wait()
        self.pending.wait()


class _OnDevice(InlineStream):
    """A stream of a device, as the host sees it: memory counts as free when the host frees it."""

    def run(self, collectives: ChainedCollectives, input_done: Callable[[], None]) -> Waitable:
        collectives(lambda: None)
        return self.drain_handle()

    def enqueue_wait(
        self, pending: Waitable, on_done: Callable[[], None] | None = None
    ) -> Waitable:
        pending.wait()
        return self.drain_handle()


class PlannedStreams(Streams):
    """The streams of a planned model."""

    def __init__(self, device: torch.device, on_gloo: bool, count: StorageCount) -> None:
        """
        Args:
            device: where the tensors seem to be: the CPU.
            on_gloo: whether it is the CPU that is planned.
        """
        super().__init__(device)
        self._is_apart = not on_gloo
        if on_gloo:
            self.reduce = reduce = _Reducing(count)
            self.unshard = _Gathering(reduce)
        else:
            self.pre_unshard = self.unshard = self.reduce = self.offload = _OnDevice()

    @property
    def are_apart(self) -> bool:
        return self._is_apart
