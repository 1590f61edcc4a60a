"""ZeRO3(module, ...), the entry point: wraps a module and holds the methods that users call."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh

from layerzero import guards
from layerzero.build.arguments import Arguments
from layerzero.build.build import build
from layerzero.build.plan import AnyGroup, Feature
from layerzero.build.topology import agree_on_topology, plan_on_every_rank
from layerzero.build.wrap import UnitPlan, WrapPolicy
from layerzero.config import (
    Accumulation,
    BackwardPrefetch,
    GradientReduction,
    MixedPrecision,
    OffloadPolicy,
    OnNonFinite,
    OptionalMean,
    ReductionPolicy,
    ReshardAfterForward,
    Verify,
)
from layerzero.flat.groups import require_timeout
from layerzero.flat.parameter_info import get_info
from layerzero.migrate import to_arguments
from layerzero.model_functions import UnitMethods
from layerzero.notices import warn_once
from layerzero.optim import norm, steps
from layerzero.optim.sharded_params import live_roots
from layerzero.state_dict import module_state
from layerzero.state_dict.torch_gather import patch_torch
from layerzero.step.root import RootState, root_if_alive, root_of
from layerzero.step.unit import Unit, get_unit, set_unit
from layerzero.wrapper import ModuleWrapper

if TYPE_CHECKING:
    from layerzero.graphs.arena import Arena
    from layerzero.memory_budget import MemoryChoice
    from layerzero.optim.norm import Clipped

_logger = logging.getLogger("layerzero.log")
_ROOT = "_layerzero_root"
_LIBRARIES = ("transformers", "diffusers", "peft", "huggingface_hub")
"""Libraries whose models have methods that would take shards for whole parameters."""
_OF_EXPERTS = {"process_group", "expert_numbers"}
"""Arguments of units that are experts."""
_NOT_GIVEN = {"self", "__class__", "unknown"}


class ZeRO3(UnitMethods, Joinable, ModuleWrapper):
    """Shards a module's parameters, gradients and optimizer state over a process group.

    Every module that `auto_wrap_policy` names becomes a *unit*, whose parameters are gathered
    before it runs and freed after. The module itself becomes the root unit, which holds all other
    parameters. `parameters()` returns this rank's parts of them (`layout`): give them to any
    element-wise optimizer. Names in `named_parameters()`, `named_modules()`, `state_dict()` and so
    on are the original ones. Attributes that the wrapper does not define are the wrapped module's.

    Construction, forward and backward are collective over `process_group`: every rank must call
    the same units in the same order, apart from those in `optional_modules`.

    Args:
        module: any module, on one device or on the meta device; changed in place.
        process_group: ranks that share the model: a ProcessGroup, None for all ranks, or a
            DeviceMesh of one axis (the shard group) or two (outer, shard group). If parameters are
            DTensors, only the data-parallel ranks (docs/reference/parallelism.md).
        auto_wrap_policy: set of module classes; or callable(module, fqn) -> bool or a mapping. A
            mapping makes a unit with its own arguments (`mixed_precision`, `reshard_after_forward`,
            `gradient_reduction`, `offload`, and for experts `process_group` and `expert_numbers`,
            see docs/reference/parallelism.md), or with a `hook_module`, whose calls unshard the
            unit as well. Or a policy of `torch.distributed.fsdp.wrap`, which chooses the same
            modules as in FSDP. The unit of a module inside `torch.compile` or `checkpoint_wrapper`
            is the wrapper. None: units are the nested ZeRO3 modules, or only the root.
        zero3_size: number of ranks in a shard group: neighbours, in rank order, in `process_group`;
            the same on every rank. None: all of them.
        outer: use of the ranks beyond the shard group: "zero1" splits the optimizer state over them
            too, "replicate" gives each a copy of it, "shard" gathers over all ranks in one hop
            (docs/reference/layered.md).
        mixed_precision: dtypes of the parts of a step; see `MixedPrecision`.
        forward_prefetch: number of units that forward gathers ahead, once the order is recorded.
        backward_prefetch: when backward gathers the next unit; None: on demand.
        limit_all_gathers: bound on the memory of prefetched units: False (none), True (a default),
            an int (units) or a string such as "2GB" (bytes).
        reshard_after_forward: True: reshard a unit after its forward. False: keep it until its
            backward. "compute_shard": with outer="shard", keep enough in each shard group to gather
            it again there. Or callable(module, fqn) -> one of these for each unit.
        offload: what is kept in host memory; see `OffloadPolicy`.
        ignored_modules: modules that are not sharded, with all modules inside them.
        ignored_parameters: parameters that are not sharded.
        param_init_fn: called with each module that has meta parameters or buffers of its own, after
            memory was allocated for them; it must write all of them. Functions written for FSDP
            check `is_meta` and call `to_empty`: if some are left unwritten, they are put back on
            the meta device, and the function is called again. None: the module's
            `reset_parameters`. "later": values must be loaded before the first forward, which
            raises otherwise.
        sync_module_states: broadcast parameters and buffers from the group's first rank.
        device: device for parameters and buffers; None: the one they are on (from meta: the device
            that the group's backend serves).
        move_inputs: whether a forward of the model moves its inputs to that device, as
            `fully_shard` does: tensors in nested tuples, lists, mappings and dataclasses, without
            blocking the host. False, if you write the next batch into the same pinned memory.
        gradient_reduction: "mean" over the group, or "sum".
        accumulation: where micro-batches without gradient synchronization (`no_sync`) add up:
            "unsharded": before anything is sent; "sharded": after a reduction over the shard group;
            "auto": chosen by memory and traffic, and logged.
        deterministic: sum gradients in rank order, in float32 at least.
        timeout: bound on any collective; when it expires, the error says which rank waits for what.
            None: the timeout given to the process group, or else to the default group; else
            5 minutes (docs/reference/errors.md).
        reduction: how reductions share the connection with gathers; see `ReductionPolicy`.
        optional_modules: modules that a rank may skip while other ranks run them. In each forward,
            any rank may call any of the units at or under them, or none: ranks agree before each
            gather, and one that skips a unit takes part in its gathers and reductions with nothing
            of its own (docs/howto/optional_modules.md). The same modules on every rank.
        on_nonfinite: what becomes of a step with a gradient that is infinite or NaN, decided by all
            ranks together: "raise": the backward raises FloatingPointError and changes nothing;
            "skip": the step changes neither parameters nor optimizer state; None: no check. A check
            costs one pass over this rank's gradients and one small all-gather, which blocks the
            host (docs/reference/errors.md).
        optional_mean: over which ranks gradients of optional modules are averaged: "all", or
            "participants": those that had a gradient for the parameter.
        verify: check the bytes of gathers, reductions and full buffers against flipped bits, and
            copies of main shards: "always", or "sampled" in one step of eight. A mismatch raises
            `layerzero.errors.CorruptionError` on every rank, before weights or optimizer state
            change (docs/howto/verify.md).
        memory_budget: the most that a rank may hold, optimizer state and activations included:
            bytes (an int) or a string such as "40GB". After five steps, in which nothing stays
            full, the engine chooses for it which units stay full between forward and backward,
            what is prefetched, and where micro-batches add up: `memory_choice`
            (docs/howto/memory.md). It takes the place of `reshard_after_forward`,
            `forward_prefetch`, `backward_prefetch` and `limit_all_gathers`.
        layout: where a parameter is cut. "elements": anywhere; each sharded parameter is 1-D.
            "rows": between rows (slices of dimension 0); it is [rows of this rank, *shape[1:]],
            possibly of 0 rows, and 1-D only if the original has fewer than two dimensions.
            "rows(32)": at multiples of 32 rows (docs/howto/optimizers.md).
        arena: keep full buffers and reduction inputs in memory that the model holds between steps:
            each lies at the same address from the second step of an order on, with prefetch lists
            from the third. Needs torch 2.13 (docs/howto/memory.md).

    Raises:
        NotImplementedError: this torch has no memory for an `arena`.
        ValueError, TypeError: an argument is wrong, ranks have different parameters, or a meta
            tensor was not initialised. Raised on every rank.
        RuntimeError: torch.distributed is not initialised, or the module is wrapped already.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        auto_wrap_policy: WrapPolicy = None,
        zero3_size: int | None = None,
        outer: Literal["zero1", "replicate", "shard"] = "zero1",
        mixed_precision: MixedPrecision | None = None,
        forward_prefetch: bool | int = True,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers: bool | int | str = True,
        reshard_after_forward: ReshardAfterForward
        | Callable[[nn.Module, str], ReshardAfterForward] = True,
        offload: OffloadPolicy | None = None,
        ignored_modules: Iterable[nn.Module] = (),
        ignored_parameters: Iterable[nn.Parameter] = (),
        param_init_fn: Callable[[nn.Module], None] | Literal["later"] | None = None,
        sync_module_states: bool = False,
        device: torch.device | str | int | None = None,
        move_inputs: bool = True,
        gradient_reduction: GradientReduction = "mean",
        accumulation: Accumulation = "auto",
        deterministic: bool = False,
        timeout: timedelta | None = None,
        reduction: ReductionPolicy | None = None,
        optional_modules: Iterable[nn.Module] = (),
        optional_mean: OptionalMean = "all",
        verify: Verify | None = None,
        on_nonfinite: OnNonFinite | None = None,
        memory_budget: int | str | None = None,
        layout: str = "elements",
        arena: bool = False,
        **unknown: NoReturn,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in _NOT_GIVEN}
        if "_wrapped" not in self.__dict__:  # Otherwise `rewrap` runs this again.
            super().__init__()
        root, shared_with = shard_in_place(module, given, unknown)
        self._become(module, root)
        # Through `__dict__`, because `__setattr__` would set them on the wrapped module.
        self.__dict__["_given"] = given
        self.__dict__["_kept_whole"] = root.kept_whole
        if shared_with:
            from layerzero.shared_parts import join

            join([*shared_with, self], ZeRO3, root.arguments)

    def _become(self, module: nn.Module, root: RootState) -> None:
        keep_root(module, root, self)
        set_unit(self, root.units[0])
        self._become_wrapper_of(module)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each unit separately by `torch.compile`, with these arguments.

        A call of another unit breaks the graph. To compile only some units, call
        `unit.module.compile()`, before or after wrapping.

        Raises:
            ValueError: the arguments turn CUDA graphs on, and the model is on a device.
        """
        for unit in self._subtree():
            unit.module.compile(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a shard of each parameter, and all buffers, by original name. Not collective.

        A shard has the original shape. Its `.local` is this rank's part, which shares memory with
        the sharded parameter; `torch.distributed.checkpoint` saves and loads shards directly. For
        full tensors, call `layerzero.checkpoint.get_model_state_dict(model, full=True)`.
        """
        return self.module.state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        unit, number = self._layerzero_unit, len(self._subtree())
        where = str(unit.handles[0].placement) if unit.handles else "no parameters of its own"
        return f"{number} unit{'s' * (number > 1)} of {type(self.module).__name__}, {where}"

    @property
    def _root_state(self) -> RootState:
        return root_of(self._layerzero_unit)

    def _subtree(self) -> list[Unit]:
        """The units of this module and of modules inside it, in the order of the root's list."""
        return self._root_state.units_inside(self.module)

    @property
    def memory_choice(self) -> MemoryChoice | None:
        """The choice for `memory_budget`, the same on every rank; None: no budget, or not yet.

        `print` shows it. It is made in the first forward after the fifth step, and logged once.
        """
        learner = self._root_state.learner
        return None if learner is None else learner.choice

    @property
    def arena(self) -> Arena | None:
        """The memory of `arena=True`, whose `nbytes` and `taken_nbytes` say how large it is and
        how much of it an order takes at once; None without that argument."""
        from layerzero.graphs.arena import Arena

        return next(iter(self._root_state.extensions.of(Arena)), None)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate the gradients of backward passes inside; the first one after it reduces them.

        Memory and traffic inside depend on the model's `accumulation` argument
        (docs/reference/layered.md). Applies to the whole model that this module belongs to.
        """
        return self._root_state.reducer.syncing(False)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Switch gradient synchronization: False has the effect of `no_sync`, until True is set."""
        self._root_state.reducer.set_requires_sync(bool(requires_gradient_sync))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, also where a backward failed before."""
        self._root_state.backward.clear_abandoned()
        super().zero_grad(set_to_none)

    def reduce_gradients(self) -> None:
        """Reduce the gradients accumulated inside `no_sync`, without another backward.

        For loops that find out only afterwards which micro-batch was the last. Collective over
        `process_group`; does nothing if no gradients wait. Applies to the whole model that this
        module belongs to.

        Raises:
            RuntimeError: inside forward or backward.
        """
        from layerzero.optim.waiting_gradients import reduce_waiting

        reduce_waiting(self._root_state)

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Reduce gradients by `hook`, as FSDP1 does; torch's own hooks work unchanged.

        `hook(state, gradient, chunk)` receives the gradients of a flat parameter, [group size *
        chunk size] in the reduce dtype, which it may overwrite, and writes this rank's chunk of
        their mean; see docs/reference/migrating.md for their order. With `zero3_size=1` and
        `outer="replicate"`: `hook(state, gradient)`, in place. It is called once a micro-batch
        where sums of micro-batches are sharded (`accumulation`), and never on one rank alone. For
        the whole model that this module belongs to; the same on every rank; not collective.

        Raises:
            RuntimeError: the model has a hook already.
            NotImplementedError: gradients are reduced in two hops, or `deterministic` or `verify`
                is set.
        """
        from layerzero.comm_hooks import register

        register(self._root_state, state, hook)

    def timeout(self, **keywords: float) -> AbstractContextManager[None]:
        """A context for a phase in which a rank may be alone for long: a save, an evaluation, data.

        Waits that begin inside may last this long, instead of the model's `timeout`: those of
        forward, backward, clipping and optimizers, of `summon_full_params`, and of
        `layerzero.checkpoint`, in the whole model that this module belongs to. The former limit
        is back afterwards, also after an exception. Phases may be nested; the innermost counts.

        Not collective, and nothing is exchanged: a rank's limit bounds the waits of that rank.
        So enter it on every rank that may wait, around the wait and not only around what the slow
        rank does alone (docs/reference/errors.md).

        Args:
            keywords: those of `datetime.timedelta`, such as `minutes=30`; together above 0. It may
                be shorter than the model's `timeout`.

        Raises:
            TypeError, ValueError, OverflowError: not such keywords; from `datetime.timedelta`.
            RuntimeError: inside forward or backward, where waits may have begun already.
            CollectiveError: a collective of this model failed before.
        """
        limit = timedelta(**keywords)
        require_timeout(limit)
        return _phase(self._root_state, limit)

    def join_hook(self, **options: Any) -> JoinHook:
        """Called by torch's `Join`, inside which ranks may run out of batches. Collective.

        Args:
            options: `optimizers`: those of the model, in the same order on every rank;
                `divide_by_initial_world_size`: whether gradients stay means over all ranks (the
                default), or are over those that still have batches.

        Raises:
            ValueError, TypeError, NotImplementedError: this model or an argument cannot join.
            RuntimeError: the model is inside another join.
        """
        from layerzero.uneven.joinable import hook_of

        return hook_of(self, **options)

    @property
    def join_device(self) -> torch.device:
        """The host: the answers decide what it does next."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """A gloo group of the model's data-parallel ranks. The first use makes it, and is
        collective."""
        from layerzero.uneven.joinable import group_of

        return group_of(self._root_state)

    def step_signature(
        self,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
    ) -> str:
        """One number for all weights and optimizer state: 64 bits, as 16 hexadecimal digits.

        Equal for equal bits, by original names, whatever the units and the number of ranks. So two
        runs can be bisected for the first step in which they differ. Covers all parameters of the
        whole model that this module belongs to, ignored ones included, and the state of the given
        optimizers, step numbers included; neither buffers nor hyperparameters.

        Collective over `process_group` and over the mesh of DTensor parameters; blocks the host.
        Reads all of this rank's shards: not for every step of a large model. Main shards with
        `outer="replicate"` are those of the rank's own shard group.

        Args:
            optimizer: whose state counts; several by name. None: the weights alone.

        Raises:
            RuntimeError: inside forward or backward.
        """
        from layerzero.verify.signature import step_signature

        kept = {id(parameter) for parameter in self.__dict__["_kept_whole"]}
        whole = [(name, p) for name, p in self.module.named_parameters() if id(p) in kept]
        return step_signature(self._root_state, whole, optimizer)

    def step_in_backward(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Have `backward()` run `optimizer` on each unit as soon as its gradients are reduced.

        From now on all parameters are updated when a backward that synchronizes gradients returns:
        do not call `optimizer.step()`, but call `zero_grad()` as usual. With offloaded parameters,
        the host updates one unit while the device computes the gradients of the next ones. Not
        collective.

        It cannot be combined with anything that needs all gradients before the first step:
        `clip_grad_norm_` raises, and a `GradScaler` would find an overflow too late.

        Args:
            optimizer: an element-wise optimizer; its parameters that are not this model's are
                stepped last. None: switch back to `optimizer.step()`.
        """
        root = self._root_state
        if optimizer is None:
            root.reducer.step_by = None
        else:
            from layerzero.optim.in_backward import StepInBackward

            root.reducer.step_by = StepInBackward(optimizer).deliver

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`.

        Collective over `process_group` and over the mesh of DTensor parameters: one gather of a
        scalar for each axis. Does not block the host on a device with streams.

        Args:
            norm_type: p > 0, or infinity.

        Returns:
            The norm before clipping, a scalar tensor, the same on all ranks.

        Raises:
            RuntimeError: `step_in_backward` is on, so the gradients were used already.
            NotImplementedError: an ignored parameter is a DTensor with a gradient.
        """
        from layerzero.optim.norm import clip_grad_norm_

        gradients = gradients_to_clip(self)
        if gradients.root.join is not None:
            gradients.root.join.before_clip(self._layerzero_unit, max_norm, norm_type)
        return clip_grad_norm_(gradients, max_norm, norm_type)

    def summon_full_params(
        self,
        *,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """A context in which parameters are full: original shapes, dtype of the main shards.

        Collective at entry and exit. Needs memory for all full parameters of this module at once.

        A parameter that was a DTensor before wrapping is a DTensor inside, with its mesh and
        placements: full over `process_group`, still split over tensor-parallel ranks. Its
        `full_tensor()`, which is collective over the mesh, returns the whole value. Writes into its
        `to_local()`, or in place into the DTensor, are written back. With `with_grads`, its `.grad`
        is a DTensor too.

        Args:
            writeback: at exit, copy changes made inside into the shards (not after an exception).
            rank0_only: only the group's first rank gets full parameters, the others see sharded
                ones; with `writeback`, the changes of the first rank go to all. With DTensors, the
                first rank of each data-parallel group gets them. Together these ranks form one
                tensor-parallel mesh, so they can call collectives such as `full_tensor()`.
            offload_to_cpu: put the full parameters on the CPU; a DTensor keeps the mesh of its
                device, with its local tensor on the CPU.
            with_grads: make `.grad` full inside as well, and write it back in the same way.

        Raises:
            RuntimeError: inside forward, backward or another `summon_full_params`.
        """
        from layerzero.state_dict.summon import SummonOptions, summon

        options = SummonOptions(
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )
        return summon(self._root_state, self._subtree(), options)


KEYWORDS: Mapping[str, Any] = ZeRO3.__init__.__kwdefaults__ or {}
"""The keyword arguments of `ZeRO3`, with their defaults."""


def shard_in_place(
    module: nn.Module, given: Mapping[str, Any], unknown: Mapping[str, Any]
) -> tuple[RootState, list[ModuleWrapper]]:
    """Shard a module, which stays the same object; units inside it join its root. Collective.

    The caller passes the root to `keep_root`.

    Args:
        given: the arguments of `ZeRO3` by name.
        unknown: keyword arguments that `ZeRO3` does not have.

    Returns:
        The root, and the living models that had some of its units; see shared_parts.py.

    Raises:
        ValueError, TypeError, RuntimeError: as `ZeRO3`.
    """
    if torch.get_default_device().type == "meta":
        # Inside `with torch.device("meta")`: what the engine itself makes has values.
        with torch.device("cpu"):
            return shard_in_place(module, given, unknown)
    plan, arguments = plan_on_every_rank(
        module, given, lambda: to_arguments(given, unknown), find_features
    )
    _refuse_what_is_the_outermost_ones(each.module for each in plan.units)
    shared_with: list[ModuleWrapper] = []
    if any(unit.existing is not None for unit in plan.units):
        from layerzero.shared_parts import models_that_share

        shared_with = models_that_share(module, plan.units, arguments)
    from layerzero.optim.waiting_gradients import WaitingGradient
    from layerzero.state_dict.awaited_values import AwaitedValues

    topology = agree_on_topology(plan, arguments)
    if not arguments.sync_module_states:
        from layerzero.verify.start_values import StartValues

        plan = replace(plan, features=[*plan.features, StartValues(plan.device)])
    root = build(plan, topology, arguments, _finish)
    if arguments.verify is not None:
        from layerzero.verify.verifier import Verifier

        Verifier(root, arguments.verify)
    parameters = module.parameters() if plan.ignored.members else ()
    root.kept_whole = [each for each in parameters if get_info(each) is None]
    if arguments.on_nonfinite is not None:
        from layerzero.optim.nonfinite import NonFinite

        NonFinite(root, arguments.on_nonfinite)
    if root.streams.is_capturing is not bool:
        from layerzero.graphs.capture import Recording

        root.extensions.add(Recording(root))
    if arguments.arena:
        from layerzero.graphs.arena import Arena

        root.extensions.add(Arena(root))
    root.extensions.add(AwaitedValues(root.units, root.device))
    root.reducer.kept.make_stand_in = WaitingGradient
    guards.install(root)
    if not sys.modules.keys().isdisjoint(_LIBRARIES):
        from layerzero.state_dict import foreign_methods

        foreign_methods.install(module)
    if topology.placement.is_first:
        from layerzero.guards import argument_warnings

        is_shared = topology.placement.num_ranks > 1
        for text in argument_warnings.texts(module, arguments, plan, is_shared):
            warn_once(text, is_first=True)
        if _logger.isEnabledFor(logging.INFO):
            from layerzero.log import log_units

            log_units(module, root)
    if arguments.memory_budget is not None:
        from layerzero.memory_budget import Learner

        root.learner = Learner(root, arguments.memory_budget)
    steps.watch(_import_watchers)
    norm.make_torchs_global()
    patch_torch()
    return root, shared_with


def find_features(
    module: nn.Module,
    given: Arguments,
    units: Sequence[UnitPlan],
    everyone: tuple[int, ...],
) -> list[Feature]:
    """The features that take part in the construction of a model. Not collective.

    Args:
        everyone: the ranks that share the model.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument of a feature is wrong.
    """
    if given.memory_budget is not None:
        from layerzero.memory_budget.learner import refuse_what_it_chooses

        refuse_what_it_chooses(given)
    from layerzero.module_tree.structure import AsWrapped

    found: list[Feature] = [AsWrapped()]
    if any(not _OF_EXPERTS.isdisjoint(unit.arguments) for unit in units):
        from layerzero.experts.units import Experts

        found.append(Experts(module, units, everyone))
    is_nested = any(unit.existing is not None for unit in units)
    if is_nested or given.optional_modules or given.optional_mean != "all":
        from layerzero.optional.arguments import OptionalModules

        groups: dict[int, AnyGroup] = {p: group for e in found for p, group in e.groups.items()}
        modules, mean = given.optional_modules, given.optional_mean
        found.append(OptionalModules(module, modules, mean, units, groups, everyone))
    return found


def _finish(unit: Unit) -> None:
    from layerzero.module_tree import conversions

    module_state.install(unit)
    conversions.install(unit)


@contextmanager
def _phase(root: RootState, limit: timedelta) -> Iterator[None]:
    root.check_between_steps("timeout: entered inside forward or backward; enter it around it")
    with root.operations.phases.phase(limit):
        yield


def keep_root(module: nn.Module, root: RootState, wrapper: nn.Module) -> None:
    """Let `module` own the root. The model counts as wrapped while `wrapper` or `module` lives."""
    # Only the outermost module holds root state; drop those of models that joined this one.
    for unit in root.units:
        unit.module.__dict__.pop(_ROOT, None)
    module.__dict__[_ROOT] = root
    # Frameworks put DistributedDataParallel around what they are given; it reads these names.
    names = [fqn for unit in root.units for handle in unit.handles for fqn in handle.fqns]
    module.__dict__["_ddp_params_and_buffers_to_ignore"] = names
    root.wrapper_ref = weakref.ref(wrapper)
    live_roots.add(root)


def _refuse_what_is_the_outermost_ones(units: Iterable[nn.Module]) -> None:
    for inner in units:
        unit = get_unit(inner) if isinstance(inner, ZeRO3) else None
        root = None if unit is None else root_if_alive(unit)
        if root is None or root.units[0] is not unit:
            continue
        if root.learner is not None or root.arguments.arena or root.extensions.reduce:
            raise ValueError(
                "memory_budget, arena, register_comm_hook: one was used on a ZeRO3 module inside, "
                "but is the whole model's; wrap all modules first, and use it on the outermost one"
            )


def _import_watchers() -> None:
    """Import what looks at optimizers of sharded parameters; their imports register them."""
    from layerzero.guards import element_wise  # noqa: F401
    from layerzero.optim import scaler  # noqa: F401
    from layerzero.state_dict import optimizer_shards  # noqa: F401


def gradients_to_clip(model: ZeRO3) -> Clipped:
    """The gradients of which `model.clip_grad_norm_` takes the norm, for `optim.norm.grad_norm`."""
    from layerzero.optim.norm import Clipped, refuse_used

    root = model._root_state
    refuse_used(root)
    return Clipped(root, [*model._subtree()], model._kept_whole)
