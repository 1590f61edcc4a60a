"""PlannedModel: the real engine around a module without memory, on one rank of a planned world.

Everything that allocates is the engine's own code: units, handles, the scheduler, the reducer.
Replaced is what would leave the process (transport.py), and what needs values of other ranks.
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
from layerzero.comm.streams import Streams
from layerzero.flat.placement import Placement, ShardGroup
from layerzero.memory_budget.learner import Learner
from layerzero.memory_budget.meter import Meter
from layerzero.memory_budget.storages import StorageCount
from layerzero.memory_plan.arguments import Prepared
from layerzero.memory_plan.transport import PlannedExchange, PlannedOperations, PlannedStreams
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
                feature.install(root, _exchange_of)
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


def _exchange_of(root: RootState) -> Exchange:
    """Every rank enters those optional units that this one enters."""
    return PlannedExchange(root.placements[0].rank)
