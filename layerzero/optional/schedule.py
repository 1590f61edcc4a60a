"""AgreedSchedule: has a scheduler unshard units in the order that ranks agree on.

Note [Ranks hold the same]
    Whether a required unit is resident when a pass comes to it decides whether it is gathered, so
    it must be the same on every rank, whatever optional units ran there. So what an optional unit
    makes a rank free (the unit whose forward ended last), every rank frees, also where that forward
    was still running; and optional units are left out of the budget for prefetching. Behind
    optional units a unit stays for the backward only if it ran last on every rank (`_keeps_last`).
    And whether a freed unit leaves a shard for its next gather (`reshard_after_forward=
    "compute_shard"`) depends on the pass, not on what this rank ran of it (`_is_regathered`).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Hashable, Iterable
from types import FrameType

import torch

from layerzero.build.regions import OptionalRegions
from layerzero.config import BackwardPrefetch
from layerzero.optional.agreement import Agreement
from layerzero.optional.reductions import AgreedReductions
from layerzero.step.calls import ForwardCall
from layerzero.step.context import RuntimeContext
from layerzero.step.exec_order import ExecOrderRecorder, Order
from layerzero.step.root import RootState
from layerzero.step.states import Hold, ShardState
from layerzero.step.tensors import find_tensors
from layerzero.step.unit import Unit

_PRE, _POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
_POLICY = int(Hold.POLICY)
_EXPLICIT = int(Hold.EXPLICIT)
_top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_NEVER = -1
"""Stands for a unit that never comes, so that places are never taken as known."""
_MAX_OPEN = 64
"""Forwards without a backward that are remembered."""


class AgreedOrder(tuple[int, ...]):
    """The order of required units of a forward, and what its backward needs to know."""

    key: Hashable
    """What happened in the forward; its backward is compared with those after the same."""
    repeats: bool
    """Whether its backward may gather an optional unit more often than it did before: if one was
    gathered twice in forward, or may run again in backward, that depends on what a rank ran."""
    needed: frozenset[int]
    """Optional units that its backward may reach on any rank."""
    own: frozenset[int]
    """Those that it may reach on this rank."""


class AgreedSchedule(ExecOrderRecorder):
    """The recorder of a scheduler whose ranks agree on what they gather."""

    def __init__(
        self,
        root: RootState,
        regions: OptionalRegions,
        agreement: Agreement,
        reductions: AgreedReductions,
    ) -> None:
        super().__init__()
        self.agreement = agreement
        self._scheduler, self._context, self._units = root.scheduler, root.context, root.units
        self._reductions = reductions
        self._optional = tuple(u for u in root.units if u.index in regions.region_of)
        self._required = tuple(u for u in root.units if u.index not in regions.region_of)
        never = (_NEVER,) if regions.is_reused else ()
        self._may_come = frozenset([*never, *(u.index for u in self._optional if u.handles)])
        self._called: set[Unit] = set()
        """Optional units called in the open forward that its backward may reach."""
        self._recomputes = False
        """Whether its backward may run any of them forward again."""
        self._events: tuple[tuple[int, tuple[int, ...]], ...] = ()
        self.ahead: set[Unit] = set()
        """Optional units whose gather was started before the agreement has come to it."""
        self.room = _Room(root.context, self._required, self.ahead)
        self._came_to: Unit | None = None
        """The required unit whose gather the pass comes to."""
        self._is_backward = False
        """Whether the open pass is a backward. (A rank may call `torch.autograd.grad` in an
        optional unit's forward, so `in_backward` may differ between ranks.)"""
        self._own: frozenset[int] = frozenset()
        """Optional units that the open backward may reach on this rank."""
        self._open: deque[AgreedOrder] = deque(maxlen=_MAX_OPEN)
        self._ended: AgreedOrder | None = None
        """The order of the latest forward that has ended."""
        self._kept: Unit | None = None
        """The optional unit that stayed when the latest forward ended, on every rank."""
        self._last_inside: Unit | None = None
        """The unit that ran last in the latest forward before its outermost call ended, if optional
        units came since the last required gather."""
        self._is_ending = False
        """Whether the open forward is about to end."""
        self._makes_graph = False
        """Whether the latest forward began with gradients."""

    # Passes -----------------------------------------------------------------------------------

    def visit(self, unit: int) -> None:
        if not self._units[unit].is_optional:
            super().visit(unit)

    def begin(self, kind: Hashable) -> None:
        assert isinstance(kind, tuple), "kinds of the scheduler and of Backward"
        if kind[0] == "backward":
            # After the same required units another one is resident where an optional unit ran last.
            super().begin((*kind, self.resident()))
            self._begin_backward(kind[1])
        else:
            super().begin(kind)
            self._begin_forward(self._units[kind[1]])

    def _begin_forward(self, unit: Unit) -> None:
        self.ahead.clear()
        self._is_backward = False
        self._makes_graph = torch.is_grad_enabled()
        self._called, self._recomputes = set(), False
        mode = torch.is_grad_enabled(), self._is_training(unit)
        self._kept, self._last_inside, self._is_ending = None, None, False
        kind = ("forward", unit.index, *mode, self.resident())
        self.agreement.begin_call(unit.label if unit.index else "")
        self.agreement.begin(kind, self._may_come, self._reached, exchanges=True)

    def _is_training(self, unit: Unit) -> bool:
        """Whether the open forward, which began with `unit`, is one of training."""
        return unit.module.training

    def resident(self) -> tuple[int, ...]:
        """Units that are resident on every rank: a pass does not gather them."""
        units = self._required if self._kept is None else (*self._required, self._kept)
        return tuple([unit.index for unit in units if unit.state is not ShardState.SHARDED])

    def note_call(self, call: ForwardCall, outputs: object) -> None:
        """A forward call of an optional unit has returned.

        Its backward may come if an output requires grad. A checkpoint may run the forward again in
        backward: one that is not reentrant has hooks on what autograd saves; one that is reentrant
        runs it inside a `torch.autograd.Function`, without gradients.
        """
        has_hooks = _top_saved_tensors_hooks(True) is not None
        if torch.is_grad_enabled():
            reached = has_hooks or any(tensor.requires_grad for tensor in find_tensors(outputs))
        else:
            reached = has_hooks or (self._makes_graph and _is_inside_function())
        if reached:
            self._called.add(call.unit)
            self._recomputes |= has_hooks or not torch.is_grad_enabled()

    def settle_forward(self) -> None:
        """The outermost call of a forward is about to end, and its unit is still in use: settle
        what ranks want in the last place."""
        self._is_ending = True
        self.agreement.finish()
        self._events = self.agreement.places.events
        self._last_inside = self._scheduler.last if self.agreement.places.has_events else None

    def _reached(self) -> list[bool]:
        """For each optional unit, whether this rank's backward may reach it; then whether it may
        run any of them forward again, and `_keeps_last`."""
        called = self._called
        return [*[u in called for u in self._optional], self._recomputes, *self._keeps_last()]

    def _keeps_last(self) -> tuple[bool, bool]:
        """Which unit ran last on this rank in a forward that is about to end: the optional one that
        was gathered last, and its backward may reach it; the required one gathered last."""
        last, agreement = self._scheduler.last, self.agreement
        if last is None or not self._is_ending:
            return False, False
        if last.is_optional:
            return last in self._called and agreement.places.last_event == 2 * last.index, False
        return False, agreement.places.last_required == 2 * last.index

    def end(self, is_final: bool = True) -> Order:
        if self._is_backward:
            self.agreement.end(is_final)
            return super().end(is_final)
        grad_enabled = torch.is_grad_enabled()
        own = [unit.index for unit in self._optional if unit in self._called]
        answers = self.agreement.answers
        last = self._scheduler.last
        if last is not None and (last.is_optional or last is self._last_inside):
            place = -2 if last.is_optional else -1
            if not (answers and all([bits[place] for bits in answers])):
                self._scheduler.free_last()
            elif last.is_optional:
                self._kept = last
        gathers = [event for _, found in self._events for event in found]
        recomputes = any([bits[-3] for bits in answers])
        self.agreement.end(is_final)
        order = AgreedOrder(super().end(is_final))
        self._called, self._recomputes = set(), False
        self._is_ending = False
        order.repeats = len(set(gathers)) < len(gathers) or recomputes
        order.own = frozenset(own if grad_enabled else ())
        self._note_needed(order, answers, grad_enabled)
        self._ended = order
        return order

    def _note_needed(
        self, order: AgreedOrder, answers: list[list[bool]], grad_enabled: bool
    ) -> None:
        """Note what the backward of a forward needs, by what `_reached` is on every rank."""
        reached = [any(bits) for bits in zip(*answers, strict=True)]
        needed = [u.index for u, bit in zip(self._optional, reached, strict=False) if bit]
        order.key = self._events, tuple(sorted(needed))
        order.needed = frozenset(needed if grad_enabled else ())
        if order.needed:
            self._open.append(order)

    def take_back(self) -> bool:
        if not super().take_back():
            return False
        self.agreement.places.take_back()
        if self._open and self._open[-1] is self._ended:
            self._open.pop()
        return True

    def _begin_backward(self, order: Order) -> None:
        own = order.needed if isinstance(order, AgreedOrder) else self._may_come - {_NEVER}
        others = [other for other in self._open if other is not order]
        key = order.key if isinstance(order, AgreedOrder) else None
        keys = tuple(other.key for other in others)
        if others and self._kept is not None:
            # It may be needed by several forwards, so ranks are done with it at different events.
            if self._scheduler.last is self._kept:
                self._scheduler.free_last()
            self._kept = None
        kind = ("backward", tuple(order), key, keys, self._reductions.how(), self.resident())
        needed = own.union(*(other.needed for other in others))
        in_flight = [*others, *([order] if isinstance(order, AgreedOrder) else ())]
        repeats = len(in_flight) != 1 or in_flight[0].repeats
        presence = self._reductions.presence
        self.agreement.begin(kind, needed, presence, exchanges=False, repeats=repeats)
        self._own = frozenset[int]().union(*(each.own for each in in_flight))
        self.ahead.clear()
        self._is_backward = True
        if self._kept is not None and self._kept.state is not ShardState.SHARDED:
            # No rank gathers it, so ranks come to it at different events.
            self.room.look()
            self._prefetch_behind(self._kept)

    def end_backward(self, orders: Iterable[Order]) -> None:
        """A backward has ended that ran through forwards of these orders."""
        orders = list(orders)
        self._kept = None
        done = [place for place, each in enumerate(self._open) if any(each is o for o in orders)]
        # Older ones most likely never run (`Unit.forget_starts_before`).
        for _ in range(max(done) + 1 if done else 0):
            self._open.popleft()

    def drop(self) -> None:
        """Drop the open pass, if any."""
        self.agreement.abort()
        self._reductions.drop()
        self.ahead.clear()
        self._kept, self._last_inside, self._is_ending = None, None, False

    def makes_graph(self, unit: Unit, grad_enabled: bool) -> bool:
        """Whether the forward of `unit`, a call of which has ended, makes a graph: not as in this
        call, which may be inside `no_grad` on this rank alone."""
        in_forward = unit.is_optional and not self._context.in_backward
        return self._makes_graph if in_forward else grad_enabled

    def _is_regathered(self) -> bool:
        """Whether an optional unit that is freed now is gathered again with the same weights."""
        in_backward = self._context.in_backward
        return not self._reductions.how()[0] if in_backward else self._makes_graph

    # One unit ---------------------------------------------------------------------------------

    def before_use(self, unit: Unit) -> None:
        """This rank is about to unshard a unit, unless it is resident."""
        agreement = self.agreement
        if not agreement.is_open:
            pass
        elif not unit.is_optional:
            # In a pass without optional units there is nothing to agree on.
            is_last = self._scheduler.last is unit
            if agreement.needed and (unit.state is not ShardState.UNSHARDED or is_last):
                if agreement.required(2 * unit.index) and not self._is_backward:
                    self._scheduler.free_last()
                self._came_to = unit
        elif unit.state is ShardState.SHARDED or unit in self.ahead:
            agreement.want(2 * unit.index)
            self.ahead.discard(unit)
            unit.unshard()
            self._prefetch_behind(unit)

    def after_use(self, unit: Unit) -> None:
        """The unit is unsharded."""
        if self._came_to is unit:
            self._came_to = None
            self.room.look()

    def prefetches_after(self, unit: Unit, in_backward: bool, is_post: bool) -> bool:
        """Whether ranks have agreed on what they prefetch after `unit`, and this rank has.

        Args:
            is_post: whether the unit's gradients are reduced next (BACKWARD_POST).
        """
        if unit.is_optional:
            return True  # `_prefetch_behind` does it, on ranks without a use for the unit, too.
        if is_post and self.agreement.is_open:
            # Between the last optional event here and the unit's reduction.
            self.agreement.settle(2 * unit.index + 1)
        has_list = unit.backward_prefetch is not None or not self.agreement.places.is_recorded
        if is_post or has_list or not (in_backward and self._is_backward):
            return False
        if self._came_to is unit:
            # Else it is resident, and ranks may be at different events.
            self.room.look()
            self._prefetch_next()
        return True

    def _prefetch_behind(self, unit: Unit) -> None:
        """All ranks have gathered an optional unit: prefetch what comes next on all of them."""
        self.room.use(unit)
        if not self._is_backward or self._scheduler.backward_prefetch is _PRE:
            self._prefetch_next()

    def before_reduction(self, unit: Unit) -> None:
        """All ranks are about to reduce a unit."""
        self.room.leave(unit)
        if unit.is_optional and self._scheduler.backward_prefetch is _POST:
            self._prefetch_next()

    def _prefetch_next(self) -> None:
        """Depends on agreed facts alone."""
        in_backward, scheduler = self._is_backward, self._scheduler
        depth = scheduler.backward_depth if in_backward else scheduler.forward_depth
        behind = in_backward and scheduler.backward_prefetch is _PRE
        for index in self.agreement.next_gathers(depth):
            other = self._units[index]
            if other.state is not ShardState.SHARDED:
                continue
            if not self.room.has_space(other.nbytes):
                with self._context.profile("budget_full", other.label):
                    return
            with self._context.profile("prefetch", other.label):
                other.unshard(behind_reductions=behind)
            self.room.add(other)
            if other.is_optional:
                self.ahead.add(other)

    def take_part(self, unit: Unit) -> None:
        """Take part in a gather that this rank has no use for now."""
        is_resident = unit.state is not ShardState.SHARDED and unit not in self.ahead
        self.ahead.discard(unit)
        if is_resident:
            self._gather_again(unit)
        else:
            unit.unshard()
        self._prefetch_behind(unit)
        if is_resident or (self._is_backward and unit.index in self._own):
            return  # This rank uses it, or its backward may come to it later.
        unit.wait_for_unshard()
        if not self._context.in_backward:
            # What the user froze or unfroze is taken over where parameters are shown.
            unit.show_unsharded()
            unit.show_sharded()
            unit.end_hold(_EXPLICIT)
            if not unit.options.reshard_after_forward:
                unit.hold(_POLICY)
        unit.free(regathered_this_step=self._is_regathered())

    def _gather_again(self, unit: Unit) -> None:
        """Gather a unit that is resident on this rank, for those where it is not."""
        holds, shown = int(unit.holds), unit.shows_unsharded
        unit.reshard(self._is_regathered())
        unit.unshard()
        unit.wait_for_unshard()
        unit.hold(holds)
        if shown:
            unit.show_unsharded()

    def free_after_reduction(self, unit: Unit) -> None:
        """This rank took part in the reduction of a unit that its own backward is not running."""
        if unit.index not in self._own:
            self._scheduler.free_in_backward(unit, self._is_regathered())

    def before_event(self) -> None:
        """All ranks take part in an event of an optional unit; see Note [Ranks hold the same]."""
        if not (self._is_backward and self._scheduler.last is self._kept):
            self._scheduler.free_last()


def _is_inside_function() -> bool:
    """Whether the forward of a `torch.autograd.Function` written in Python is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount:
            context = frame.f_locals.get(code.co_varnames[0])
            if isinstance(context, torch.autograd.function.BackwardCFunction):
                return True
        frame = frame.f_back
    return False


class _Room:
    """A `RateLimiter` that counts what all ranks hold: required units, the optional unit that was
    gathered last, and prefetched ones."""

    def __init__(
        self, context: RuntimeContext, required: tuple[Unit, ...], ahead: set[Unit]
    ) -> None:
        """`ahead`: optional units that are prefetched."""
        self._limiter = context.limiter
        self._required = required
        self.ahead = ahead
        self._held: dict[Unit, None] = {}
        self._used: Unit | None = None

    def look(self) -> None:
        """See what is resident, at a required gather: there it is the same on every rank."""
        self._held = self._resident()

    def _resident(self) -> dict[Unit, None]:
        held = [unit for unit in self._required if unit.state is not ShardState.SHARDED]
        return dict.fromkeys([*held, *self.ahead])

    def admits(self, nbytes: int) -> bool:
        """See `RateLimiter.admits`."""
        return self._fits(nbytes, self._resident())

    def has_space(self, nbytes: int) -> bool:
        """`admits`, counting what was resident at the last look, and what came since."""
        return self._fits(nbytes, self._held)

    def _fits(self, nbytes: int, held: Collection[Unit]) -> bool:
        budget = self._limiter.budget
        if budget.max_units is not None and len(held) + 1 > budget.max_units:
            return False
        return (
            budget.max_nbytes is None or sum(u.nbytes for u in held) + nbytes <= budget.max_nbytes
        )

    def use(self, unit: Unit) -> None:
        """All ranks have gathered an optional unit; they have no other one from now on."""
        if self._used is not None:
            self.leave(self._used)
        self._used = unit
        self.add(unit)

    def add(self, unit: Unit) -> None:
        self._held[unit] = None

    def leave(self, unit: Unit) -> None:
        self._held.pop(unit, None)
