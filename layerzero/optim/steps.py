"""Looks at each step of a torch optimizer, before and after it.

A model wrapped, or a `summon_full_params` left, since the last step may have made its parameters
stale. After a collective failed `.grad` may be half written: the step is refused. Where the engine
keeps something of the step (`ShownStep`), the optimizer sees no gradient. After a step its writes
are counted (decision 0026).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_pre_hook

from layerzero.flat import parameter_info
from layerzero.optim import attach
from layerzero.optim.sharded_params import live_roots, owners
from layerzero.step.extension import Extension
from layerzero.step.root import RootState

_LOOKED = "_layerzero_looked"
"""Attribute of an optimizer: `num_marked` when its parameters were last looked at."""


class ShownStep(Extension):
    """Shows in `.grad` what a model keeps of a step, and follows what the program clears there.

    Gradients of micro-batches that wait (`no_sync`) have a stand-in (waiting_gradients.py). After a
    step that `on_nonfinite="skip"` leaves out, zeros stand there: later backwards of that step are
    dropped, too, until the program clears its gradients.
    """

    _is_stepping = False
    """Whether an optimizer steps, for which it was hidden."""

    def __init__(self, root: RootState) -> None:
        self._kept, self._units, self._streams = root.reducer.kept, root.units, root.streams
        self._placed: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor | None]] = []
        """Parameters with the `.grad` that each shows, and the one before."""
        self._waiting: dict[nn.Parameter, Any] = {}

    @property
    def is_any(self) -> bool:
        """Whether the step is left out, or earlier micro-batches wait."""
        return self._kept.is_skipping or bool(self._placed) or self._is_stepping

    def show(self, forwards: object = None) -> None:
        """Show in `.grad` what is kept of the step: also of one that failed, which may go on."""
        if self._placed:
            return
        if self._kept.is_skipping:
            own = (parameter for unit in self._units for parameter in unit.sharded_params)
            for sharded in (each for each in own if each.requires_grad):
                before = sharded.grad
                self._put(sharded, torch.zeros_like(sharded) if before is None else before)
        elif self._kept.adds_up:
            from layerzero.optim.waiting_gradients import WaitingGradient

            for handle in (each for unit in self._kept.waiting_units for each in unit.handles):
                for index in handle.gradients.trainable:
                    sharded = handle.sharded_params[index]
                    if sharded not in self._waiting:
                        self._waiting[sharded] = WaitingGradient(
                            sharded, handle.gradients, index, self._streams
                        )
                    self._put(sharded, self._waiting[sharded].stand_before(sharded.grad))

    def _put(self, parameter: nn.Parameter, shown: torch.Tensor) -> None:
        self._placed.append((parameter, shown, parameter.grad))
        parameter.grad = shown

    end_backward = after_abort = show

    def hide(self, forwards: object = None) -> None:
        """Remove what it shows, so that `.grad` is what was reduced."""
        placed, self._placed = self._placed, []
        for parameter, shown, before in placed:
            if parameter.grad is shown:
                waits = self._waiting.get(parameter) is shown
                parameter.grad = self._waiting[parameter].before if waits else before

    before_delivery = hide  # Not before: `zero_grad` may follow a pass that fails.

    def follow_zero_grad(self, *given: object) -> None:
        """Give the step up if the program has cleared all sums, or any gradient of a step that is
        left out; else drop the sums of parameters that it has cleared. Not amid a pass."""
        shown = [each for each in self._placed if each[0].grad is each[1]]
        if len(shown) < len(self._placed) and (self._kept.is_skipping or not shown):
            return self.give_up()
        for parameter, waiting, _ in self._placed:
            if parameter.grad is not waiting:
                self._waiting[parameter].drop()
        self._placed = shown

    before_forward = before_backward = follow_zero_grad  # type: ignore[assignment]

    def give_up(self) -> None:
        """The program begins another step: drop what is kept of this one."""
        self._kept.forget_sums()  # First: then there is nothing to clear parameter by parameter.
        self.hide()
        self._is_stepping = False
        self._kept.skip_no_more()

    def before_step(self) -> None:
        """An optimizer steps, and must not take what is kept for gradients."""
        self.follow_zero_grad()
        self._is_stepping = bool(self._placed)
        self.hide()

    def after_step(self) -> None:
        self._is_stepping = False
        self._kept.skip_no_more()
        self.show()


def watch(before_first: Callable[[], None]) -> None:
    """Look at optimizers and their steps from now on; see `attach.watch`."""
    attach.watch(before_first)
    _watch_steps()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_any_step)


def models_of(
    optimizer: torch.optim.Optimizer, are_meant: Callable[[RootState], bool]
) -> Iterator[RootState]:
    """Models of its parameters; those that are not meant cost little time."""
    for root in filter(are_meant, list(live_roots)):
        from layerzero.optim.in_backward import whole_groups

        own = {id(parameter) for group in whole_groups(optimizer) for parameter in group}
        if any(id(each.sharded_param) in own for each in owners(root)):
            yield root


@_disable_dynamo
def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    own = optimizer.__dict__
    if own.get(_LOOKED) != parameter_info.num_marked:
        own[_LOOKED] = parameter_info.num_marked
        attach.look_at(optimizer)
    waiting = own.get(attach.WAITING)
    while waiting:
        waiting[0](optimizer)
        waiting.pop(0)  # After the call: a function that raises does so at each step.
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    for root in [each for each in live_roots if each.join is not None]:
        root.join.before_step(optimizer, closure)


@attach.on_sharded_params
def _look_after_steps(optimizer: torch.optim.Optimizer) -> None:
    # Not in `_before_any_step`, before what joins do: there ranks may follow a backward of others
    # before this one steps.
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)


@_disable_dynamo
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step after a collective failed in the model of one of the parameters."""
    for root in models_of(optimizer, lambda root: root.operations.failure is not None):
        root.operations.refuse()
    for root in models_of(optimizer, _keeps_any):
        root.shown.before_step()


@_disable_dynamo
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # A step writes what has a gradient. torch's fused kernels (2.14) do not count that, nor do
    # kernels of other libraries, which write through addresses. Our own optimizers do.
    for group in () if hasattr(optimizer, "counts_writes") else optimizer.param_groups:
        written = [parameter for parameter in group["params"] if parameter.grad is not None]
        torch.autograd.graph.increment_version(written)
    for root in models_of(optimizer, _keeps_any):
        root.shown.after_step()


def _keeps_any(root: RootState) -> bool:
    return root.shown is not None and root.shown.is_any
