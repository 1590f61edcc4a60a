"""KeptStep: what the engine keeps of a step, and `.grad` meanwhile: sums, or that it is left out.

Gradients of micro-batches that are not reduced yet (`no_sync`) are no tensors of the shape of a
shard. A `WaitingGradient` stands for them, so that a program may scale or clear what it has
accumulated, as in torch. After a step that `on_nonfinite="skip"` leaves out, zeros stand there:
later backwards of that step are dropped, too, until the program clears its gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from layerzero.comm.streams import Streams
from layerzero.flat.gradient_sums import GradientSums
from layerzero.step.unit import Unit

_aten = torch.ops.aten
_VERBS: dict[Any, str] = {_aten.zero_.default: "zero_", _aten._foreach_zero_.default: "zero_"}
"""Writes that act on a whole sum alike, whatever part of it a rank shows."""
for _verb in ("mul_", "div_"):
    _one, _each = getattr(_aten, _verb), getattr(_aten, f"_foreach_{_verb}")
    for _write in (_one.Tensor, _one.Scalar, _each.Scalar, _each.ScalarList, _each.Tensor):
        _VERBS[_write] = _verb


class WaitingGradient(torch.Tensor):
    """A parameter's sum of earlier micro-batches, not reduced yet, as its `.grad`; has no memory.

    Reading gives this rank's part of what this rank added up (with `accumulation="sharded"`, of
    what the first hop summed). Multiplying and dividing by a number, and zeroing, act on all that
    waits. Other writes raise a RuntimeError. On a device, sums on the host block the host.
    """

    @staticmethod
    def __new__(
        cls, gradients: GradientSums, index: int, shard: torch.Tensor, streams: Streams
    ) -> WaitingGradient:
        own: WaitingGradient = torch.Tensor._make_wrapper_subclass(
            cls, shard.shape, dtype=shard.dtype, device=shard.device
        )
        return own

    def __init__(
        self, gradients: GradientSums, index: int, shard: torch.Tensor, streams: Streams
    ) -> None:
        """`index`: of the parameter, whose shard is `shard`."""
        self._before: torch.Tensor | None = None
        self._index = index
        self._streams = streams
        self._gradients_ref = weakref.ref(gradients)

    def stand_before(self, reduced: torch.Tensor | None) -> None:
        """The `.grad` of before: reduced gradients, to which the sum will be added."""
        self._before = reduced

    def _sums(self) -> list[torch.Tensor]:
        """Flat views of all that waits, in any order."""
        gradients = self._gradients_ref()
        if gradients is None:
            return []
        if gradients.host_sum is not None:
            self._streams.wait_on_host(self._streams.record_compute_event())
        before = [] if self._before is None else [self._before]
        return [*before, *(part for _, part in gradients.waiting(self._index))]

    def _read(self) -> torch.Tensor:
        value = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        gradients = self._gradients_ref()
        if gradients is not None:
            self._sums()  # Which waits for them.
            gradients.add_waiting_to(value, self._index)
        return value if self._before is None else value.add_(self._before)

    def drop(self) -> None:
        """The program has cleared or replaced it: the parameter has no gradient so far."""
        gradients = self._gradients_ref()
        if gradients is not None:
            self._sums()
            gradients.drop_waiting(self._index)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.detach.default:
            return args[0]
        kwargs = kwargs or {}
        if not any(map(_waits, _written(func, args, kwargs))):
            args, kwargs = tree_map_only(cls, cls._read, (args, kwargs))
            return func(*args, **kwargs)
        targets, *factor = args
        several = isinstance(targets, (list, tuple))
        factors = factor[0] if factor and isinstance(factor[0], (list, tuple)) else None
        has_elements = factor and isinstance(factor[0], torch.Tensor) and factor[0].numel() != 1
        if func not in _VERBS or has_elements:
            raise RuntimeError(
                f"{func}: .grad stands for gradients of no_sync, which are not reduced yet. Until "
                "the backward that reduces them, only clear it or multiply it by a number"
            )
        for place, target in enumerate(targets if several else [targets]):
            numbers = factor if factors is None else [factors[place]]
            for total in target._sums() if isinstance(target, cls) else [target]:
                here = [x.to(total.device) if isinstance(x, torch.Tensor) else x for x in numbers]
                getattr(total, _VERBS[func])(*here)
        return None if several else targets


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes, `out` among them."""
    known = func._schema.arguments if func._schema.is_mutable else ()
    given = {**{a.name: x for a, x in zip(known, args, strict=False)}, **kwargs}
    return [given.get(a.name) for a in known if a.alias_info and a.alias_info.is_write]


def _waits(written: Any) -> bool:
    several = written if isinstance(written, (list, tuple)) else [written]
    return any(isinstance(each, WaitingGradient) for each in several)


class _Placed(NamedTuple):
    parameter: nn.Parameter
    shown: torch.Tensor
    before: torch.Tensor | None


class KeptStep:
    """State of a step that one model keeps: gradients that wait, or that the step is left out."""

    is_skipping = False
    """Whether gradients are dropped, until an optimizer's step or `zero_grad`."""
    num_waiting = 0
    """Micro-batches whose gradients wait for their reduction."""
    _waiting_units: Sequence[Unit] = ()
    _skips_next = False
    _is_stepping = False
    """Whether an optimizer steps, for which it was hidden."""

    def __init__(self, units: Sequence[Unit], streams: Streams) -> None:
        """`units` is the root's list."""
        self._units = units
        self._streams = streams
        self._placed: list[_Placed] = []
        self._waiting: dict[nn.Parameter, WaitingGradient] = {}

    @property
    def adds_up(self) -> bool:
        """Whether earlier micro-batches wait; the same on every rank that runs the same passes."""
        return self.num_waiting > 0

    @property
    def is_any(self) -> bool:
        """Whether the step is left out, or earlier micro-batches wait."""
        return self.is_skipping or bool(self._placed) or self._is_stepping

    def skip(self) -> None:
        """Leave the step out, once the pass is complete."""
        self._skips_next = True

    def undo(self) -> None:
        """The pass has failed."""
        self._skips_next = self.is_skipping

    def end_pass(self, num_micro_batches: int, waiting: Sequence[Unit]) -> int:
        """The pass is complete.

        Args:
            num_micro_batches: that it has added.
            waiting: units whose gradients are not reduced by now, on any rank.

        Returns:
            Number of micro-batches in the sum.
        """
        self.is_skipping = self._skips_next
        total = self.num_waiting + num_micro_batches
        self.num_waiting = total if waiting else 0
        self._waiting_units = waiting
        return total

    def show(self) -> None:
        """Show in `.grad` what is kept of the step: also of one that failed, which may go on."""
        if self._placed:
            return
        if self.is_skipping:
            for sharded in (p for unit in self._units for p in unit.sharded_params):
                if sharded.requires_grad:
                    before = sharded.grad
                    self._put(sharded, torch.zeros_like(sharded) if before is None else before)
        elif self.adds_up:
            for handle in (handle for unit in self._waiting_units for handle in unit.handles):
                for index in handle.gradients.layout.trainable:
                    sharded = handle.sharded_params[index]
                    if sharded not in self._waiting:
                        self._waiting[sharded] = WaitingGradient(
                            handle.gradients, index, sharded.detach(), self._streams
                        )
                    self._waiting[sharded].stand_before(sharded.grad)
                    self._put(sharded, self._waiting[sharded])

    def _put(self, parameter: nn.Parameter, shown: torch.Tensor) -> None:
        self._placed.append(_Placed(parameter, shown, parameter.grad))
        parameter.grad = shown

    def hide(self) -> bool:
        """Remove what it shows, so that `.grad` is what was reduced, and drop the sums of
        parameters that the program has cleared; returns whether there was anything."""
        placed, self._placed = self._placed, []
        for parameter, shown, before in placed:
            if parameter.grad is shown:
                parameter.grad = before
            elif isinstance(shown, WaitingGradient):
                shown.drop()
        return bool(placed)

    def give_up_if_cleared(self) -> None:
        """Give the step up if the program has cleared all sums, or any gradient of a step that is
        left out."""
        cleared = (parameter.grad is not shown for parameter, shown, _ in self._placed)
        if self._placed and (any if self.is_skipping else all)(cleared):
            self.give_up()

    def give_up(self) -> None:
        """The program begins another step: drop what is kept of this one."""
        self.forget_sums()  # First: then there is nothing to clear parameter by parameter.
        self.hide()
        self._is_stepping = self.is_skipping = self._skips_next = False

    def forget_sums(self) -> None:
        """Drop the sums of earlier micro-batches."""
        for unit in self._units:
            for handle in unit.handles:
                handle.gradients.forget()
        self.num_waiting = 0
        self._waiting_units = ()

    def before_step(self) -> None:
        """An optimizer steps, and must not take what is kept for gradients."""
        self.give_up_if_cleared()
        self._is_stepping = self.hide()

    def after_step(self) -> None:
        self._is_stepping = self.is_skipping = self._skips_next = False
        self.show()
