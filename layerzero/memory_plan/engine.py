"""PlannedModel: the real engine around a module without memory, on one rank of a planned world.

Everything that allocates is the engine's own code: units, handles, the scheduler, the reducer.
Replaced is what would leave the process (transport.py), and what needs values of other ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from layerzero.build.arguments import Arguments
from layerzero.build.build import Parts, build_units, join_units
from layerzero.build.compare_values import Digests
from layerzero.build.materialize import Materializer, Place
from layerzero.build.plan import WrapPlan
from layerzero.build.topology import Topology
from layerzero.comm.streams import Streams
from layerzero.flat.groups import ShardGroup
from layerzero.memory_budget.storages import StorageCount
from layerzero.memory_plan.budget import PlannedLearner
from layerzero.memory_plan.transport import (
    Pace,
    PlannedExchange,
    PlannedOperations,
    PlannedStreams,
)
from layerzero.memory_plan.verified import PlannedVerifiedContext
from layerzero.optional.exchange import Exchange
from layerzero.optional.make_root import make_root
from layerzero.state_dict import module_state
from layerzero.step.calls import ForwardCall
from layerzero.step.context import RuntimeContext
from layerzero.step.handle import FlatParamHandle
from layerzero.step.operations import Operations
from layerzero.step.reducer import GradientReducer
from layerzero.step.reduction import Reduction
from layerzero.step.root import RootState
from layerzero.step.scheduler import UnshardScheduler
from layerzero.step.unit import Unit
from layerzero.verify import context_for
from layerzero.zero3 import ZeRO3

ROOT = "the root"


class PlannedModel(ZeRO3):
    """A `ZeRO3` made of a plan, without an exchange between ranks."""

    def __init__(
        self,
        module: nn.Module,
        plan: WrapPlan,
        topology: Topology,
        arguments: Arguments,
        count: StorageCount,
        pace: Pace,
        on_accelerator: bool,
    ) -> None:
        nn.Module.__init__(self)
        if plan.expert_lists is not None:
            plan.expert_lists.name_members()
        materializer = _WithoutValues(plan.device, None)
        digests = Digests(plan.device, is_needed=False)
        of: dict[str, Any] = {"count": count, "pace": pace, "on_accelerator": on_accelerator}
        make = functools.partial(
            make_root,
            make=functools.partial(_PlannedRoot, **of),
            make_exchange=_exchange_of,
        )
        parts = Parts(
            make_root=make,
            make_context=context_for(arguments.verify),
            name_in_state_dicts=module_state.install,
        )
        units = build_units(plan, topology, arguments, parts, materializer, digests)
        root = join_units(units, plan, topology, arguments, parts)
        self.__dict__["prefetch_limit"] = root.context.limiter.budget
        materializer.fill_the_rest(module)
        self._become(module, root)
        self.__dict__["_learner"] = None
        if arguments.memory_budget is not None:
            learner = PlannedLearner(root, topology.placement, arguments.memory_budget, count)
            root.watch_forwards(learner.before_forward)
            self.__dict__["_learner"] = learner

    @property
    def learns(self) -> bool:
        """Whether the next step is one from which the memory budget is learned."""
        learner = self.__dict__["_learner"]
        return learner is not None and learner.choice is None

    def refuse_skipped(self) -> None:
        """Raise ValueError if the forward has entered not all optional modules."""
        scheduler = self._root_state.scheduler
        assert isinstance(scheduler, _PlannedScheduler), "made by a planned root"
        for unit in self._root_state.units:
            if unit.is_optional and unit.handles and unit not in scheduler.used:
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


class _PlannedScheduler(UnshardScheduler):
    """Notes which units are used, and whose backward begins."""

    def count_in(self, count: StorageCount) -> None:
        self._storages = count
        self.used: set[Unit] = set()

    def ensure_unsharded(self, unit: Unit, prefetches: bool, in_backward: bool) -> None:
        if in_backward:
            self._storages.now_at(name_of(unit), "backward")
        self.used.add(unit)
        super().ensure_unsharded(unit, prefetches, in_backward)


class _CountedReducer(GradientReducer):
    """Counts what reductions hold; all ranks have the gradients that this one has."""

    def count_in(self, count: StorageCount) -> None:
        self._storages = count

    def reduce(self, unit: Unit) -> None:
        count = self._storages
        unsharded = (each for handle in unit.handles for each in handle.unsharded_params)
        count.mark((each.grad for each in unsharded if each.grad is not None), "gradients")
        with count.at(name_of(unit), "reduction"), count.of_kind("reduction buffers"):
            super().reduce(unit)

    def exchange_presence(
        self, reductions: list[Reduction]
    ) -> Callable[[], list[tuple[Reduction, set[int]]]]:
        started = super().exchange_presence(reductions)
        del started  # It would read what other ranks have answered.
        return lambda: [(reduction, reduction.present) for reduction in reductions]


class _PlannedRoot(RootState):
    """Counts memory by what it is for, and notes which unit is at work."""

    scheduler: _PlannedScheduler
    reducer: _CountedReducer
    _scheduler_class = _PlannedScheduler
    _reducer_class = _CountedReducer

    def __init__(
        self,
        *arguments: Any,
        count: StorageCount,
        pace: Pace,
        on_accelerator: bool,
        **named: Any,
    ) -> None:
        self._pace = pace
        self._storages = count
        self._on_accelerator = on_accelerator
        if named["make_context"] is not RuntimeContext:
            named["make_context"] = functools.partial(
                PlannedVerifiedContext, count=count, on_accelerator=on_accelerator
            )
        super().__init__(*arguments, **named)
        self.scheduler.count_in(count)
        self.reducer.count_in(count)

    def _make_streams(self, finishing_thread: bool) -> Streams:
        of_reductions = functools.partial(self._storages.of_kind, "reduction buffers")
        return PlannedStreams(
            self.device, finishing_thread, self._pace, of_reductions, self._on_accelerator
        )

    def _make_operations(self, groups: list[ShardGroup]) -> Operations:
        return PlannedOperations(self.device, groups)

    def begin_call(self, unit: Unit) -> ForwardCall:
        if not self.context.in_backward:
            self._storages.now_at(name_of(unit), "forward")
        return super().begin_call(unit)

    def end_call(self, call: ForwardCall, outputs: object) -> None:
        super().end_call(call, outputs)
        if not self.context.in_backward:
            self._storages.now_at(ROOT, "forward")


def _exchange_of(root: RootState) -> Exchange:
    """Every rank enters those optional units that this one enters."""
    return PlannedExchange(next(h.placement for u in root.units for h in u.handles).rank)


def name_of(unit: Unit) -> str:
    return unit.fqn or ROOT
