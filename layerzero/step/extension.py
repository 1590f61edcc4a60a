"""Extension, the way in for features: the engine calls its methods at fixed places.

A feature defines the methods that it needs of `Extension`. While a model is built, the extensions
of its `WrapPlan` are called; what takes part in steps is in `RootState.extensions`. Each event is a
tuple of methods, so an unused one costs a loop over an empty tuple. The order is that of the list,
the same on all ranks.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from layerzero.comm import collectives
from layerzero.flat.placement import Placement

E = TypeVar("E", bound="Extension")
_Events = tuple[Callable[..., Any], ...]


class Transport:
    """How bytes of parameters and gradients travel: the collectives themselves. An extension that
    is a subclass takes their place."""

    all_gather = staticmethod(collectives.all_gather)
    reduce_scatter = staticmethod(collectives.reduce_scatter)


class Extension:
    """A feature of one model. Methods that it does not define are not called. `unit` is a `Unit`,
    which lies above this file.

    The first six take part in construction, in this order.
    """

    def groups(self) -> Mapping[int, Any]:
        """The process group of each unit that only some of the model's ranks have, keyed by the id
        of its `UnitPlan`."""

    def compared(self) -> Mapping[str, Sequence[str]]:
        """Rows that must be the same on all ranks, by section of build/compare.py."""

    def place(self, placement: Placement, make: Any, device: Any) -> Mapping[int, Placement]:
        """The placement of each unit in `groups`, keyed as there. All ranks agree on the plan;
        nothing is built yet. Collective over the model's ranks. `placement` is the whole model's;
        `make` makes that of units with one of these groups."""

    def has_value(self, label: str, value: torch.Tensor, placement: Placement) -> None:
        """A parameter or buffer of the ranks of `placement`, before it is sharded. Not collective.
        `label`: its kind and name."""

    def new_unit(self, unit: Any) -> None:
        """A unit is made; its hooks are not installed yet."""

    def built(self, root: Any) -> None:
        """The model, of this `RootState`, is built. Collective over its ranks."""

    def exit_call(self, call: Any, outputs: object, is_outermost: bool) -> None:
        """The forward of a `ForwardCall` has returned these outputs, recomputations included."""

    def before_forward(self, unit: Any, forward_pass: Any) -> None:
        """A forward of the model begins with a call of `unit`, outside of backward; nothing is
        gathered yet."""

    def before_first_forward(self) -> None:
        """Before the first forward of the model, and the first after its parameters were emptied or
        moved; also on a rank that only takes part in it."""

    def before_backward(self, forward_pass: Any) -> None:
        """A backward of the model begins, through this `ForwardPass` first."""

    def between_passes(self, what: str) -> None:
        """A collective call, `what`, begins that is no part of a forward or backward."""

    def before_use(self, unit: Any) -> None:
        """A unit is used next; unless it is unsharded, it is gathered then, if not here."""

    def before_reduction(self, unit: Any) -> bool:
        """A backward is done with a unit. Returns whether this rank reduces its gradients now."""

    def before_delivery(self, forwards: Any) -> None:
        """A backward through these `ForwardPass`es ends, or `reduce_gradients` without any. The
        gradients are not delivered yet; more units may be reduced."""

    def exchange_presence(self, reductions: Any) -> Callable[[], Any] | None:
        """Exchange it as presence.py does, for these `Reduction`s. None leaves it to the engine."""

    def end_backward(self, forwards: Any) -> None:
        """A backward through these `ForwardPass`es has ended; units are not freed yet."""

    def before_write(self, reductions: Any) -> bool:
        """All `Reduction`s of a backward are done, and no `.grad` is written yet. Returns whether
        to drop these gradients, the same on every rank; or raises on all."""

    def deliver(self, delivery: Any, parts: Any) -> None:
        """Deliver the `Part`s of a backward, in the order of issue, and use the gradients up; in
        the place of the engine."""

    def kept_micro_batch(self) -> None:
        """A backward is complete, and its gradients wait for a later one."""

    def weights_written(self) -> None:
        """Main shards may have been written since the last gather."""

    def after_abort(self) -> None:
        """The model has returned to the state between steps, after an error."""

    def before_abort(self, error: BaseException | None) -> None:
        """The pass is about to be dropped, after an error or an interrupt."""

    def begin_call(self, unit: Any) -> None:
        """The outermost call of a unit begins, outside of backward; the unit is unsharded."""

    def end_call(self, unit: Any) -> None:
        """The outermost call of a unit has ended; the unit is still unsharded."""

    def call_raised(self, unit: Any, error: BaseException) -> None:
        """A forward of `unit` raises this error."""

    def after_forward(self) -> RuntimeError | None:
        """The forward has ended, and units were freed. Returns an error to raise, or None."""

    def trainable_changed(self, unit: Any) -> None:
        """Other parameters of the unit require grad than before."""

    def begin_backward(self, unit: Any) -> None:
        """The backward of a call of `unit` begins; the unit is unsharded."""

    def reduce(self, unit: Any, handle: Any, group: Any, scale: float) -> torch.Tensor | None:
        """Gradients of a `FlatParamHandle` are in the buffer of its `gradients`, to be summed over
        `group`, the first of a reduction. Returns this rank's chunk of the sum, times `scale`; None
        leaves it to the engine. Runs on the reduce stream."""

    def reduced(self, unit: Any, chunk: torch.Tensor) -> None:
        """The gradients of a unit are reduced, and not delivered yet. May write the chunk, on the
        reduce stream. With this method, the host waits for reductions on CPU."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A `Buffer`, whose storage this is, was allocated or freed, on whichever thread."""

    def timer(self, verb: str, group: Any, number: int) -> object:
        """The timer (pending.py) of a collective that is named now, unless it is one of tensor
        parallelism. `number`: its number in the model; of experts negative."""

    def begin_action(self, action: str, unit: str) -> None:
        """The engine begins to do something for the unit with this label: the ranges of
        docs/howto/profile.md. An extension has both this method and `end_action`, or neither."""

    def end_action(self, action: str, unit: str) -> None:
        """The action has ended. Not called if it raised; then `before_abort` is."""


_EVENTS = [(name, own) for name, own in vars(Extension).items() if not name.startswith("_")]


class Extensions:
    """The extensions of one model; for each event, an attribute: the methods to call."""

    transport: Transport

    if TYPE_CHECKING:  # Only then: where a class has this, reading any attribute takes longer.

        def __getattr__(self, event: str) -> _Events: ...

    def __init__(self, extensions: Iterable[Extension] = (), of_buffers: Any = ()) -> None:
        self._all, self._of_buffers = [*extensions], of_buffers
        self._bind()

    def add(self, extension: Extension) -> None:
        self._all.append(extension)
        self._bind()

    def remove(self, extension: Extension) -> None:
        self._all.remove(extension)
        self._bind()

    def of(self, kind: type[E]) -> list[E]:
        return [each for each in self._all if isinstance(each, kind)]

    def _bind(self) -> None:
        for event, own in _EVENTS:
            methods: _Events = ()
            for each in self._all:
                if getattr(type(each), event) is not own:
                    methods += (getattr(each, event),)
            setattr(self, event, methods)
        for events in self._of_buffers:
            events.bind(self.resized)
        self.transport = next((e for e in self._all if isinstance(e, Transport)), Transport())
