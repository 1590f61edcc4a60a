"""WaitingGradient: stands in `.grad` for sums of micro-batches, which have not a shard's shape, so
that a program may scale or clear what it has accumulated, as in torch. And a reduction of these
sums without another backward."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from layerzero.comm.streams import Streams
from layerzero.flat.gradient_sums import GradientSums
from layerzero.flat.parameter_info import info_of
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState

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
    def __new__(cls, sharded: nn.Parameter, *_: object) -> WaitingGradient:
        own: WaitingGradient = torch.Tensor._make_wrapper_subclass(
            cls, sharded.shape, dtype=sharded.dtype, device=sharded.device
        )
        return own

    def __init__(
        self, sharded: nn.Parameter, gradients: GradientSums, index: int, streams: Streams
    ) -> None:
        """`index`: of the parameter, whose sums are in `gradients`."""
        self.before: torch.Tensor | None = None
        """The `.grad` of before: reduced gradients, to which the sum will be added."""
        self._index, self._range = index, info_of(sharded).range
        self._streams = streams
        self._gradients_ref = weakref.ref(gradients)

    def stand_before(self, reduced: torch.Tensor | None) -> WaitingGradient:
        """Take this for the reduced gradients."""
        self.before = reduced
        return self

    def _sums(self) -> list[torch.Tensor]:
        """Flat views of all that waits, in any order."""
        gradients = self._gradients_ref()
        if gradients is None:
            return []
        if gradients.host_sum is not None:
            self._streams.wait_on_host(self._streams.record_compute_event())
        before = [] if self.before is None else [self.before]
        return [*before, *(part for _, part in gradients.waiting(self._index))]

    def _read(self) -> torch.Tensor:
        value = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        gradients, (begin, end) = self._gradients_ref(), self._range
        self._sums()  # Which waits for them.
        for start, part in () if gradients is None else gradients.waiting(self._index):
            first, last = max(start, begin), min(start + part.numel(), end)
            if first < last:
                target = value.view(-1)[first - begin : last - begin]
                target.add_(part[first - start : last - start].to(value.device))
        return value if self.before is None else value.add_(self.before)

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
        if not any(isinstance(each, cls) for each in tree_leaves(_written(func, args, kwargs))):
            args, kwargs = tree_map_only(cls, cls._read, (args, kwargs))
            return func(*args, **kwargs)
        targets, *factor = args
        if func is _aten.add_.Tensor and torch._C._current_graph_task_id() != -1:
            # Autograd: the program has used the sharded parameter itself.
            reduced = 0 if targets.before is None else targets.before
            return targets.stand_before(reduced + factor[0])
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


@remembers_failure
def reduce_waiting(root: RootState) -> None:
    """Reduce, outside a backward pass, the gradients accumulated inside `no_sync`. Collective.

    All trainable units take part, because ranks may differ in which ones hold gradients.
    """
    root.check_between_steps(
        "reduce_gradients: called inside forward or backward; call it between them, or leave "
        "no_sync before the last backward"
    )
    root.before_call("reduce_gradients")
    reducer = root.reducer
    root.shown.follow_zero_grad()
    if not reducer.kept.adds_up:
        return
    on_main = root.streams.on_main()
    with reducer.syncing(True):
        try:
            # A fixed order, because no backward gives one that all ranks share.
            for unit in reversed(root.units):
                if unit.is_trainable:
                    reducer.reduce(unit)
            with on_main, root.context.profile("deliver", "model"):
                for before_delivery in root.extensions.before_delivery:
                    before_delivery(())
                root.shown.hide()
                reducer.deliver()
                reducer.commit()
                root.shown.show()
        except BaseException as error:
            root.abort(error)
            raise
