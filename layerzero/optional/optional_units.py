"""OptionalUnits: units that a rank may skip."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from layerzero.config import OptionalMean
from layerzero.optional.exchange import NOTHING, Exchange
from layerzero.optional.places import Places
from layerzero.optional.reductions import AgreedReductions
from layerzero.step.backward import ForwardCall, ForwardPass
from layerzero.step.extension import Extension
from layerzero.step.reduction import Reduction
from layerzero.step.root import RootState
from layerzero.step.tensors import find_tensors
from layerzero.step.unit import Hold, ShardState, Unit

_OPTIONAL = int(Hold.OPTIONAL)
_top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


@dataclass(frozen=True)
class OptionalRegions:
    """The optional units of one model, and how their gradients are averaged."""

    region_of: Mapping[int, str]
    """Index of each optional unit in the root's list, and the name of its region: the FQN of the
    innermost optional module around it, or its own (`find_regions` in arguments.py)."""
    mean: OptionalMean
    is_reused: bool = False
    """Whether any of them is used at several places of the model (shared, or tied): passes do
    not record where it comes, so ranks exchange before every gather of a forward."""


def exchange_of(root: RootState) -> Exchange:
    """An exchange between the ranks of a model. Collective where it makes new groups."""
    on_device = root.streams.are_apart or root.device.type != "cpu"
    return Exchange(root.placements[0], root.operations, on_device)


class OptionalUnits(AgreedReductions, Extension):
    """Has the ranks of a model agree, in forward, on which regions they gather. Reduces these when
    a pass ends, in the order of their indices."""

    region_of: Mapping[int, str]
    """Index of each optional unit, and the name of its region."""
    prefetches = True
    """Whether units that every rank calls are prefetched."""

    def __init__(self, root: RootState, regions: OptionalRegions) -> None:
        """The units of `regions` are optional between `begin` and `end`, and no others. Collective
        where the exchange makes new groups."""
        super().__init__(root, exchange_of(root))
        self.region_of = regions.region_of
        self._regions: dict[int, list[Unit]] = {}
        """Units of each region, by the index of the first: the request of a rank that enters it."""
        first: dict[str, int] = {}
        for index, name in sorted(regions.region_of.items()):
            if root.units[index].handles:
                request = first.setdefault(name, index)
                self._regions.setdefault(request, []).append(root.units[index])
        self._request_of = {
            unit: request for request, units in self._regions.items() for unit in units
        }
        self.places = Places(frozenset(self._regions), not regions.is_reused)
        self.averages_participants = regions.mean == "participants"
        self._may_have: set[Unit] = set()
        """Units that may have gradients of the pass that ends on any rank."""
        self._waiting: set[Unit] = set()
        """Units that may hold sums of micro-batches on any rank."""
        self._is_active = self._is_open = self._makes_graph = self._retains_graph = False
        self._gathered: set[Unit] = set()
        """Units that ranks have gathered in the open forward."""
        self._gathered_in: WeakKeyDictionary[ForwardPass, set[Unit]] = WeakKeyDictionary()
        self._fresh: set[Unit] = set()
        """Those that this rank has kept since then."""
        self._reached: set[Unit] = set()
        """Those that the backward of the open forward may reach on this rank."""
        self._reached_by: WeakKeyDictionary[ForwardPass, set[Unit]] = WeakKeyDictionary()
        self._runs_again: set[Unit] = set()
        """Those whose forward a reentrant checkpoint runs in backward, perhaps several times."""

    def begin(self, root: RootState) -> None:
        """From now on. Not inside a pass."""
        root.optional = self
        if not self._is_active:
            root.scheduler.agree(self)
            root.reducer.agreed = self
        self._set_active(True)
        optional = {unit for unit in self._units if unit.is_optional}
        self._waiting = optional if self._reducer.kept.adds_up else set()

    def end(self, root: RootState) -> None:
        """In the passes that follow, all ranks run all units, or agree by other means."""
        root.scheduler.agree(None)
        root.reducer.agreed = None
        self._set_active(False)

    def _set_active(self, is_active: bool) -> None:
        self._is_active = is_active
        for unit in self._units:
            unit.set_optional(is_active and unit.index in self.region_of)

    def before_forward(self, unit: Unit, forward_pass: ForwardPass) -> None:
        part = unit.label if unit.index else ""
        self._exchange.name(f" in a call of {part!r} outside the model's forward" if part else "")
        self._free_unreachable()
        self._makes_graph = torch.is_grad_enabled()
        self._gathered, self._fresh, self._reached = set(), set(), set()
        self.places.begin((unit.index, self._makes_graph, unit.module.training))
        self._is_open = True

    def before_use(self, unit: Unit) -> None:
        """This rank is about to unshard a unit, unless it is resident."""
        if self._context.in_backward or not self._is_open:
            if unit.is_optional and unit.state is ShardState.SHARDED:
                raise RuntimeError(
                    f"{unit.label}: the full parameters of this optional module were freed before "
                    "its backward, by reshard() or by an exception in another forward, and no rank "
                    "gathers it in backward; run forward and backward again"
                )
        elif unit.is_optional:
            if unit not in self._fresh or unit.state is ShardState.SHARDED:
                self._enter(unit)
        elif unit.state is not ShardState.UNSHARDED:
            self._leave_place(unit.index)
            self.places.required(unit.index)

    def _enter(self, unit: Unit) -> None:
        """Gather the region of a unit with all ranks, after what others want before it."""
        request = self._request_of[unit]
        while (chosen := self._exchange.agree(request)) != request:
            self._gather(chosen, is_used=False)
        self._gather(request, is_used=True)

    def _leave_place(self, gather: int | None) -> None:
        """This rank goes on to a required gather (None: ends): first take part in what others want,
        then free what its own backward does not reach."""
        if self.places.exchanges or self.places.leaves_with(gather):
            while (chosen := self._exchange.agree(NOTHING)) != NOTHING:
                self._gather(chosen, is_used=False)
        for unit in self._fresh - self._reached:
            unit.free()
            self._fresh.discard(unit)

    def _gather(self, region: int, is_used: bool) -> None:
        """All ranks gather a region; those without a use for it free each unit at once."""
        self.places.happened(region)
        for unit in self._regions[region]:
            self._gathered.add(unit)
            if gather_with_others(unit, is_used):
                self._fresh.add(unit)

    def exit_call(self, call: ForwardCall, outputs: object, is_outermost: bool) -> None:
        if self._context.in_backward:
            return
        if self._is_active and self._is_open:
            if call.unit.is_optional and self._may_reach(outputs):
                self._reached.add(call.unit)
                if not torch.is_grad_enabled():
                    self._runs_again.add(call.unit)
                call.unit.hold(_OPTIONAL)
            if is_outermost:
                self._leave_place(None)
                self.places.end()
                if self._makes_graph:
                    self._gathered_in[call.forward_pass] = self._gathered
                    self._reached_by[call.forward_pass] = self._reached
        if is_outermost:
            self._is_open = False

    def _may_reach(self, outputs: object) -> bool:
        """Whether backward may come to a call that returned these outputs.

        It does if an output requires grad. A checkpoint may run the forward again in backward: one
        that is not reentrant has hooks on what autograd saves; one that is reentrant runs it inside
        a `torch.autograd.Function`, where forward-mode derivatives are off.
        """
        return self._makes_graph and (
            _top_saved_tensors_hooks(True) is not None
            or not torch._C._is_fwd_grad_enabled()
            or (torch.is_grad_enabled() and any(t.requires_grad for t in find_tensors(outputs)))
        )

    def before_backward(self, order: tuple[int, ...]) -> None:
        self._retains_graph = torch._C._autograd._get_current_graph_task_keep_graph()

    def before_delivery(self, forwards: Iterable[ForwardPass]) -> None:
        if not self._is_open:  # Else `torch.autograd.grad` ran inside a forward.
            gathered = (self._gathered_in.get(each, set()) for each in forwards)
            self._may_have = set[Unit]().union(*gathered)

    def end_backward(self, forwards: Iterable[ForwardPass]) -> None:
        if not self._retains_graph:
            for each in forwards:
                self._reached_by.pop(each, None)
        self._free_unreachable()

    def concerns(self, unit: Unit) -> bool:
        return unit.is_optional

    def scale(self, reduction: Reduction, counts: dict[int, int]) -> None:
        if self.averages_participants:
            self.scale_to(reduction, counts)

    def before_reduction(self, unit: Unit) -> bool:
        if not unit.is_optional or unit is self._taken:
            return True
        self._free_finished(unit)
        return not self.sends(unit)

    def reduce_the_rest(self) -> None:
        units = sorted(self._may_have | self._waiting, key=lambda unit: unit.index)
        units = [unit for unit in units if unit.is_trainable and self.sends(unit)]
        if units:
            self.settle(units)

    def commit(self) -> None:
        self._waiting = set() if self._reducer.requires_sync else self._waiting | self._may_have
        self._may_have = set()

    def _free_finished(self, unit: Unit) -> None:
        """Autograd has run all of the unit's backward in one pass: free it, if it cannot run it
        again. Its gradients stay until the pass ends."""
        reached_by = [units for units in self._reached_by.values() if unit in units]
        if len(reached_by) == 1 and unit not in self._runs_again and not self._retains_graph:
            reached_by[0].discard(unit)
            unit.free(_OPTIONAL)

    def _free_unreachable(self) -> None:
        """Free what was kept for a backward that has ended, or whose graph was dropped."""
        reached = set[Unit]().union(*self._reached_by.values())
        self._runs_again &= reached
        for unit in self._request_of:
            if unit.is_held(_OPTIONAL) and unit not in reached:
                unit.free(_OPTIONAL)

    def before_abort(self, error: BaseException | None) -> None:
        """Raise on ranks that exchange here, too."""
        if self._is_active and self._is_open and self.places.exchanges:
            self._exchange.report(error or RuntimeError("a forward failed"))
        self._is_open = False
        self.places.abort()
        self._may_have = set()
        self._reached_by.clear()
        self._fresh.clear()


def gather_with_others(unit: Unit, is_used: bool, regathered: bool = False) -> bool:
    """Gather a unit because any rank wants it.

    Args:
        is_used: whether this rank keeps it; it does if the unit was resident. That one is gathered
            again, for ranks where it is not.
        regathered: whether the same weights will be gathered again in this step.

    Returns:
        Whether it is resident now.
    """
    holds, shown = int(unit.holds), unit.shows_unsharded
    is_kept = is_used or unit.state is not ShardState.SHARDED
    unit.reshard(regathered)
    unit.unshard()
    unit.hold(holds)
    if not is_kept:
        unit.wait_for_unshard()
        unit.free(regathered_this_step=regathered)
    elif shown:
        unit.wait_for_unshard()
        unit.show_unsharded()
    return is_kept
