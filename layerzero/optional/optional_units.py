"""OptionalUnits: units that a rank may skip; and Places: where in a forward they were entered."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from math import inf
from weakref import WeakKeyDictionary, WeakSet

import torch

from layerzero.config import OptionalMean
from layerzero.optional.agreement import Agreement
from layerzero.optional.exchange import NOTHING
from layerzero.step.backward import ForwardCall, ForwardPass
from layerzero.step.extension import Extension
from layerzero.step.reduction import Reduction
from layerzero.step.root import RootState
from layerzero.step.tensors import find_tensors
from layerzero.step.unit import BACKWARD, Hold, ShardState, Unit

_OPTIONAL = int(Hold.OPTIONAL)
_top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_BACKWARD = -1
"""In the place of a unit's index: a backward inside a forward."""
_Seen = dict[int, set[int]]
"""Region -> the numbers of its places on one path of required units."""


class Places:
    """Follows one forward at a time, and learns from it when the next one begins.

    A place lies between two calls of required units, or backwards inside the forward. Ranks come to
    the same places in the same order: they learn the same, and know whether they exchange at one.
    """

    def __init__(self, regions: frozenset[int], is_known_ever: bool = True) -> None:
        """`is_known_ever`: False: regions may come anywhere, so ranks exchange at every place."""
        self._regions, self._is_known_ever = regions, is_known_ever
        self._paths: dict[Hashable, dict[tuple[int, ...], _Seen]] = {}
        """Kind -> the paths that forwards of this kind took."""
        self.has_ended = False
        """Whether the latest forward has ended, and nothing has failed since: learn from it."""

    def begin(self, kind: Hashable) -> None:
        """A forward begins, so the one before is not taken back any more. `kind` None: of this one
        nothing is known or learned."""
        if self.has_ended:
            seen = self._of_kind.setdefault(tuple(self._path), {})
            for region, numbers in self._came.items():
                seen.setdefault(region, set()).update(numbers)
        self.has_ended = False
        known = {} if kind is None else self._paths
        self._of_kind: dict[tuple[int, ...], _Seen] = known.setdefault(kind, {})
        self._open = [*self._of_kind.items()]
        """Paths that began as the open forward."""
        self._path: list[int] = []
        self._came: _Seen = {}

    def required(self, gather: int) -> None:
        """The forward comes to a call of a required unit, or to a backward."""
        number = len(self._path)
        self._open = [each for each in self._open if each[0][number : number + 1] == (gather,)]
        self._path.append(gather)

    def happened(self, region: int) -> None:
        self._came.setdefault(region, set()).add(len(self._path))

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange here: no path is known, or one that a region came here on, or one
        that has not seen every region, each at one place (one with several may have more)."""
        return not self._open or any(
            not (self._is_known_ever and self._regions <= seen.keys())
            or any(len(numbers) > 1 or len(self._path) in numbers for numbers in seen.values())
            for _, seen in self._open
        )

    def leaves_with(self, gather: int | None) -> bool:
        """Whether no forward went on from here with this unit (None: ended): on a path that ranks
        do not know they exchange at once."""
        number, rest = len(self._path), () if gather is None else (gather,)
        return all(path[number : number + 1] != rest for path, _ in self._open)


class OptionalUnits(Agreement, Extension):
    """Has the ranks of a model agree, in forward, on which regions they gather. Reduces these when
    a pass ends, in the order of their indices."""

    region_of: Mapping[int, str]
    """Index of each optional unit in the root's list, and the name of its region: the FQN of the
    innermost optional module around it, or its own (`find_regions` in arguments.py)."""
    mean: OptionalMean
    _is_active = False

    def __init__(
        self, root: RootState, region_of: Mapping[int, str], mean: OptionalMean, is_reused: bool
    ) -> None:
        """Collective where the exchange makes new groups. `is_reused`: whether any of them is used
        at several places of the model (shared, or tied): passes do not record where it comes, so
        ranks exchange before every gather of a forward."""
        super().__init__(root)
        self._scheduler = root.scheduler
        self.region_of, self.mean = region_of, mean
        first: dict[str, int] = {}
        self._request_of = {
            self._units[index]: first.setdefault(name, index)
            for index, name in sorted(region_of.items())
            if self._units[index].handles
        }
        """The request of a rank that enters the region of a unit: the index of its first unit."""
        self.places = Places(frozenset(first.values()), not is_reused)
        self._may_have: set[Unit] = set()
        """Units that may have gradients of the pass that ends on any rank."""
        self._waiting: set[Unit] = set()
        """Units that may hold sums of micro-batches on any rank."""
        self._open: ForwardPass | None = None
        self._makes_graph = self._retains_graph = False
        self._gathered: set[Unit] = set()
        """Units that ranks have gathered in the open forward."""
        self._gathered_in: WeakKeyDictionary[ForwardPass, set[Unit]] = WeakKeyDictionary()
        self._reached_by = {self._units[index]: WeakSet[ForwardPass]() for index in region_of}
        """Forwards whose backward may reach a unit on this rank."""
        self._written: set[Unit] = set()
        """Units not gathered since weights may have changed. The scheduler calls the compute shard
        stale on those ranks alone that keep no full parameters for another backward."""
        self._recomputations: dict[Unit, float] = {}
        """How often a checkpoint may still run the forward of a unit in backward."""

    def set_active(self, is_active: bool) -> None:
        """Whether ranks may skip these units in the passes that follow, or agree by other means.
        Not inside a pass."""
        self._is_active = is_active
        for unit in self._reached_by:
            unit.set_optional(is_active)
        self._waiting = {*self._reached_by} if self._reducer.kept.adds_up else set()

    def before_forward(self, unit: Unit, forward_pass: ForwardPass) -> None:
        alone = f" in a call of {unit.label!r} outside the model's forward" if unit.index else ""
        self.subject = f"{Agreement.subject}{alone}"
        self._free_unreachable()
        self._makes_graph = torch.is_grad_enabled()
        self._gathered = set()
        if not self._reducer.kept.adds_up:
            self._written = {*self._reached_by}
        kind = unit.index, self._makes_graph, unit.module.training
        # A graph that holds units has them gathered as the forward begins, in no order of places.
        self.places.begin(None if self._scheduler.holds_for_graph else kind)
        self._open = forward_pass

    def before_use(self, unit: Unit) -> None:
        if not self._is_active:
            return
        if self._context.in_backward or self._open is None:
            if unit.depth and unit in self._recomputations:  # A call, not its backward.
                self._recomputations[unit] -= 1
            if unit.is_optional and unit.state is ShardState.SHARDED:
                raise RuntimeError(
                    f"{unit.label}: this optional module was freed before its backward, by "
                    "reshard() or an exception in another forward; run forward and backward again"
                )
        elif unit.is_optional:
            if unit not in self._gathered or unit.state is ShardState.SHARDED:
                self._request(self._request_of[unit])
                self._take_part(self._request_of[unit], is_used=True)
        else:  # Also of a unit that is full already: its call may gather others ahead.
            self._leave_place(unit.index)
            self._free_unused()

    def _leave_place(self, gather: int | None) -> None:
        """Before a required unit or a backward (None: the end), take part in what others want."""
        if self.places.exchanges or self.places.leaves_with(gather):
            self._request(NOTHING)
        if gather is not None:
            self.places.required(gather)

    def _free_unused(self) -> None:
        """Free what was gathered for others, or what this rank's backward does not reach."""
        for unit in self._gathered:
            if self._open not in self._reached_by[unit]:
                unit.free()

    def _take_part(self, request: int, is_used: bool = False) -> None:
        """All ranks gather a region; those without a use for it free each unit at once."""
        self.places.happened(request)
        for unit, region in self._request_of.items():
            if region == request:
                self._gathered.add(unit)
                for handle in unit.handles if unit in self._written else ():
                    handle.mark_stale()
                self._written.discard(unit)
                gather_with_others(unit, is_used)

    def exit_call(self, call: ForwardCall, outputs: object, is_outermost: bool) -> None:
        if self._context.in_backward or self._open is None:
            return
        unit = call.unit
        if unit.is_optional and self._may_reach(outputs):
            self._reached_by[unit].add(self._open)
            if _top_saved_tensors_hooks(True) is not None:
                self._recomputations[unit] = self._recomputations.get(unit, 0) + 1
            elif not torch.is_grad_enabled():
                self._recomputations[unit] = inf  # Reentrant checkpoints inside each other do.
            unit.hold(_OPTIONAL)
        if is_outermost and self._is_active:
            self._leave_place(None)
            self._free_unused()
            self.places.has_ended = True
            if self._makes_graph:
                self._gathered_in[self._open] = self._gathered
        if is_outermost:
            self._open = None

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

    def before_backward(self, forward_pass: ForwardPass) -> None:
        self._retains_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        if self._open is not None and self._is_active:  # Inside a forward, of all ranks.
            self._leave_place(_BACKWARD)

    def before_delivery(self, forwards: Iterable[ForwardPass]) -> None:
        if self._open is None:  # Else `torch.autograd.grad` ran inside a forward.
            gathered = (self._gathered_in.get(each, set()) for each in forwards)
            self._may_have = set[Unit]().union(*gathered)
        if self._is_active:
            units = sorted(self._may_have | self._waiting, key=lambda unit: unit.index)
            self.settle([unit for unit in units if unit.is_trainable and self.sends(unit)])

    def end_backward(self, forwards: Iterable[ForwardPass]) -> None:
        self._waiting = set() if self._reducer.requires_sync else self._waiting | self._may_have
        self._may_have = set()
        self._free_unreachable(() if self._retains_graph else forwards)

    def concerns(self, unit: Unit) -> bool:
        return unit.is_optional

    def scale(self, reduction: Reduction, counts: dict[int, int]) -> None:
        if self.mean == "participants":
            self.scale_to(reduction, counts)

    def before_reduction(self, unit: Unit) -> bool:
        if not unit.is_optional or unit is self._taken:
            return True
        self._free_finished(unit)
        return not self.sends(unit)

    def _free_finished(self, unit: Unit) -> None:
        """Autograd has run all of the unit's backward in one pass: free it, if it cannot run it
        again. Its gradients stay until the pass ends."""
        passes, is_run = self._reached_by[unit], unit.training_state is BACKWARD
        # Else the pass did not come to it, and brings what waits of earlier micro-batches.
        runs_again = self._retains_graph or self._recomputations.get(unit, 0) > 0
        if is_run and len(passes) == 1 and not runs_again:
            passes.clear()
            unit.free(_OPTIONAL)

    def _free_unreachable(self, ended: Iterable[ForwardPass] = ()) -> None:
        """Free what was kept for a backward that has ended, or whose graph was dropped."""
        for unit, passes in self._reached_by.items():
            passes.difference_update(ended)
            if not passes:
                self._recomputations.pop(unit, None)
                if unit.is_held(_OPTIONAL):
                    unit.free(_OPTIONAL)

    def before_abort(self, error: BaseException | None) -> None:
        """Raise on ranks that exchange here, too."""
        if self._open is not None and self._is_active and self.places.exchanges:
            error = error or RuntimeError("a forward failed")
            self._exchange.report(error, self.subject)
        self._open = None
        self.places.has_ended = False
        self._may_have = set()
        for passes in self._reached_by.values():
            passes.clear()


def gather_with_others(unit: Unit, is_used: bool) -> None:
    """Gather a unit because any rank wants it. `is_used`: whether this rank keeps it; it does if
    the unit was resident. That one is gathered again, for ranks where it is not."""
    holds, shown = int(unit.holds), unit.shows_unsharded
    is_kept = is_used or unit.state is not ShardState.SHARDED
    unit.reshard()
    unit.unshard()
    unit.hold(holds)
    if not is_kept:
        unit.wait_for_unshard()
        unit.free()
    elif shown:
        unit.wait_for_unshard()
        unit.show_unsharded()
