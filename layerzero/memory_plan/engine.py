"""PlannedModel: the real engine around a module without memory, on one rank of a planned world.

Everything that allocates is the engine's own code: units, handles, the scheduler, the reducer.
Replaced is what would leave the process, and what needs values of other ranks. Nothing is sent: a
group (arguments.py) has the size, this rank's number and the backend of the planned one, so the
engine allocates what it would allocate there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from layerzero.build.build import Builder, Parts
from layerzero.build.compare import Digests
from layerzero.build.materialize import Materializer, Place
from layerzero.build.topology import Topology
from layerzero.comm.streams import ChainedCollectives, InlineStream, Streams, Waitable
from layerzero.flat.placement import ShardGroup
from layerzero.memory_budget.learner import LateStream
from layerzero.memory_budget.storages import StorageCount
from layerzero.memory_plan.arguments import Prepared
from layerzero.step.extension import Extension
from layerzero.step.handle import FlatParamHandle
from layerzero.step.operations import Operations
from layerzero.step.root import RootState
from layerzero.step.unit import Unit
from layerzero.watch.watchdog import Watchdog
from layerzero.zero3 import ZeRO3

ROOT = "the root"


class PlannedModel(ZeRO3):
    """A `ZeRO3` made of a plan, without an exchange between ranks."""

    def __init__(self, prepared: Prepared, topology: Topology, count: StorageCount) -> None:
        nn.Module.__init__(self)
        module, plan, arguments, *_ = prepared
        materializer = _WithoutValues(plan.device, None)
        digests = Digests(plan.device, is_needed=False)
        make = functools.partial(_PlannedRoot, count=count)
        parts = Parts(make_root=make, name_in_state_dicts=lambda unit: None)
        builder = Builder(plan, topology, arguments, parts, materializer, digests)
        root = builder.join(builder.build_units())
        materializer.fill_the_rest(module)
        self._become(module, root)
        root.extensions.add(_Moments(root.units, count))

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

    def begin_call(self, unit: Unit) -> None:
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


class _Unwatched(Operations):
    """Names collectives; counts no models on groups and starts no watchdog."""

    def __init__(self, device: torch.device, streams: Streams, *_: object) -> None:
        super().__init__(device, streams, ())

    def _watchdog_of(self, group: ShardGroup) -> Watchdog | None:
        return None


class _PlannedRoot(RootState):
    _operations = _Unwatched

    def __init__(self, *arguments: Any, count: StorageCount, **named: Any) -> None:
        self._count = count
        super().__init__(*arguments, **named)
        # Every rank has the gradients that this one has.
        self.reducer.exchange_presence = lambda reductions: (
            lambda: [(reduction, reduction.present) for reduction in reductions]
        )

    def _make_streams(self, on_gloo: bool) -> Streams:
        if on_gloo:
            return Streams(self.device, reduce=_Reducing(self._count))
        return _DeviceStreams(self.device)


class _Reducing(LateStream):
    """The reduce stream on gloo, each reduction of which is done at the latest time that it is by
    the thread of a real model."""

    def __init__(self, count: StorageCount) -> None:
        super().__init__()
        self._count = count

    def _enqueue(self, work: Callable[[], Waitable | None]) -> Waitable:
        def counted() -> Waitable | None:
            with self._count.of_kind("reduction buffers"):
                return work()

        return super()._enqueue(counted)


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


class _DeviceStreams(Streams):
    """The streams of a planned accelerator, whose tensors seem to be on the CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pre_unshard = self.unshard = self.reduce = self.offload = _OnDevice()

    @property
    def are_apart(self) -> bool:
        return True
