"""RunningJoin: a model inside a join; see Note [How a rank follows]."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_pre_hook

from layerzero.flat.parameter_info import get_info
from layerzero.optim.clip import Clipped, clip_grad_norm_
from layerzero.optim.in_backward import is_narrowed
from layerzero.optim.scaler import refuse_scaler, scaler_that_calls
from layerzero.optional.optional_units import OptionalUnits
from layerzero.step import on_request
from layerzero.step.backward import ForwardCall, ForwardPass
from layerzero.step.exec_order import ExecOrderRecorder
from layerzero.step.extension import Extension
from layerzero.step.first_forward import check_first_forward
from layerzero.step.root import RootState
from layerzero.step.unit import Hold, Unit
from layerzero.uneven.follower import Follower
from layerzero.uneven.negotiation import FOLLOWED, FORWARDS, OUT, Kind, Negotiation, Request
from layerzero.uneven.optimizers import bits_of, number_of

_FIRST = int(Hold.FIRST_OF_FORWARD)
_OF_A_STEP = _FIRST | int(Hold.LAST_OF_FORWARD | Hold.POLICY | Hold.EXPLICIT)
_MAX_FORWARDS = 64
"""Forwards without a backward that are remembered."""


class RunningJoin(Extension):
    def __init__(self, root: RootState, state: Negotiation) -> None:
        """Begin a join. Collective."""
        self.state = state
        self._root, self._units, self._context = root, root.units, root.context
        self._backward = root.backward
        self._follower: Follower | None = None
        """Consulted in the open pass, if not all ranks run it."""
        self._num_forwards = 0
        self._forwards: dict[int, ForwardPass] = {}
        """The latest forwards inside the join, by number."""
        state.compare_lists()
        self._optional: OptionalUnits | None = root.optional
        if self._optional is not None and self._optional.averages_participants:
            state.participants = frozenset(self._optional.region_of)
        root.join = self
        root.extensions.add(self)
        join_ref = weakref.ref(self)

        @_disable_dynamo
        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            join = join_ref()
            if join is not None:
                join.come_to_step(optimizer, closure=(*args, None)[1] or kwargs.get("closure"))

        self._step_hook = register_optimizer_step_pre_hook(before_step)

    def leave(self) -> None:
        """The join is over, with or without an error. Not collective; may be called again."""
        root = self._root
        if root.join is not self:
            return
        root.join = None
        self._step_hook.remove()
        self._run_together()
        root.extensions.remove(self)

    @property
    def is_open(self) -> bool:
        return not (self.state.is_abandoned or self.state.has_ended)

    def come_to(self, request: Request, what: str = "") -> None:
        """This rank wants to do this next: follow others until all ranks have chosen it.

        Args:
            what: the call, in messages.

        Raises:
            RuntimeError: on every rank: ranks came to different calls.
        """
        if self.state.is_idle:
            return
        self._run_together()
        while (chosen := self.state.choose(request, what or str(request))) != request:
            assert chosen is not None, "this rank is not out"
            self._take_part(chosen)
        if not self.state.is_common and request.kind in FOLLOWED:
            self._follow(runs=True)

    def follow_next(self) -> bool:
        """This rank is out of batches: follow what the others do next.

        Returns:
            False: all ranks are out.
        """
        self._run_together()
        chosen = self.state.choose(OUT)
        if chosen is not None:
            self._take_part(chosen)
        return chosen is not None

    def finish(self, is_last: bool) -> None:
        """All ranks are out of batches. Collective.

        Args:
            is_last: whether this rank was not out before the others.
        """
        self.state.choose(OUT, is_last=is_last)

    def _follow(self, runs: bool) -> Follower:
        """Let ranks agree on each collective until `_run_together`."""
        root = self._root
        self._follower = Follower(root, self.state, runs)
        if self._optional is not None:
            self._optional.end(root)
        root.scheduler.agree(self._follower, ExecOrderRecorder())
        root.reducer.agreed = self._follower
        return self._follower

    def _run_together(self) -> None:
        """The pass is over; all ranks run the next one, unless they say otherwise."""
        if self._follower is None:
            return
        root, self._follower = self._root, None
        root.scheduler.agree(None)
        root.reducer.agreed = None
        if self._optional is not None:
            self._optional.begin(root)

    def exit_call(self, call: ForwardCall, outputs: object, is_outermost: bool) -> None:
        if is_outermost and self._follower is not None and not self._context.in_backward:
            self._follower.finish()

    def end_backward(self, forwards: Iterable[ForwardPass]) -> None:
        if self._follower is not None:
            first = min((each.start for each in forwards), default=0)
            for unit in self._units:
                # Of calls without a backward; ranks that follow have none, and the next pass
                # reduces alike.
                unit.keep_starts(0, first)
                if unit.is_held(_FIRST):
                    unit.free(_OF_A_STEP)  # Only ranks that run the pass keep it.

    def before_forward(self, unit: Unit, forward_pass: ForwardPass) -> None:
        if self.state.is_abandoned or not self.state.is_enabled():
            self.leave()
            return
        kind = Kind.FORWARD if self._root.reducer.requires_sync else Kind.MICRO_FORWARD
        if not torch.is_grad_enabled():
            kind = Kind.EVALUATION
        self.come_to(Request(kind, unit.index, unit.module.training))
        self._note_forward(forward_pass)

    def _note_forward(self, forward_pass: ForwardPass) -> None:
        self.state.makes_graph = torch.is_grad_enabled()
        self._num_forwards += 1
        self._forwards[self._num_forwards] = forward_pass
        self._forwards.pop(self._num_forwards - _MAX_FORWARDS, None)

    def before_backward(self, order: tuple[int, ...]) -> None:
        if not self._root.scheduler.recorder.is_recording:
            # -1: a forward from outside the join.
            found = (n for n, each in self._forwards.items() if each.order is order)
            syncs = self._root.reducer.requires_sync
            self.come_to(Request(Kind.BACKWARD, next(found, -1), requires_sync=syncs))

    def come_to_step(self, optimizer: torch.optim.Optimizer, closure: object) -> None:
        """Before `optimizer.step`, of any optimizer of the process."""
        if self.state.is_following or self.state.is_abandoned or is_narrowed(optimizer):
            return
        if all(each is not optimizer for each in self.state.optimizers.all):
            own = {id(sharded) for unit in self._units for sharded in unit.sharded_params}
            if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step inside a join that does not have this "
                    "optimizer, so ranks without batches would not step: pass every optimizer of "
                    "the model to layerzero.join"
                )
            return  # It is of another model.
        if closure is not None:
            raise NotImplementedError(
                f"{type(optimizer).__name__}.step(closure) inside a join: ranks without batches "
                "have no closure; run forward and backward before step()"
            )
        scaler = scaler_that_calls()
        if scaler is not None and scaler.is_enabled():
            refuse_scaler(optimizer)
        self.come_to(Request(Kind.STEP, self.state.optimizers.all.index(optimizer)))

    def before_clip(self, unit: Unit, max_norm: float, norm_type: float) -> None:
        """`clip_grad_norm_` begins, of the module of `unit`."""
        options = {"max_norm": bits_of(max_norm), "norm_type": bits_of(norm_type)}
        self.come_to(Request(Kind.CLIP, unit.index, **options))

    def before_call(self, what: str) -> None:
        if what == "rewrap":
            raise RuntimeError("rewrap: the model is inside a join; leave that first")
        if what == "micro_batches":
            raise NotImplementedError(
                "join: does not work around pipeline stages or micro_batches()"
            )
        if what == "reduce_gradients":
            self.come_to(Request(Kind.REDUCE))
        else:
            self.come_to(Request(Kind.CALL), what)

    def _take_part(self, request: Request) -> None:
        state, root = self.state, self._root
        state.is_following = True
        grad_enabled = request.kind != Kind.EVALUATION
        try:
            with torch.set_grad_enabled(grad_enabled):
                if request.kind in FOLLOWED:
                    self._follow(runs=False)
                if request.kind in FORWARDS:
                    self._follow_forward(self._units[request.which], request, grad_enabled)
                elif request.kind == Kind.BACKWARD:
                    self._follow_backward(request)
                elif request.kind == Kind.CLIP:
                    self._follow_clip(request)
                elif request.kind == Kind.REDUCE:
                    on_request.reduce_waiting(root)
                elif request.kind == Kind.STEP:
                    state.optimizers.all[request.which].step()
        except BaseException as error:
            root.abort(error)
            raise
        finally:
            self._run_together()
            state.is_following = False

    def _follow_forward(self, unit: Unit, request: Request, grad_enabled: bool) -> None:
        root = self._root
        forward_pass = ForwardPass(root.clock)
        self._note_forward(forward_pass)
        if root.has_forward_checks:
            check_first_forward(root.units, root.device)
            root.has_forward_checks = False
        root.context.note_weights()
        root.scheduler.begin_forward(unit, weights_may_have_changed=not root.reducer.kept.adds_up)
        assert self._follower is not None, "of this pass"
        self._follower.finish()
        root.context.wait_for_uploads()
        forward_pass.order = root.scheduler.end_forward(grad_enabled)

    def _follow_backward(self, request: Request) -> None:
        reducer = self._root.reducer
        before = reducer.requires_sync
        reducer.set_requires_sync(bool(request.requires_sync))
        try:
            own = self._forwards.get(request.which)
            self._backward.run_without_graph(ForwardPass(own.start if own else self._root.clock))
        finally:
            reducer.set_requires_sync(before)

    def _follow_clip(self, request: Request) -> None:
        module = self._units[request.which].module
        units = self._root.units_inside(module)
        whole = [each for each in module.parameters() if get_info(each) is None]
        max_norm, norm_type = number_of(request.max_norm), number_of(request.norm_type)
        clip_grad_norm_(Clipped(self._root, units, whole), max_norm, norm_type)
