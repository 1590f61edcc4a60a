"""Unit: one wrapped module, its flat parameters, and its state in the two state machines.

Everything here concerns a single unit; the order among units is decided above it.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from layerzero.config import MixedPrecision, ReshardAfterForward
from layerzero.flat.flat_param import ParameterViews
from layerzero.flat.flatten import OriginalParameter
from layerzero.flat.parameter_hooks import refuse_gradients
from layerzero.flat.unset_values import AwaitedBuffer
from layerzero.step.context import RuntimeContext
from layerzero.step.handle import FlatParamHandle


class ShardState(enum.Enum):
    """Which parameter memory of a unit is allocated and valid."""

    successors: tuple[ShardState, ...]
    """States that may follow. Not in a dict: hashing a member runs Python code."""
    SHARDED = "sharded"
    """Only the shard."""
    GATHERING = "gathering"
    """The shard, and a full buffer that is not valid yet."""
    UNSHARDED = "unsharded"
    """The shard, and a valid full buffer."""


class TrainingState(enum.Enum):
    """Where in the step a unit is."""

    successors: tuple[TrainingState, ...]
    IDLE = "idle"
    """None of the states below."""
    FORWARD = "forward"
    """Between pre_forward and post_forward."""
    BACKWARD = "backward"
    """Between pre_backward and the reduction of its gradients; includes recomputed forwards."""
    SUMMON_FULL_PARAMS = "summon_full_params"
    """Inside the context manager `summon_full_params`."""


class Hold(enum.IntFlag):
    """Reasons to keep a unit unsharded, shown as `.holds` of `layerzero.units`.

    A unit with none is freed after its use.
    """

    LAST_OF_FORWARD = 1
    """The unit ran last; see Note [One unit stays] in scheduler.py."""
    FIRST_OF_FORWARD = 2
    """First of the next micro-batch; see Note [The first unit stays between micro-batches]."""
    POLICY = 4
    """`reshard_after_forward=False`: kept from its forward to its backward."""
    EXPLICIT = 8
    """The user unsharded it: kept until its next forward or the next backward has ended."""
    MICRO_BATCHES = 16
    """Kept for a pipeline; see Note [Micro-batches in flight] in scheduler.py."""
    DOUBLE_BACKWARD = 32
    """A graph of the backward (`create_graph`) reads it again."""
    OPTIONAL = 64
    """Ranks may skip it, and the backward of a forward that used it is still to come."""
    AFTER_BACKWARD = 128
    """`set_reshard_after_backward(False)`: kept until a forward with changed weights."""


# Names of their own: Python 3.11 takes 1,000 instructions to read a member off its enum, and a call
# of a unit reads 40.
SHARDED, GATHERING, UNSHARDED = ShardState
IDLE, FORWARD, BACKWARD, SUMMON_FULL_PARAMS = TrainingState
_state: Any
for _state, *_next in (
    *((SHARDED, GATHERING), (GATHERING, UNSHARDED), (UNSHARDED, SHARDED)),
    *((IDLE, FORWARD, BACKWARD, SUMMON_FULL_PARAMS), (FORWARD, IDLE), (BACKWARD, IDLE)),
    (SUMMON_FULL_PARAMS, IDLE),
):
    _state.successors = tuple(_next)


def check_transition(
    unit: str, current: ShardState | TrainingState, new: ShardState | TrainingState
) -> None:
    """Raise a RuntimeError with the unit and both states if `new` is no successor."""
    if new not in current.successors:
        raise RuntimeError(
            f"{unit}: {type(current).__name__} cannot go from {current.name} to {new.name}"
        )


UNIT = "_layerzero_unit"
_requires_grad_of = attrgetter("requires_grad")
_AFTER_BACKWARD = int(Hold.AFTER_BACKWARD)
_LASTING = int(Hold.MICRO_BATCHES | Hold.DOUBLE_BACKWARD) | _AFTER_BACKWARD
"""Holds that survive a reshard and the next gather: of all units at once, or of the user's."""


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """The arguments of `ZeRO3` that concern one unit."""

    mixed_precision: MixedPrecision
    reshard_after_forward: ReshardAfterForward
    gradient_scale: float
    deterministic: bool


class Unit:
    """A module whose parameters are gathered, used and freed together."""

    fqn: str
    """Name in the outermost wrapped module; "" for that module itself."""
    label: str
    """Name in messages."""
    context: RuntimeContext
    """State shared with the other units of the model; set by `join`."""
    handles: list[FlatParamHandle]
    """One flat parameter per kind (dtype, compute dtype, trainable or frozen)."""
    state: ShardState
    """Whether its full buffers are allocated and valid."""
    training_state: TrainingState
    """Where in the step it is; changed by `set_training_state`."""
    index = -1
    """Index in the root's list of units, under which the recorder records it."""
    nbytes: int
    """Bytes of the full buffers while gathered, in the compute dtype, padding included."""
    depth = 0
    """Number of running forward calls of this unit, nested ones included."""
    shows_unsharded = False
    """Whether module attributes are the unsharded parameters."""
    is_trainable: bool
    """Whether any parameter requires grad."""
    input_dtype: torch.dtype | None
    """Dtype that floating-point inputs are cast to; None: no cast."""
    output_dtype: torch.dtype | None = None
    """Dtype that floating-point outputs are cast to; None: no cast."""
    open_starts: set[int]
    """Start times of forward calls with gradients whose backward has not begun."""
    forward_prefetch: list[Unit] | None = None
    """Units that the user set to gather when its forward begins; None: the recorder's."""
    backward_prefetch: list[Unit] | None = None
    """The same for its backward."""
    awaits_values = was_built_empty = False
    """Whether a load has yet to bring its values; whether it waits since built, as on all ranks."""
    was_loaded = False
    """Whether a load has written values: numbers that repeat among them were not drawn here."""
    awaited_buffers: tuple[AwaitedBuffer, ...] = ()
    """Buffers whose values the same load brings."""
    comm_hooks: Mapping[str, Callable[..., Any]] = {}
    """A user's code "instead" of its reduce-scatter and "after" its reduction: CommHooks."""
    is_optional = False
    """Whether ranks may skip it (`optional_modules`)."""
    may_prefetch: bool
    """Whether it may be gathered before it is needed."""
    tied_owners: tuple[Unit, ...] = ()
    """Units that hold tied parameters which modules inside this unit use, too."""
    used_on: list[Any]
    """Streams of the program that its calls compute on, since it was gathered; on CPU [None]."""
    _is_watched = False
    """Whether gradients of its unsharded parameters are reported from outside its forward, too."""
    state_dict_hooks: list[RemovableHandle]
    """Handles of the state-dict hooks on the modules that show its parameters."""
    _holds = 0
    _is_counted = True
    """Whether the budget for prefetching counts its full buffers."""
    _has_followed = True
    """Whether gradients are reduced of the parameters that require grad, and no others."""

    def __init__(
        self,
        fqn: str,
        module: nn.Module,
        handles: list[FlatParamHandle],
        originals: Sequence[Sequence[OriginalParameter]],
        options: UnitOptions,
    ) -> None:
        """`originals`: for each of `handles`, the parameters it was made of."""
        self.fqn = fqn
        self.label = fqn or "the root unit"
        self.state, self.training_state = SHARDED, IDLE
        self.handles = handles
        self.options = options
        self.views = ParameterViews()
        self.nbytes = sum(handle.full_nbytes for handle in handles)
        self.may_prefetch = bool(handles)
        self.state_dict_hooks = []
        self.open_starts = set()
        self.used_on = []
        self.move_to(module)
        self._owner_refs: list[weakref.ref[nn.Module]] = []
        self._forms = self.sharded_params, [p for h in handles for p in h.unsharded_params]
        for handle, group in zip(handles, originals, strict=True):
            for original, sharded, full in zip(
                group, handle.sharded_params, handle.unsharded_params, strict=True
            ):
                self.views.add(original.slots, sharded, full)
                for slot in original.slots:
                    self.add_owner(slot.module)
                refuse_gradients(original.parameter, original.fqn)
        self._required_grad = [*map(_requires_grad_of, self._forms[0])]
        self.views.show({})
        self._follow_trainable()

    def __del__(self) -> None:
        # Its memory returns to the pools of several streams, whatever is still queued on others.
        if self.has_joined:
            self.context.before_deletion()

    @property
    def module(self) -> nn.Module:
        module = self._module_ref()
        if module is None:
            raise RuntimeError(f"{self.label}: its module was deleted")
        return module

    def move_to(self, module: nn.Module) -> None:
        """Take `module` for the unit's own from now on."""
        self._module_ref = weakref.ref(module)
        self.input_dtype = self.options.mixed_precision.input_dtype(module)

    @property
    def owners(self) -> list[nn.Module]:
        """The unit's own module, and every module that shows one of its parameters."""
        found = (reference() for reference in (self._module_ref, *self._owner_refs))
        return [*{id(module): module for module in found if module is not None}.values()]

    def add_owner(self, module: nn.Module) -> None:
        self._owner_refs.append(weakref.ref(module))

    @property
    def sharded_params(self) -> list[nn.Parameter]:
        """This rank's sharded parameters of the unit, as `parameters()` returns them."""
        return [sharded_param for handle in self.handles for sharded_param in handle.sharded_params]

    def owns(self, tensor: torch.Tensor | None) -> bool:
        """Whether `tensor` is one of its unsharded parameters."""
        return any(each is tensor for each in self._forms[1])

    @property
    def num_parameters(self) -> int:
        """Elements of all original parameters (of DTensors the local ones), without padding."""
        return sum(sum(handle.layout.numels) for handle in self.handles)

    def __repr__(self) -> str:
        names = "|".join(hold.name or "" for hold in Hold if self.is_held(hold))
        held = f", held: {names}" if names else ""
        return (
            f"Unit({self.label!r}, {type(self.module).__name__}, "
            f"{self.num_parameters} parameters, {self.state.value}{held})"
        )

    def set_training_state(self, new: TrainingState) -> None:
        if new not in self.training_state.successors:
            check_transition(self.label, self.training_state, new)
        self.training_state = new

    def _set_shard_state(self, new: ShardState) -> None:
        if new not in self.state.successors:
            check_transition(self.label, self.state, new)
        self.state = new

    @property
    def has_joined(self) -> bool:
        """Whether it is part of a model; otherwise it has no `context`."""
        return "context" in self.__dict__

    def join(self, context: RuntimeContext, index: int) -> None:
        """Become unit `index` of the model whose units share `context`."""
        self.context = context
        self.index = index

    def rename(self, prefix: str) -> None:
        """The module became part of another: put `prefix` before every name."""
        self.fqn = f"{prefix}.{self.fqn}" if self.fqn else prefix
        self.label = self.fqn or "the root unit"
        for handle in self.handles:
            handle.rename(prefix)

    def set_options(self, **changed: Any) -> None:
        self.options = replace(self.options, **changed)

    def set_optional(self, is_optional: bool) -> None:
        self.is_optional = is_optional
        # Whether any rank needs an optional unit is undecided before its call.
        self.may_prefetch = bool(self.handles) and not is_optional

    def before_load(self) -> None:
        """A load is about to write its values; unsharded parameters have the old ones."""
        self.reshard()
        self.was_loaded = True

    def mark_loaded(self) -> None:
        self.awaits_values, self.was_built_empty, self.awaited_buffers = False, False, ()

    def enter_forward(self) -> None:
        """A forward call begins; inside a backward pass it is a recomputation."""
        if self.training_state is IDLE:
            self.set_training_state(FORWARD)
        self.depth += 1

    def leave_forward(self, hides: bool) -> None:
        """A forward call has returned or raised. Unless `hides`, a unit that stays until its
        backward is shown until the outermost call ends: a tied head may use its parameters."""
        if self.depth:
            self.depth -= 1
        if self.depth == 0 and self.training_state is FORWARD:
            self.set_training_state(IDLE)
            if hides or self.options.reshard_after_forward:
                self.show_sharded()

    def keep_starts(self, first: int, last: float = inf) -> None:
        """Drop forward calls that began before or after: backward has passed them, or their forward
        failed, and their backward never runs."""
        if self.open_starts:
            self.open_starts = {start for start in self.open_starts if first <= start <= last}

    @property
    def is_stale(self) -> bool:
        """Whether a main shard has changed since the last gather, by torch's version counters.

        Writes through `.data` do not count as changes.
        """
        return any(handle.is_stale for handle in self.handles)

    def takes_over_data(self) -> bool:
        """Take over data that the user assigned to sharded parameters; True if any."""
        # A list, not a generator, which would stop at the first True.
        return any([handle.reset_sharded_params(self.label) for handle in self.handles])

    def unshard(self, behind_reductions: bool = False) -> None:
        """Start gathering the unsharded parameters. Collective over the shard group.

        Does not block the host. Does nothing if they are resident or being gathered.

        Args:
            behind_reductions: on CPU, allocate and start once the reductions in flight are done.
        """
        if self.state is not SHARDED:
            return
        context = self.context
        for handle in self.handles:
            # Weights do not change in backward, but a program may swap them for an evaluation
            # between forward and backward.
            may_be_assigned = handle.was_assigned or not context.in_backward
            if may_be_assigned and handle.reset_sharded_params(self.label):
                context.note_weights()
        self._set_shard_state(GATHERING)
        self.used_on = []
        # Ranks may differ in optional units, and prefetch alike.
        self._is_counted = not self.is_optional
        if self._is_counted:
            context.limiter.acquire(self.nbytes)
        with context.profile("unshard", self.label):
            for handle in self.handles:
                handle.unshard(context, self.label, behind_reductions)

    def wait_for_unshard(self) -> None:
        """Order compute, on the current stream, after the gather. Blocks the host only on devices
        without streams."""
        stream = self.context.streams.current()
        if self.state is SHARDED or stream in self.used_on:
            return
        with self.context.profile("wait_for_unshard", self.label):
            known = () if stream is None else (stream,)
            for handle in self.handles:
                handle.wait_for_unshard(*known)
        self.used_on.append(stream)
        if self.state is GATHERING:
            self._set_shard_state(UNSHARDED)

    def reshard(self, regathered_this_step: bool = False) -> None:
        """Free the unsharded parameters, regardless of holds. Waits for a gather under way first.

        Args:
            regathered_this_step: the same weights will be gathered again.
        """
        self._holds &= _LASTING
        if self.state is SHARDED:
            return
        if self.shows_unsharded:
            self.show_sharded()
        if self._is_watched or self.state is GATHERING:
            self.wait_for_unshard()  # The program may have used it outside of calls.
        context = self.context
        with context.profile("reshard", self.label):
            if regathered_this_step and self.options.reshard_after_forward == "compute_shard":
                with context.streams.on_main(self.used_on):
                    for handle in self.handles:
                        handle.keep_shard()
            context.before_free(self.used_on)
            for handle in self.handles:
                handle.reshard()
        if self._is_counted:
            context.limiter.release(self.nbytes)
        self._set_shard_state(SHARDED)

    @property
    def holds(self) -> Hold:
        """The reasons to keep it unsharded; without any it is freed after its use."""
        return Hold(self._holds)

    def is_held(self, reasons: int) -> bool:
        """Whether any of these `Hold`s keeps it unsharded."""
        return bool(self._holds & reasons)

    def hold(self, reasons: int) -> None:
        self._holds |= reasons

    def end_hold(self, reasons: int) -> None:
        """End these `Hold`s. Frees nothing; see `free`."""
        self._holds &= ~reasons

    def free(self, ended: int = 0, regathered_this_step: bool = False) -> None:
        """Free the unsharded parameters if no hold is left. The one rule for freeing.

        Args:
            ended: `Hold`s to end first.
            regathered_this_step: see `reshard`.
        """
        self._holds &= ~ended
        if not self._holds:
            self.reshard(regathered_this_step)

    def show_unsharded(self) -> None:
        """Make module attributes the unsharded parameters (valid after `wait_for_unshard`)."""
        if self.shows_unsharded:
            return
        if not self.context.in_backward:
            self.follow_requires_grad()
        self.context.replaced.extend(self.views.swap(to_full=True))
        self.shows_unsharded = True

    def show_sharded(self) -> None:
        """Make module attributes this rank's sharded parameters."""
        if self.shows_unsharded:
            if not self.context.in_backward:
                self.follow_requires_grad()  # A forward may freeze what it used.
            self.context.replaced.extend(self.views.swap(to_full=False))
            self.shows_unsharded = False

    def follow_requires_grad(self, begins_backward: bool = False) -> None:
        """Where `requires_grad` of what modules show was changed, change that of the other form.

        A backward that begins reduces gradients of what requires grad by now.
        """
        now = [*map(_requires_grad_of, self._forms[self.shows_unsharded])]
        if now != self._required_grad:
            for sharded, unsharded, requires_grad in zip(*self._forms, now, strict=True):
                sharded.requires_grad_(requires_grad)
                unsharded.requires_grad_(requires_grad)
            self._required_grad, self._has_followed = now, False
        if begins_backward and not self._has_followed:
            self._follow_trainable()

    def _follow_trainable(self) -> None:
        """Reduce gradients of the parameters that require grad now, and of those that earlier
        micro-batches of the step have gradients of."""
        root: Any = self.context.owner() if self.has_joined else None
        adds_up = root is not None and root.reducer.kept.adds_up
        self._has_followed = True
        for handle in self.handles:
            former = handle.gradients.trainable if adds_up else ()
            leaves = enumerate(handle.unsharded_params)
            now = {index for index, each in leaves if each.requires_grad}
            # If not: once those are reduced, without them.
            self._has_followed = self._has_followed and now.issuperset(former)
            handle.gradients.trainable = tuple(sorted(now.union(former)))
        self.is_trainable = any(h.gradients.trainable for h in self.handles)
        for trainable_changed in () if root is None else root.extensions.trainable_changed:
            trainable_changed(self)

    def watch_gradients(self) -> None:
        """Have backward take gradients from outside the unit's forward, too."""
        unit_ref = weakref.ref(self)

        def on_gradient(_: torch.Tensor) -> None:
            unit = unit_ref()
            if unit is not None:
                root: Any = unit.context.owner()  # Perhaps another by now.
                if root is None:
                    raise RuntimeError(f"{unit.label}: the wrapped model around it was deleted")
                root.backward.on_unsharded_gradient(unit)

        for unsharded in () if self._is_watched else self._forms[1]:
            if unsharded.requires_grad:
                unsharded.register_post_accumulate_grad_hook(on_gradient)
        self._is_watched = True

    def drop_unsharded_gradients(self) -> None:
        for unsharded in self._forms[1]:
            unsharded.grad = None

    def reset(self) -> None:
        """Return to the state between steps, after an error; sums of earlier micro-batches stay."""
        self.depth = 0
        self._holds &= _AFTER_BACKWARD
        for handle in self.handles:
            handle.gradients.undo()
            handle.drop_post_forward_shard()
        self.drop_unsharded_gradients()
        self.show_sharded()
        self.reshard()
        if self.training_state is not IDLE:
            self.set_training_state(IDLE)


def get_unit(module: nn.Module) -> Unit | None:
    """The unit of a wrapped module; None for a module that is not a unit."""
    return module.__dict__.get(UNIT)


def unset_unit(module: nn.Module) -> None:
    module.__dict__.pop(UNIT, None)


def set_unit(module: nn.Module, unit: Unit) -> None:
    """Attach a unit to its module. The module owns it; the unit references the module weakly."""
    module.__dict__[UNIT] = unit
