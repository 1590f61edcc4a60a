"""JoinedRoot: the state of a model inside a join; see Note [How a rank shadows].

A model becomes joined by a change of the classes of its root, scheduler, reducer and backward: the
objects that reference them keep their references.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from layerzero.comm.diagnosis import CollectiveError
from layerzero.core.parameter_info import get_info
from layerzero.optim.clip import clip_grad_norm_, clipped
from layerzero.optim.in_backward import is_narrowed
from layerzero.optim.joined import joined, refuse_scaler
from layerzero.optim.scaler import scaler_that_calls
from layerzero.runtime.backward import Backward
from layerzero.runtime.exec_order import Order
from layerzero.runtime.operations import remembers_failure
from layerzero.runtime.optional.agreement import Agreement
from layerzero.runtime.optional.reducer import OptionalReducer
from layerzero.runtime.optional.regions import OptionalRegions
from layerzero.runtime.optional.root import OptionalRoot
from layerzero.runtime.optional.scheduler import OptionalScheduler
from layerzero.runtime.passes import BackwardPass, ForwardPass
from layerzero.runtime.reduction import Reduction
from layerzero.runtime.root import RootState, UnshardHandle
from layerzero.runtime.several_reductions import SeveralInFlight
from layerzero.runtime.unit import Unit, get_unit
from layerzero.uneven.optimizers import JoinedOptimizers
from layerzero.uneven.wishes import (
    FORWARDS,
    WIDTH,
    Kind,
    Parted,
    Wish,
    bits_of,
    choose,
    number_of,
)

_OUT = Wish(Kind.OUT)
_MAX_FORWARDS = 64
"""Forwards without a backward that are remembered."""


class Seat:
    """What one join keeps of this rank, and knows of the others."""

    num_active: int
    """Ranks that were not out at the last exchange."""
    is_shadowing: bool
    """Whether this rank takes part in what others run."""
    participants: frozenset[int]
    """Units whose gradients are means over the ranks that had one."""
    all_know: bool
    """Whether every rank knows of the error that ends the join."""

    def __init__(
        self,
        notify: Callable[[], Any],
        is_enabled: Callable[[], bool],
        optimizers: JoinedOptimizers,
        averages_active: bool,
        throws: bool,
    ) -> None:
        """
        Args:
            notify: called before each exchange while this rank is not out; in torch's Join its
                `notify_join_context`.
            is_enabled: whether torch's Join around the loop is on.
            averages_active: whether gradients are means over the ranks that are not out.
            throws: whether to raise on all ranks once some are out.
        """
        self.throws = throws
        self.notify = notify
        self.is_enabled = is_enabled
        self.optimizers = optimizers
        self.averages_active = averages_active
        self.participants = frozenset[int]()
        self._hook: Callable[[], object] = lambda: self
        self.num_active = self.num_ranks = 0
        self.is_shadowing = self.all_know = False
        self.num_forwards = 0
        self.forwards: dict[int, ForwardPass] = {}
        self.is_training = False
        """Of the open forward."""

    def opened_by(self, hook: Callable[[], object]) -> None:
        """`hook`: weak reference to what torch's Join holds as long as it lives."""
        self._hook = hook

    def is_open(self) -> bool:
        return self._hook() is not None and not self.all_know

    def average_participants(self, units: Iterable[int]) -> None:
        self.participants = frozenset(units)

    def begin_forward(self, is_training: bool) -> None:
        self.num_forwards += 1
        self.is_training = is_training

    def keep(self, forward_pass: ForwardPass) -> None:
        """Remember the forward that has begun, under its number."""
        self.forwards[self.num_forwards] = forward_pass
        self.forwards.pop(self.num_forwards - _MAX_FORWARDS, None)

    def number_of(self, order: Order) -> int:
        """The number of the forward that had this order; -1: one from outside the join."""
        found = (n for n, each in self.forwards.items() if each.order is order)
        return next(found, -1)

    def count(self, num_active: int, num_ranks: int) -> None:
        self.num_active, self.num_ranks = num_active, num_ranks

    def set_shadowing(self, is_shadowing: bool) -> None:
        self.is_shadowing = is_shadowing

    def all_know_of_error(self) -> None:
        self.all_know = True


class _Agreement(Agreement):
    """Exchanges at the end of every backward: what a shadowing rank cannot know by itself."""

    def begin(self, *args: Any, repeats: bool = True, **kwargs: Any) -> None:
        super().begin(*args, **kwargs)

    def report(self, error: BaseException) -> None:
        if self.is_open:
            self._expect()  # What the others take part in before they exchange.
        super().report(error)


class _Scheduler(OptionalScheduler):
    def sit(self, seat: Seat) -> None:
        self._seat = seat

    def _is_training(self, unit: Unit) -> bool:
        return self._seat.is_training


class _Reducer(OptionalReducer):
    def sit(self, seat: Seat) -> None:
        self._seat = seat
        self.averages_participants = True  # So that `_scale` is called.

    def _scale(self, reduction: Reduction, counts: dict[int, int]) -> None:
        seat = self._seat
        if reduction.unit.index in seat.participants:
            super()._scale(reduction, counts)
        elif seat.averages_active:
            super()._scale(reduction, {i: seat.num_active for i, count in counts.items() if count})


class _SeveralReducer(_Reducer, SeveralInFlight):
    pass


class _Backward(Backward):
    def _backward_pass(self, graph_task: int, order: Order) -> BackwardPass:
        self.clear_abandoned()
        if not self._passes and not self._scheduler.recorder.is_recording:
            root = cast("JoinedRoot", self._context.owner())
            root.come_to_backward(order)
        return super()._backward_pass(graph_task, order)

    def shadow(self, forward_pass: ForwardPass) -> None:
        """Take part in a backward, through a forward that this rank may not have run."""
        ended = BackwardPass(graph_task=-1, makes_graph=False, is_recorded=True)
        ended.forwards[forward_pass] = None
        self._reducer.begin_backward()
        self._scheduler.recorder.begin(("backward", forward_pass.order))
        self._passes.append(ended)
        self._context.set_in_backward(True)
        self._end_backward(ended)


class JoinedRoot(OptionalRoot):
    """A root whose ranks exchange what they want to do next."""

    scheduler: _Scheduler
    reducer: _Reducer
    backward: _Backward
    _seat: Seat
    _class_before: type[RootState]
    _agreement_before: Agreement | None

    # Enter and leave ----------------------------------------------------------------------------

    @staticmethod
    def enter(root: RootState, seat: Seat) -> JoinedRoot:
        """Begin a join. Collective."""
        before = type(root)
        root.__class__ = JoinedRoot
        assert isinstance(root, JoinedRoot), "its class is set above"
        root._class_before, root._seat = before, seat
        root._begin_join()
        try:
            root._compare_lists()
        except BaseException:
            root.leave()
            raise
        joined.update(seat.optimizers.all)
        return root

    def _begin_join(self) -> None:
        seat = self._seat
        self._optional_before = {unit.index for unit in self.units if unit.is_optional}
        if "_join_exchange" not in self.__dict__:
            self._join_exchange = self._make_exchange()
        if isinstance(self.reducer, OptionalReducer) and self.reducer.averages_participants:
            seat.average_participants(self._optional_before)
        is_several = isinstance(self.reducer, SeveralInFlight)
        loans = [
            _Loan(self.scheduler, _Scheduler),
            _Loan(self.reducer, _SeveralReducer if is_several else _Reducer),
            _Loan(self.backward, _Backward),
        ]
        self.scheduler.set_up()
        regions = {unit.index: "the model" for unit in self.units if unit.handles}
        self._agreement_before = self.__dict__.get("agreement")
        self.agreement = self._agree_on(
            OptionalRegions(regions, "all"), self._join_exchange, _Agreement
        )
        self.scheduler.sit(seat)
        self.reducer.sit(seat)
        for loan in loans:
            loan.begins()
        self._loans = loans
        if self.reducer.adds_up:
            self.reducer.expect_sums()
        root_ref = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            root = root_ref()
            if root is not None:
                root.come_to_step(optimizer, closure=(*args, None)[1] or kwargs.get("closure"))

        self._step_hook = register_optimizer_step_pre_hook(before_step)

    def _compare_lists(self) -> None:
        optimizers = self._seat.optimizers
        sizes = len(optimizers), len(optimizers.options())
        rows = self._join_exchange([self._join_exchange.rank, *sizes])
        if any(tuple(row[1:]) != sizes for row in rows):
            found = {row[0]: f"{row[1]} with {row[2]} numbers in their groups" for row in rows}
            raise ValueError(f"join: optimizers differ between ranks: {found}")

    def leave(self) -> None:
        """The join is over, with or without an error. Not collective."""
        self._step_hook.remove()
        for loan in self._loans:
            loan.ends()
        for unit in self.units:
            unit.set_optional(unit.index in self._optional_before)
        if self._agreement_before is not None:
            self.agreement = self._agreement_before
            if self.reducer.adds_up:
                self.reducer.expect_sums()
        else:
            del self.agreement
        joined.difference_update(self._seat.optimizers.all)
        del self._seat, self._loans, self._agreement_before
        self.__class__ = self._class_before  # type: ignore[assignment]

    # Wishes -------------------------------------------------------------------------------------

    @property
    def join_seat(self) -> Seat:
        return self._seat

    def come_to(self, wish: Wish, what: str = "") -> None:
        """This rank wants to do this next: shadow others until all ranks have chosen it.

        Args:
            what: the call, in messages.

        Raises:
            RuntimeError: on every rank: another rank raised, or ranks came to different calls.
        """
        if self._seat.is_shadowing or not self._seat.is_enabled():
            return
        while (chosen := self._meet(wish, what or str(wish))) != wish:
            assert chosen is not None, "this rank is not out"
            self._shadow(chosen)

    def shadow_next(self) -> bool:
        """This rank is out of batches: shadow what the others do next.

        Returns:
            False: all ranks are out.
        """
        chosen = self._meet(_OUT)
        if chosen is not None:
            self._shadow(chosen)
        return chosen is not None

    def finish_join(self, is_last: bool) -> None:
        """All ranks are out of batches. Collective.

        Args:
            is_last: whether this rank was not out before the others.
        """
        self._meet(_OUT, is_last=is_last)

    def raise_everywhere(self, error: BaseException) -> None:
        """This rank leaves the join with an error: raise on the others, too, which wait for it.

        Not for an interrupt, and not after a failed collective: the others may be gone.
        """
        seat = self._seat
        is_told = seat.all_know or self.operations.failure is not None
        if is_told or not isinstance(error, Exception) or isinstance(error, CollectiveError):
            return
        if self.context.in_backward:
            with contextlib.suppress(CollectiveError):
                self.abort(error)
        first_line = (str(error).splitlines() or [""])[0]
        with contextlib.suppress(CollectiveError, _Ended):
            self._meet(Wish(Kind.RAISED), f"{type(error).__name__}: {first_line}")

    @remembers_failure
    def _meet(self, wish: Wish, what: str = "", is_last: bool = False) -> Wish | None:
        seat, exchange = self._seat, self._join_exchange
        optimizers = seat.optimizers
        looks = is_last or (
            seat.num_active < seat.num_ranks and wish.kind in (Kind.BACKWARD, Kind.REDUCE)
        )
        notified = None if wish == _OUT else seat.notify()
        states = optimizers.gradient_states(looks)
        row = [exchange.rank, *wish.to_row(), is_last, *states, *optimizers.options()]
        rows = exchange(row)
        if notified is not None:
            notified.wait()
        wishes = [Wish.from_row(row[1 : 1 + WIDTH]) for row in rows]
        seat.count(sum(each != _OUT for each in wishes), len(wishes))
        if wish == _OUT and not is_last:
            self._follow_optimizers(rows, wishes)
        try:
            chosen = choose(wishes)
        except Parted:
            chosen = None
        if chosen is not None and chosen.kind == Kind.RAISED:
            self._raise_of(wish, what)
        is_out = any(each == _OUT for each in wishes)
        if seat.throws and chosen is not None and is_out:
            self._end(what, "throw_on_early_termination: some ranks are out of batches", wish)
        if chosen is None and seat.num_active:
            self._end(what, "ranks of a join came to different calls", wish)
        if chosen is not None and chosen.kind == Kind.CALL and is_out:
            self._end(what, "a call inside a join needs every rank, but some have no batches", wish)
        return chosen

    def _follow_optimizers(self, rows: list[list[int]], wishes: list[Wish]) -> None:
        """This rank is out: its options and gradients are as those of ranks that are not."""
        optimizers, start = self._seat.optimizers, 2 + WIDTH
        others = [row for row, wish in zip(rows, wishes, strict=True) if wish != _OUT]
        others = others or [row for row in rows if row[start - 1]]
        if others:
            optimizers.copy_options(others[0][start + len(optimizers) :])
            optimizers.zero_like([row[start : start + len(optimizers)] for row in others])

    def _raise_of(self, wish: Wish, what: str) -> NoReturn:
        self._seat.all_know_of_error()
        texts = self._join_exchange.texts(what if wish.kind == Kind.RAISED else None)
        rank, text = next(iter(texts.items()))
        raise _Ended(f"rank {rank} left the join with an error: {text}")

    def _end(self, what: str, error: str, wish: Wish) -> NoReturn:
        """Raise on every rank, with what each one came to."""
        self._seat.all_know_of_error()
        texts = self._join_exchange.texts(what if wish != _OUT else "out of batches")
        found = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        raise RuntimeError(f"{error} ({found})")

    # What a rank shadows --------------------------------------------------------------------------

    def _shadow(self, wish: Wish) -> None:
        """Take part in what other ranks run, with nothing of this rank's own."""
        self._seat.set_shadowing(True)
        grad_enabled = wish.kind != Kind.EVALUATION
        try:
            with torch.set_grad_enabled(grad_enabled):
                if wish.kind in FORWARDS:
                    self._shadow_forward(self.units[wish.which], wish, grad_enabled)
                elif wish.kind == Kind.BACKWARD:
                    self._shadow_backward(wish)
                elif wish.kind == Kind.CLIP:
                    self._shadow_clip(wish)
                elif wish.kind == Kind.REDUCE:
                    super().reduce_waiting()
                elif wish.kind == Kind.STEP:
                    self._seat.optimizers.step(wish.which)
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            self._seat.set_shadowing(False)

    def _shadow_forward(self, unit: Unit, wish: Wish, grad_enabled: bool) -> None:
        seat = self._seat
        seat.begin_forward(wish.is_training)
        forward_pass = ForwardPass(self._clock)
        seat.keep(forward_pass)
        self.context.note_weights()
        self.scheduler.begin_forward(unit, weights_may_have_changed=not self.reducer.adds_up)
        self.scheduler.settle_forward()
        self.context.wait_for_uploads()
        forward_pass.ended(self.scheduler.end_forward(grad_enabled))

    def _shadow_backward(self, wish: Wish) -> None:
        before = self.reducer.requires_sync
        self.reducer.set_requires_sync(wish.requires_sync)
        try:
            self.backward.shadow(self._seat.forwards.get(wish.which) or ForwardPass(self._clock))
        finally:
            self.reducer.set_requires_sync(before)

    def _shadow_clip(self, wish: Wish) -> None:
        module = self.units[wish.which].module
        inside = {id(unit) for m in module.modules() if (unit := get_unit(m)) is not None}
        units = [unit for unit in self.units if id(unit) in inside]
        whole = [each for each in module.parameters() if get_info(each) is None]
        max_norm, norm_type = map(number_of, wish.numbers)
        clip_grad_norm_(clipped(self, units, whole), max_norm, norm_type)

    # What a rank runs -----------------------------------------------------------------------------

    def _begin_forward(self, unit: Unit) -> None:
        is_recomputed = self.context.in_backward
        if not self._seat.is_enabled():
            self.leave()
            return self._begin_forward(unit)  # Of the class from before.
        if not is_recomputed:
            if self.operations.failure is not None:
                self.operations.refuse()
            self.backward.clear_abandoned()
            kind = Kind.FORWARD if self.reducer.requires_sync else Kind.MICRO_FORWARD
            if not torch.is_grad_enabled():
                kind = Kind.EVALUATION
            self.come_to(Wish(kind, unit.index, unit.module.training))
            self._seat.begin_forward(unit.module.training)
        super()._begin_forward(unit)
        if not is_recomputed:
            self._seat.keep(self._forward_pass)
        return None

    def come_to_backward(self, order: Order) -> None:
        """The first output's gradient of a backward has arrived."""
        number = self._seat.number_of(order)
        self.come_to(Wish(Kind.BACKWARD, number, requires_sync=self.reducer.requires_sync))

    def come_to_step(self, optimizer: torch.optim.Optimizer, closure: object) -> None:
        """Before `optimizer.step`, of any optimizer of the process."""
        seat = self._seat
        if seat.is_shadowing or is_narrowed(optimizer):
            return
        index = seat.optimizers.index_of(optimizer)
        if index is None:
            own = {id(sharded) for unit in self.units for sharded in unit.sharded_params}
            if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step inside a join that does not have this "
                    "optimizer, so ranks without batches would not step: pass every optimizer of "
                    "the model to layerzero.join"
                )
            return
        if closure is not None:
            raise NotImplementedError(
                f"{type(optimizer).__name__}.step(closure) inside a join: ranks without batches "
                "have no closure; run forward and backward before step()"
            )
        scaler = scaler_that_calls()
        if scaler is not None and scaler.is_enabled():
            refuse_scaler(optimizer)
        self.come_to(Wish(Kind.STEP, index))

    def before_clip(self, unit: Unit, max_norm: float, norm_type: float) -> None:
        self.come_to(Wish(Kind.CLIP, unit.index, numbers=(bits_of(max_norm), bits_of(norm_type))))

    def reduce_waiting(self) -> None:
        self.check_between_steps("reduce_gradients: called inside forward or backward")
        self.come_to(Wish(Kind.REDUCE))
        self._seat.set_shadowing(True)
        try:
            super().reduce_waiting()
        finally:
            self._seat.set_shadowing(False)

    def pregather(self, units: Sequence[Unit], waits: bool) -> None:
        self.before_call("pregather")
        super().pregather(units, waits)

    def unshard_explicitly(self, unit: Unit, async_op: bool) -> UnshardHandle | None:
        if not self._call_depth and not self.context.in_backward:
            self.before_call("unshard")
        return super().unshard_explicitly(unit, async_op)

    def unshard_all(self) -> None:
        self._refuse_pipelines()

    def begin_micro_batches(self, keep_unsharded: bool = True) -> None:
        self._refuse_pipelines()

    def _refuse_pipelines(self) -> NoReturn:
        raise NotImplementedError("join: not for pipeline stages, nor around micro_batches()")

    def before_call(self, what: str) -> None:
        if what == "rewrap":
            raise RuntimeError("rewrap: the model is inside a join; leave that first")
        self.come_to(Wish(Kind.CALL), what)


class _Ended(RuntimeError):
    """Another rank's error ended the join."""


class _Loan:
    """An object that has another class during a join, and what that adds or replaces."""

    def __init__(self, lent: object, cls: type) -> None:
        self._lent = lent
        self._class = type(lent)
        self._before = dict(lent.__dict__)
        self._names: list[str] = []
        lent.__class__ = cls

    def begins(self) -> None:
        """The new class has set its attributes."""
        before = self._before
        now = self._lent.__dict__
        self._names = [n for n in now if n not in before or before[n] is not now[n]]

    def ends(self) -> None:
        now = self._lent.__dict__
        for name in self._names:
            if name in self._before:
                now[name] = self._before[name]
            else:
                now.pop(name, None)
        self._lent.__class__ = self._class
