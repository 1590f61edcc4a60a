"""ShadowingRoot: takes part in what other ranks run, with nothing of this rank's own."""

from __future__ import annotations

import torch

from layerzero.flat.parameter_info import get_info
from layerzero.optim.clip import clip_grad_norm_, clipped
from layerzero.optional.root import OptionalRoot
from layerzero.step.calls import ForwardPass
from layerzero.step.unit import Unit, get_unit
from layerzero.uneven.backward import JoinedBackward
from layerzero.uneven.reducer import JoinedReducer
from layerzero.uneven.scheduler import JoinedScheduler
from layerzero.uneven.seat import Seat
from layerzero.uneven.wishes import FORWARDS, SCALING, Kind, Wish, number_of


class ShadowingRoot(OptionalRoot):
    """A root that can follow the wish of another rank."""

    scheduler: JoinedScheduler
    reducer: JoinedReducer
    backward: JoinedBackward
    _seat: Seat

    def shadow(self, wish: Wish) -> None:
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
                elif wish.kind in SCALING:
                    self._seat.scalers.follow(wish, self.device)
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
