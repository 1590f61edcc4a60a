"""JoinedRoot: the state of a model inside a join; see Note [How a rank shadows].

A model becomes joined by a change of the classes of its root, scheduler, reducer and backward: the
objects that reference them keep their references.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from layerzero.build.regions import OptionalRegions
from layerzero.optim.in_backward import is_narrowed
from layerzero.optim.joined import ScalerCall, joined, joined_scalers, refuse_scaler
from layerzero.optim.scaler import scaler_that_calls
from layerzero.optional.agreement import Agreement
from layerzero.optional.reducer import OptionalReducer
from layerzero.step.exec_order import Order
from layerzero.step.root import RootState, UnshardHandle
from layerzero.step.unit import Unit
from layerzero.uneven.agreement import JoinedAgreement
from layerzero.uneven.backward import JoinedBackward
from layerzero.uneven.loan import Loan
from layerzero.uneven.meeting import Meeting
from layerzero.uneven.reducer import JoinedReducer
from layerzero.uneven.scheduler import JoinedScheduler
from layerzero.uneven.seat import Seat
from layerzero.uneven.shadow import ShadowingRoot
from layerzero.uneven.wishes import IN_FORWARD, OUT, Kind, Wish, bits_of
from layerzero.watch.diagnosis import CollectiveError


class JoinedRoot(ShadowingRoot):
    """A root whose ranks exchange what they want to do next."""

    _meeting: Meeting
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
            root._meeting.compare_lists()
        except BaseException:
            root.leave()
            raise
        joined.update(seat.optimizers.all)
        joined_scalers.update(dict.fromkeys(seat.scalers.all, root))
        return root

    def _begin_join(self) -> None:
        seat = self._seat
        self._optional_before = {unit.index for unit in self.units if unit.is_optional}
        if "_join_exchange" not in self.__dict__:
            self._join_exchange = self._make_exchange()
        if isinstance(self.reducer, OptionalReducer) and self.reducer.averages_participants:
            seat.average_participants(self._optional_before)
        loans = [
            Loan(self.scheduler, JoinedScheduler),
            Loan(self.reducer, JoinedReducer),
            Loan(self.backward, JoinedBackward),
        ]
        self.scheduler.set_up()
        regions = {unit.index: "the model" for unit in self.units if unit.handles}
        self._agreement_before = self.__dict__.get("agreement")
        exchange = self._join_exchange
        agreement = self._agree_on(OptionalRegions(regions, "all"), exchange, JoinedAgreement)
        assert isinstance(agreement, JoinedAgreement), "as asked for above"
        self.agreement = agreement
        self.scheduler.sit(seat)
        self.reducer.sit(seat)
        self._meeting = Meeting(
            seat, self.operations, exchange, self.scheduler, agreement, 3 + len(self.units)
        )
        agreement.sit(self._meeting.inside_forward, self.reducer.exchanges_at_end)
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
        for scaler in self._seat.scalers.all:
            joined_scalers.pop(scaler, None)
        del self._seat, self._meeting, self._loans, self._agreement_before
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
        seat = self._seat
        if seat.is_shadowing or seat.is_abandoned() or not seat.is_enabled():
            return
        while (chosen := self._meeting.meet(wish, what or str(wish))) != wish:
            assert chosen is not None, "this rank is not out"
            self.shadow(chosen)

    def shadow_next(self) -> bool:
        """This rank is out of batches: shadow what the others do next.

        Returns:
            False: all ranks are out.
        """
        chosen = self._meeting.meet(OUT)
        if chosen is not None:
            self.shadow(chosen)
        return chosen is not None

    def finish_join(self, is_last: bool) -> None:
        """All ranks are out of batches. Collective.

        Args:
            is_last: whether this rank was not out before the others.
        """
        while self._meeting.meet(OUT, is_last=is_last) == IN_FORWARD:
            pass

    def raise_everywhere(self, error: BaseException) -> None:
        """This rank leaves the join with an error: raise on the others, too, which wait for it.

        Not for an interrupt, and not after a failed collective: the others may be gone.
        """
        operations, seat = self.operations, self._seat
        is_told = seat.all_know or operations.has_failed
        if is_told or not isinstance(error, Exception) or isinstance(error, CollectiveError):
            return
        if self.context.in_backward:
            with contextlib.suppress(CollectiveError):
                self.abort(error)
        self._meeting.tell_of(error)

    # What a rank runs -----------------------------------------------------------------------------

    def _begin_forward(self, unit: Unit) -> None:
        is_recomputed = self.context.in_backward
        if self._seat.is_abandoned() or not self._seat.is_enabled():
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
        if seat.is_shadowing or seat.is_abandoned() or is_narrowed(optimizer):
            return
        index = seat.optimizers.index_of(optimizer)
        if index is None:
            self._check_foreign(optimizer)
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

    @contextlib.contextmanager
    def scaler_call(
        self,
        scaler: torch.amp.GradScaler,
        call: ScalerCall,
        optimizer: torch.optim.Optimizer | None,
        new_scale: float | None,
    ) -> Iterator[None]:
        """Around a call of one of the join's scalers; see `JoinOfScaler`."""
        seat = self._seat
        index = 0 if optimizer is None else seat.optimizers.index_of(optimizer)
        if optimizer is not None and index is None:
            self._check_foreign(optimizer)
        if seat.is_shadowing or index is None:
            yield
            return
        self.come_to(seat.scalers.wish(scaler, call, index, new_scale))
        with self._doing_as_shadows():
            yield

    @contextlib.contextmanager
    def _doing_as_shadows(self) -> Iterator[None]:
        """All ranks do the same now, so nothing inside is a wish of its own."""
        self._seat.set_shadowing(True)
        try:
            yield
        finally:
            self._seat.set_shadowing(False)

    def _check_foreign(self, optimizer: torch.optim.Optimizer) -> None:
        own = {id(sharded) for unit in self.units for sharded in unit.sharded_params}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step inside a join that does not have this optimizer, "
                "so ranks without batches would not step: pass every optimizer of the model to "
                "layerzero.join"
            )

    def before_clip(self, unit: Unit, max_norm: float, norm_type: float) -> None:
        self.come_to(Wish(Kind.CLIP, unit.index, numbers=(bits_of(max_norm), bits_of(norm_type))))

    def reduce_waiting(self) -> None:
        self.check_between_steps("reduce_gradients: called inside forward or backward")
        self.come_to(Wish(Kind.REDUCE))
        with self._doing_as_shadows():
            super().reduce_waiting()

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

    @property
    def is_joined(self) -> bool:
        return True

    def before_call(self, what: str) -> None:
        if what == "rewrap":
            raise RuntimeError("rewrap: the model is inside a join; leave that first")
        self.come_to(Wish(Kind.CALL), what)
