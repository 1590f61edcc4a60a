"""RunningJoin: a model inside a join, and Follower; see Note [How a rank follows]."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.algorithms.join import Join

from layerzero.flat.parameter_info import get_info
from layerzero.optim.in_backward import is_narrowed
from layerzero.optim.norm import Clipped, clip_grad_norm_
from layerzero.optim.scaler import refuse_scaler, scaler_that_calls
from layerzero.optim.steps import models_of
from layerzero.optim.waiting_gradients import reduce_waiting
from layerzero.optional.agreement import Agreement
from layerzero.optional.exchange import NOTHING, exchange_of
from layerzero.optional.optional_units import gather_with_others
from layerzero.step.backward import ForwardCall, ForwardPass
from layerzero.step.extension import Extension
from layerzero.step.operations import remembers_failure
from layerzero.step.reduction import Reduction
from layerzero.step.root import RootState
from layerzero.step.unit import ShardState, Unit
from layerzero.uneven.optimizers import JoinedOptimizers

_MAX_FORWARDS = 64
"""Forwards without a backward that are remembered."""


class Kind(enum.IntEnum):
    """Kinds of requests; the lowest is chosen first."""

    BACKWARD = 0
    MICRO_FORWARD = 1
    EVALUATION = 2
    FORWARD = 3
    CLIP = 4
    REDUCE = 5
    STEP = 6
    CALL = 7
    """Another collective call: ranks without batches cannot take part in it."""
    OUT = 8
    """The rank is out of batches."""
    LAST = 9
    """All ranks are, and this one was not before others."""


FORWARDS = (Kind.MICRO_FORWARD, Kind.EVALUATION, Kind.FORWARD)
FOLLOWED = (Kind.BACKWARD, *FORWARDS, Kind.REDUCE)
"""What ranks without a batch for it follow collective by collective."""


class Request(NamedTuple):
    """What a rank wants to do next. Ranks with equal requests do it together."""

    kind: int
    which: int = 0
    """Of the unit called or clipped, of the forward that backward runs through, of the optimizer in
    the join's list."""
    mode: int = True
    """Of a forward: whether its module is in training mode. Of a backward: 1 if gradients are
    reduced, and 2 more if it makes a graph of itself."""
    max_norm: float = 0.0
    """Arguments of `clip_grad_norm_`."""
    norm_type: float = 0.0


OUT = Request(Kind.OUT)
LAST = Request(Kind.LAST)


class Follower(Agreement, Extension):
    """One pass that only some ranks of a join run; the others follow each collective of it.

    Before each gather and each reduction, ranks exchange which one they want (`Agreement`). All
    take part in the lowest request: a rank that does not run the pass frees what it gathered at
    once, and brings to a reduction what it has of earlier micro-batches, or zeros. Nothing is
    prefetched, and no order is recorded, as ranks that only follow would not predict the same.
    """

    subject = "a pass inside a join"

    def __init__(self, root: RootState, runs: bool, num_averaged: int | None) -> None:
        """`runs`: whether this rank runs the pass. `num_averaged`: over so many ranks gradients are
        means; None: over all."""
        super().__init__(root)
        self._runs, self._num_averaged = runs, num_averaged
        self._reduced: set[Unit] = set()
        participate = root.optional is not None and root.optional.mean == "participants"
        self._of_participants: Mapping[int, str] = root.optional.region_of if participate else {}
        """Units, by index, whose gradients are means over the ranks that had one."""

    def before_use(self, unit: Unit) -> None:
        if unit.state is ShardState.SHARDED:
            self._request(2 * unit.index)
            self._take_part(2 * unit.index, is_used=True)

    def finish(self) -> None:
        """This rank wants nothing more: take part in what others want, until none does."""
        self._request(NOTHING)

    def _take_part(self, request: int, is_used: bool = False) -> None:
        unit = self._units[request // 2]
        if request % 2:
            self.take(unit)
            return
        for handle in unit.handles:
            handle.drop_post_forward_shard()  # Which ranks kept one may differ.
        gather_with_others(unit, is_used)

    def scale(self, reduction: Reduction, counts: dict[int, int]) -> None:
        if reduction.unit.index in self._of_participants:
            self.scale_to(reduction, counts)
        elif self._num_averaged is not None:
            present = [index for index, count in counts.items() if count]
            self.scale_to(reduction, dict.fromkeys(present, self._num_averaged))

    def before_reduction(self, unit: Unit) -> bool:
        if not self._context.in_backward or not self.sends(unit):
            return True
        if unit is not self._taken:
            if not self._runs:
                return False  # `before_delivery` comes to what waits here.
            self._request(2 * unit.index + 1)
        self._reduced.add(unit)
        return True

    def before_delivery(self, forwards: Iterable[ForwardPass]) -> None:
        """Take part in the rest of a backward; then reduce what waits on any rank, of earlier
        micro-batches."""
        if self._context.in_backward:
            self.finish()
        if self._reducer.requires_sync:
            units = [unit for unit in self._units if unit.is_trainable]
            self.settle(units, self._reduced if self._context.in_backward else units)


class RunningJoin(Extension):
    def __init__(
        self,
        root: RootState,
        optimizers: Sequence[torch.optim.Optimizer],
        averages_active: bool,
        is_torchs: bool = False,
    ) -> None:
        """Begin a join. Collective. `averages_active`: whether gradients are means over the ranks
        that are not out of batches. `is_torchs`: whether torch's `Join` is around the loop."""
        self.operations = root.operations
        self._root, self._units = root, root.units
        self._model_ref: Callable[[], Any] = root.wrapper_ref
        parameters = [each for unit in root.units for each in unit.sharded_params]
        self._optimizers = JoinedOptimizers(optimizers, parameters)
        self._averages_active, self._is_torchs = averages_active, is_torchs
        self._exchange = exchange_of(root)
        self._num_ranks = self._num_active = root.placements[0].num_ranks
        """Ranks; and those that were not out at the last exchange."""
        self._is_followed = False
        """Whether what was chosen last is run by some ranks only, or not alike by all."""
        self._have_own = False
        """Whether ranks may have forwards of their own since the last backward."""
        self._is_following = False
        """Whether this rank takes part in what others run."""
        self._follower: Follower | None = None
        """Consulted in the open pass, if not all ranks run it."""
        self._num_forwards = 0
        self._forwards: dict[int, ForwardPass] = {}
        """The latest forwards inside the join, by number."""
        own = len(optimizers), len(self._optimizers.state(looks=False))
        rows = self._exchange(own, "a join")
        if any(row != rows[0] for row in rows):
            raise ValueError(
                "join: optimizers differ between ranks; pass the same to each. On each, the number "
                f"of them, and of them and the options in their groups: {rows}"
            )
        root.join = self
        root.extensions.add(self)

    def leave(self) -> None:
        """The join is over, with or without an error. Not collective; may be called again."""
        if self._root.join is self:
            self._root.join = None
            self._run_together()
            self._root.extensions.remove(self)

    def come_to(self, request: Request, what: str) -> None:
        """This rank wants to do this next: follow others until all ranks have chosen it. As
        `_choose`, collective, and raises."""
        if self._is_following:
            return
        if self._is_torchs and not self._model_ref()._join_config.enable:
            self.leave()
            return
        self._run_together()
        while (chosen := self._choose(request, what)) != request:
            self._take_part(chosen)

    def follow_next(self) -> bool:
        """This rank is out of batches: follow what the others do next. Returns False
        once all ranks are out."""
        self._run_together()
        chosen = self._choose(OUT)
        if chosen != OUT:
            self._take_part(chosen)
        return chosen != OUT

    def finish(self, is_last: bool) -> None:
        """All ranks are out of batches. Collective. `is_last`: whether this rank was not out before
        the others."""
        self._choose(LAST if is_last else OUT)

    @remembers_failure
    def _choose(self, request: Request, what: str = "out of batches") -> Request:
        """Exchange requests, and return the one that all ranks follow. Collective. Raises on every
        rank if ranks came to different calls. `what`: this rank's call, in messages."""
        some_are_out = self._num_active < self._num_ranks
        looks = request == LAST or (some_are_out and request.kind not in (*FORWARDS, Kind.OUT))
        notified = None
        if self._is_torchs and request.kind < Kind.OUT:
            notified = Join.notify_join_context(self._model_ref())
        rows = self._exchange([*request, *self._optimizers.state(looks)], "a join")
        if notified is not None:
            notified.wait()
        requests = [Request(*map(int, row[:3]), *row[3 : len(request)]) for row in rows]
        others = [row for row, each in zip(rows, requests, strict=True) if each != OUT]
        if request == OUT and others:
            self._optimizers.follow([row[len(request) :] for row in others])
        running = [each for each in requests if each.kind < Kind.OUT]
        self._num_active = len(running)
        chosen = min(requests)
        # What every rank with batches left must do together.
        if chosen.kind >= Kind.FORWARD and any(each != chosen for each in running):
            self._end(what, "ranks of a join came to different calls")
        if chosen.kind == Kind.CALL and OUT in requests:
            self._end(what, "a call inside a join needs every rank, but some have no batches")
        is_backward = chosen.kind == Kind.BACKWARD
        followed = chosen.kind in FOLLOWED and any(each != chosen for each in requests)
        followed = followed or (is_backward and self._have_own)
        if (followed and not is_backward) or (self._is_followed and not followed):
            # Ranks that run a followed pass have other units resident and compute shards written.
            self._root.scheduler.free_all()
            for handle in (handle for unit in self._units for handle in unit.handles):
                handle.mark_stale()
        self._have_own = not is_backward and (self._have_own or followed)
        self._is_followed = followed
        if followed:
            self._follow(runs=chosen == request)
        return chosen

    def _end(self, what: str, error: str) -> NoReturn:
        """Raise on every rank, with what each one came to."""
        self.leave()
        texts = self._exchange.texts(what, "a join")
        found = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        raise RuntimeError(f"{error} ({found})")

    def _follow(self, runs: bool) -> None:
        """Let ranks agree on each collective until `_run_together`."""
        root = self._root
        self._follower = Follower(root, runs, self._num_active if self._averages_active else None)
        if root.optional is not None:
            root.optional.set_active(False)
        root.scheduler.set_aside_orders(True)
        root.extensions.add(self._follower)

    def _run_together(self) -> None:
        """The pass is over; all ranks run the next one, unless they say otherwise."""
        if self._follower is None:
            return
        root = self._root
        root.extensions.remove(self._follower)
        root.scheduler.set_aside_orders(False)
        self._follower = None
        if root.optional is not None:
            root.optional.set_active(True)

    def exit_call(self, call: ForwardCall, outputs: object, is_outermost: bool) -> None:
        if is_outermost and self._follower is not None:
            self._follower.finish()

    def end_backward(self, forwards: Iterable[ForwardPass]) -> None:
        self._optimizers.note_gradients()
        if self._follower is not None:
            first = min((each.start for each in forwards), default=0)
            for unit in self._units:
                # Of calls without a backward: ranks that follow have none.
                unit.keep_starts(0, first)

    def before_forward(self, unit: Unit, forward_pass: ForwardPass) -> None:
        # What a graph of a backward still reads (`create_graph`) is gathered again on this rank.
        alone = self._root.scheduler.holds_for_graph or not self._root.reducer.requires_sync
        kind = Kind.MICRO_FORWARD if alone else Kind.FORWARD
        if not torch.is_grad_enabled():
            kind = Kind.EVALUATION
        self.come_to(Request(kind, unit.index, unit.module.training), "a forward")
        self._note_forward(forward_pass)

    def _note_forward(self, forward_pass: ForwardPass) -> None:
        self._num_forwards += 1
        self._forwards[self._num_forwards] = forward_pass
        self._forwards.pop(self._num_forwards - _MAX_FORWARDS, None)

    def before_backward(self, forward_pass: ForwardPass) -> None:
        if not self._root.scheduler.recorder.is_recording:
            # -1: a forward from outside the join.
            found = (n for n, each in self._forwards.items() if each is forward_pass)
            mode = self._root.reducer.requires_sync + 2 * torch.is_grad_enabled()
            self.come_to(Request(Kind.BACKWARD, next(found, -1), mode), "a backward")

    def before_step(self, optimizer: torch.optim.Optimizer, closure: object) -> None:
        """Before `optimizer.step`, of any optimizer of the process."""
        if self._is_following or is_narrowed(optimizer):
            return
        joined = self._optimizers.all
        if all(each is not optimizer for each in joined):
            if any(models_of(optimizer, lambda root: root is self._root)):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step inside a join that does not have this "
                    "optimizer: pass every optimizer of the model to layerzero.join"
                )
            return  # It is of another model.
        if closure is not None:
            raise NotImplementedError(
                f"{type(optimizer).__name__}.step(closure) inside a join: call it without"
            )
        scaler = scaler_that_calls()
        if scaler is not None and scaler.is_enabled():
            refuse_scaler(optimizer)
        self.come_to(Request(Kind.STEP, joined.index(optimizer)), "optimizer.step")

    def before_clip(self, unit: Unit, max_norm: float, norm_type: float) -> None:
        """`clip_grad_norm_` begins, of the module of `unit`."""
        request = Request(Kind.CLIP, unit.index, True, float(max_norm), float(norm_type))
        self.come_to(request, "clip_grad_norm_")
        self._optimizers.are_clipped = True

    def between_passes(self, what: str) -> None:
        if what == "rewrap":
            raise RuntimeError("rewrap: the model is inside a join; leave that first")
        if what == "micro_batches":
            raise NotImplementedError(
                "join: does not work around pipeline stages or micro_batches()"
            )
        self.come_to(Request(Kind.REDUCE if what == "reduce_gradients" else Kind.CALL), what)

    def _take_part(self, request: Request) -> None:
        root = self._root
        self._is_following = True
        try:
            with torch.set_grad_enabled(request.kind != Kind.EVALUATION):
                if request.kind in FORWARDS:
                    self._follow_forward(self._units[request.which])
                elif request.kind == Kind.BACKWARD:
                    self._follow_backward(request)
                elif request.kind == Kind.CLIP:
                    self._follow_clip(request)
                elif request.kind == Kind.REDUCE:
                    reduce_waiting(root)
                elif request.kind == Kind.STEP:
                    self._optimizers.all[request.which].step()
        except BaseException as error:
            root.abort(error)
            raise
        finally:
            self._run_together()
            self._is_following = False

    def _follow_forward(self, unit: Unit) -> None:
        root = self._root
        forward_pass = ForwardPass(root.clock)
        self._note_forward(forward_pass)
        if root.has_forward_checks:
            root.check_parameters()
        root.context.note_weights()
        root.scheduler.begin_forward(unit, weights_may_have_changed=not root.reducer.kept.adds_up)
        assert self._follower is not None, "of this pass"
        self._follower.finish()
        root.context.wait_for_uploads()
        root.scheduler.end_forward(torch.is_grad_enabled())

    def _follow_backward(self, request: Request) -> None:
        root, own = self._root, self._forwards.get(request.which)
        root.shown.follow_zero_grad()
        with root.reducer.syncing(bool(request.mode % 2)):
            root.backward.run_without_graph(ForwardPass(own.start if own else root.clock))

    def _follow_clip(self, request: Request) -> None:
        module = self._units[request.which].module
        units = self._root.units_inside(module)
        whole = [each for each in module.parameters() if get_info(each) is None]
        clip_grad_norm_(Clipped(self._root, units, whole), request.max_norm, request.norm_type)
