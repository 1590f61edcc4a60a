"""Unit: one wrapped module, its flat parameters, and its place in the two state machines.

Everything here is about one unit; who calls it, and in which order, is the root's business.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from layerzero.comm.collectives import Operation, all_gather
from layerzero.comm.streams import Mark, Waitable
from layerzero.config import MixedPrecision, ReshardAfterForward
from layerzero.core.flat_param import FlatParamHandle, OriginalParameter
from layerzero.core.groups import ShardGroup
from layerzero.core.parameter_info import rename
from layerzero.core.views import ParameterViews
from layerzero.runtime import piece_gradients, saved_casts
from layerzero.runtime.saved_casts import SavedCast
from layerzero.runtime.states import ShardState, TrainingState, check_transition

if TYPE_CHECKING:
    from layerzero.runtime.awaited import AwaitedBuffer
    from layerzero.runtime.root import RootState, UnshardHandle

_UNIT = "_layerzero_unit"


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """What one unit needs to know of the arguments of `ZeRO3`."""

    mixed_precision: MixedPrecision
    reshard_after_forward: ReshardAfterForward
    gradient_scale: float
    deterministic: bool


class Unit:
    """A module whose parameters are gathered, used and freed together."""

    fqn: str
    """Name in the outermost wrapped module; "" for that module itself."""
    handles: list[FlatParamHandle]
    """One flat parameter per kind (dtype, compute dtype, trainable or frozen)."""
    views: ParameterViews
    index: int
    """Place in the root's list of units; what the recorder records."""
    nbytes: int
    """Bytes of the full parameters while gathered, in the compute dtype, padding included."""
    depth: int
    """Forward calls of this unit that are running."""
    shows_full: bool
    """Whether module attributes are the full leaves."""
    is_trainable: bool
    """Whether any parameter requires grad."""
    originals: list[tuple[str, weakref.ref[nn.Parameter]]]
    """Names, and the parameters as they were before wrapping, should somebody still hold them."""
    output_dtype: torch.dtype | None
    """What floating-point outputs are cast to."""
    open_starts: set[int]
    """Starts of forward calls with gradients whose backward has not begun."""
    saved_casts: dict[int, SavedCast]
    """Casts of its leaves that autograd saved under autocast, by id."""
    forward_prefetch: list[Unit] | None
    """What the user wants gathered when its forward begins; None: what the recorder predicts."""
    backward_prefetch: list[Unit] | None
    expected_in_forward: Sequence[Unit]
    """What is gathered when its forward begins in a pass of which no order is known yet."""
    expected_in_backward: Sequence[Unit]
    replaced: list[str]
    """Names of full parameters that a call of the module has put others in place of."""
    awaits_values: bool
    """Whether a load brings its parameters' values; looked at before the first forward alone."""
    awaited_buffers: tuple[AwaitedBuffer, ...]
    lenders: tuple[Unit, ...]
    """Units that hold tied parameters which modules inside this unit use too."""
    state_dict_hooks: list[RemovableHandle]
    """On the modules that show its parameters."""

    def __init__(
        self,
        fqn: str,
        module: nn.Module,
        handles: list[FlatParamHandle],
        originals: Sequence[Sequence[OriginalParameter]],
        options: UnitOptions,
    ) -> None:
        """`originals` are the parameters each of `handles` was made of."""
        self.fqn = fqn
        self.handles = handles
        self.options = options
        self.views = ParameterViews()
        self.index = -1
        self.nbytes = sum(handle.full_nbytes for handle in handles)
        self.depth = 0
        self.shows_full = False
        self.explicitly_unsharded = False
        self.lenders = ()
        self.replaced = []
        self.state_dict_hooks = []
        self.open_starts = set()
        self.saved_casts = {}
        self.output_dtype: torch.dtype | None = None
        self.originals = [
            (original.fqn, weakref.ref(original.parameter))
            for group in originals
            for original in group
        ]
        self.forward_prefetch = None
        self.backward_prefetch = None
        self.awaits_values = False
        self.awaited_buffers = ()
        self.expected_in_forward = ()
        self.expected_in_backward = ()
        self._shard_state = ShardState.SHARDED
        self._training_state = TrainingState.IDLE
        self._module_ref = weakref.ref(module)
        slots = (slot for group in originals for original in group for slot in original.slots)
        self._owner_refs = [
            weakref.ref(each) for each in {id(s.module): s.module for s in slots}.values()
        ]
        self._root_ref: Callable[[], RootState | None] = lambda: None
        self._gathers: list[Waitable] = []
        self._is_watched = False
        self._watched_pieces: dict[nn.Parameter, object] = {}
        for handle, group in zip(handles, originals, strict=True):
            for original, sharded, full in zip(
                group, handle.sharded_params, handle.full_params, strict=True
            ):
                self.views.add(original.fqn, original.slots, sharded, full)
        self.views.show_sharded()
        self._follow_trainable()

    # What users see -------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        module = self._module_ref()
        if module is None:
            raise RuntimeError(f"{self.label}: its module was deleted")
        return module

    @property
    def owners(self) -> list[nn.Module]:
        """Modules with something of this unit: its own, those that show its parameters."""
        refs = (self._module_ref, *self._owner_refs)
        return [module for ref in refs if (module := ref()) is not None]

    def add_owner(self, module: nn.Module) -> None:
        self._owner_refs.append(weakref.ref(module))

    @property
    def label(self) -> str:
        return self.fqn or "the root unit"

    @property
    def pieces(self) -> list[nn.Parameter]:
        """This rank's pieces of its parameters, as `parameters()` shows them."""
        return [piece for handle in self.handles for piece in handle.sharded_params]

    @property
    def num_parameters(self) -> int:
        """Elements of all original parameters (of DTensors the local ones), without padding."""
        return sum(sum(handle.layout.numels) for handle in self.handles)

    @property
    def state(self) -> ShardState:
        return self._shard_state

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these units when this one's forward begins, instead of the recorded next ones."""
        self.forward_prefetch = self._units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these units when this one's backward begins, instead of the recorded next ones."""
        self.backward_prefetch = self._units_of(modules)

    def _units_of(self, modules: Sequence[nn.Module]) -> list[Unit]:
        units = []
        for module in modules:
            unit = get_unit(module)
            if unit is None:
                raise ValueError(
                    f"{self.label}: modules to prefetch must be units of the same model, got "
                    f"{type(module).__name__}"
                )
            units.append(unit)
        # Units of nested wrappers may belong to one model only later: the first forward looks.
        self.root.looks_first = True
        self.root.residency.make_room_for(len(units))
        return units

    def __repr__(self) -> str:
        return (
            f"Unit({self.label!r}, {type(self.module).__name__}, "
            f"{self.num_parameters} parameters, {self.state.value})"
        )

    # State ----------------------------------------------------------------------------------

    @property
    def training_state(self) -> TrainingState:
        return self._training_state

    def set_training_state(self, new: TrainingState) -> None:
        check_transition(self.label, self._training_state, new)
        self._training_state = new

    def _set_shard_state(self, new: ShardState) -> None:
        check_transition(self.label, self._shard_state, new)
        self._shard_state = new

    @property
    def root(self) -> RootState:
        root = self._root_ref()
        if root is None:
            raise RuntimeError(f"{self.label}: the ZeRO3 wrapper around it was deleted")
        return root

    @property
    def root_if_alive(self) -> RootState | None:
        return self._root_ref()

    def join(self, root: RootState, index: int) -> None:
        """Become unit `index` of `root`."""
        self._root_ref = weakref.ref(root)
        self.index = index

    def rename(self, prefix: str) -> None:
        """The module is now part of another: put `prefix` before every name."""
        self.fqn = f"{prefix}.{self.fqn}" if self.fqn else prefix
        for handle in self.handles:
            handle.fqns = [f"{prefix}.{fqn}" for fqn in handle.fqns]
            for fqn, parameter in zip(handle.fqns, handle.sharded_params, strict=True):
                rename(parameter, fqn)
        self.views.rename(prefix)
        self.originals = [(f"{prefix}.{fqn}", parameter) for fqn, parameter in self.originals]

    # Parameters -----------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """Whether main shards changed since they were gathered, as far as torch's versions tell."""
        return any(handle.is_stale for handle in self.handles)

    def unshard(self, *, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters by hand, as `ZeRO3.unshard` does. Collective.

        They stay until the end of the unit's next forward or of the next backward, or until
        `reshard`.
        """
        return self.root.unshard_explicitly(self, async_op)

    def gather(self, behind_reductions: bool = False) -> None:
        """Start gathering the full parameters. Collective over the shard group.

        Does not block the host. Nothing happens when they are resident or on their way.

        Args:
            behind_reductions: on CPU, allocate and start once the reductions in flight are done.
        """
        if self._shard_state is not ShardState.SHARDED:
            return
        root = self.root
        # A list, not a generator: every handle has to look.
        if not root.in_backward and any([h.adopt_changes(self.label) for h in self.handles]):
            root.weights_mark = root.streams.mark_compute()
        self._set_shard_state(ShardState.GATHERING)
        root.residency.limiter.acquire(self.nbytes)
        with root.profile("unshard", self):
            for handle in self.handles:
                self._unshard_handle(handle, root, behind_reductions)

    def _unshard_handle(
        self, handle: FlatParamHandle, root: RootState, behind_reductions: bool
    ) -> None:
        # Written by the optimizer, or brought up to date on the lanes by an earlier call.
        written: Mark = None if handle.has_compute_shard else root.weights_mark
        synced: Waitable | None = None
        if handle.is_stale:
            written, synced = self._sync_compute_shard(handle, root)
        if handle.is_whole:
            if synced is not None:
                self._gathers.append(synced)
            return
        group, shard = handle.placement.shard_group, handle.compute_shard
        if handle.kept_shard is not None and handle.placement.keeping_group is not None:
            group, shard = handle.placement.keeping_group, handle.kept_shard
        operation = root.operations.next("all-gather", self.label, group)
        if synced is None and not behind_reductions:
            self._gathers.append(self._gather(handle, shard, group, written, operation))
            return
        gather = functools.partial(self._gather, handle, shard, group, written, operation)
        self._gathers.append(
            root.streams.reduce.behind(gather)
            if synced is None
            else root.streams.unshard.after(synced, gather)
        )

    def _sync_compute_shard(
        self, handle: FlatParamHandle, root: RootState
    ) -> tuple[Mark, Waitable | None]:
        """Bring the weights' last change into the compute shard. Collective over outer peers.

        Returns:
            A mark behind this rank's own part, and what to wait for before the whole is used;
            None where the own part is the whole and is gathered anyway.
        """
        if not handle.has_compute_shard:
            handle.write_compute_slice()
            return root.weights_mark, None
        with root.streams.pre_unshard as lane:
            # The copy reads what the optimizer wrote, and overwrites what gathers, or compute,
            # read before the optimizer's turn.
            lane.wait(root.weights_mark)
            handle.write_compute_slice()
            written = lane.mark()
            if handle.params_on is not None:
                root.uploaded_mark = written
            if handle.placement.owns_compute_shard:
                return written, lane.so_far() if handle.is_whole else None
        outer = handle.placement.outer_group
        assert outer is not None, "else the rank owns its compute shard"
        operation = root.operations.next("outer all-gather", self.label, outer)
        with root.streams.unshard as lane:
            lane.wait(written)
            gather = all_gather(handle.compute_shard, handle.compute_slice, outer, operation)
            return written, lane.settle(gather)

    def _gather(
        self,
        handle: FlatParamHandle,
        shard: torch.Tensor,
        group: ShardGroup,
        written: Mark,
        operation: Operation,
    ) -> Waitable:
        root = self.root
        with root.streams.unshard as lane:
            handle.allocate_full()
            # After the last use of whatever the allocator gave us, and after the shard is there.
            lane.wait(root.freed_mark)
            lane.wait(written)
            return lane.settle(all_gather(handle.full.data, shard, group, operation))

    def wait_for_unshard(self) -> None:
        """Order compute after the gather; blocks the host only where there are no streams."""
        if self._shard_state is ShardState.GATHERING:
            with self.root.profile("wait_for_unshard", self):
                for gather in self._gathers:
                    gather.wait()
            self._set_shard_state(ShardState.UNSHARDED)
            if self.saved_casts:
                saved_casts.fill(self.saved_casts)

    def reshard(self, returns: bool = False) -> None:
        """Free the full parameters; a gather under way is waited for first.

        Args:
            returns: the same weights will be gathered again.
        """
        if self._shard_state is ShardState.SHARDED:
            return
        self.show_sharded()
        self.wait_for_unshard()
        root = self.root
        with root.profile("reshard", self):
            self._gathers = []
            if returns and self.options.reshard_after_forward == "compute_shard":
                for handle in self.handles:
                    handle.keep_shard()
            # The next gather may be given this memory: it waits for this mark (in `_gather`).
            root.freed_mark = root.streams.mark_compute()
            for handle in self.handles:
                handle.free_full()
            if self.saved_casts:
                saved_casts.free(self.saved_casts)
        root.residency.limiter.release(self.nbytes)
        self.explicitly_unsharded = False
        self._set_shard_state(ShardState.SHARDED)

    def show_full(self) -> None:
        """Module attributes become the full leaves (valid after `wait_for_unshard`)."""
        if self.shows_full:
            return
        # A list, not a generator: every handle has to follow.
        if not self.root.in_backward and any([h.update_requires_grad() for h in self.handles]):
            self._follow_trainable()
        self.views.show_full(self.label)
        self.shows_full = True

    def show_sharded(self) -> None:
        """Module attributes become this rank's pieces."""
        if self.shows_full:
            self.replaced += self.views.take_full_away()
            self.shows_full = False

    # Gradients ------------------------------------------------------------------------------

    def _follow_trainable(self) -> None:
        """Lay out gradients for the leaves that require grad now."""
        for handle in self.handles:
            trainable = handle.trainable()
            if tuple(trainable) != handle.gradients.layout.trainable:
                handle.gradients.set_trainable(trainable)
        self.is_trainable = any(h.gradients.layout.trainable for h in self.handles)
        self._watched_pieces |= piece_gradients.watch(
            (
                piece
                for handle in self.handles
                if handle.placement.num_ranks > 1
                for piece in handle.sharded_params
                if piece.requires_grad and piece not in self._watched_pieces
            ),
            is_first=self.handles[0].placement.is_first if self.handles else True,
        )

    def watch_leaves(self) -> None:
        """Hear of gradients that come from outside the unit's forward (explicit `unshard`)."""
        if self._is_watched:
            return
        self._is_watched = True
        unit_ref = weakref.ref(self)

        def on_gradient(_: torch.Tensor) -> None:
            unit = unit_ref()
            if unit is not None:
                unit.root.on_leaf_gradient(unit)

        for handle in self.handles:
            for leaf in handle.full_params:
                if leaf.requires_grad:
                    leaf.register_post_accumulate_grad_hook(on_gradient)

    def drop_kept_shards(self) -> None:
        """The weights that were kept for a backward will not be used again."""
        for handle in self.handles:
            handle.kept_shard = None

    def drop_gradients(self) -> None:
        """Forget gradients that were not delivered."""
        for handle in self.handles:
            handle.gradients.release()
            for leaf in handle.full_params:
                leaf.grad = None

    def reset(self) -> None:
        """Back to the state between steps, after an error."""
        self.depth = 0
        self.replaced = []
        self.drop_gradients()
        self.drop_kept_shards()
        self.show_sharded()
        self.reshard()
        if self._training_state is not TrainingState.IDLE:
            self.set_training_state(TrainingState.IDLE)


def get_unit(module: nn.Module) -> Unit | None:
    """The unit a module is wrapped as, if it is one."""
    return module.__dict__.get(_UNIT)


def unset_unit(module: nn.Module) -> None:
    """The module is a unit no longer."""
    module.__dict__.pop(_UNIT, None)


def set_unit(module: nn.Module, unit: Unit) -> None:
    """Mark a module; the module owns its unit, the unit knows its module weakly."""
    module.__dict__[_UNIT] = unit
