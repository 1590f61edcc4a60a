"""ZeRO3(module, ...), the entry point: wraps a module and holds the methods that users call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.build.build import build
from layerzero.build.topology import agree_on_topology, plan_on_every_rank
from layerzero.build.wrap import WrapPolicy
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
from layerzero.step.root import RootState
from layerzero.step.unit import set_unit
from layerzero.wrapper import ModuleWrapper
from layerzero.wrapping.methods import FeatureMethods

_ROOT = "_layerzero_root"
_NOT_GIVEN = {"self", "__class__", "unknown"}


class ZeRO3(FeatureMethods, ModuleWrapper):
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
        super().__init__()
        self._shard(module, given, unknown)

    def _shard(
        self, module: nn.Module, given: Mapping[str, Any], unknown: Mapping[str, Any]
    ) -> None:
        """Shard `module` and become its wrapper; again, from `rewrap`."""
        root, shared_with = shard_in_place(module, given, unknown)
        self._become(module, root)
        # Through `__dict__`, because `__setattr__` would set them on the wrapped module.
        self.__dict__["_given"] = given
        self.__dict__["_kept_whole"] = root.kept_whole
        if shared_with:
            from layerzero.wrapping.shared_parts import join

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

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate the gradients of backward passes inside; the first one after it reduces them.

        Memory and traffic inside depend on the model's `accumulation` argument
        (docs/reference/layered.md). Applies to the whole model that this module belongs to.
        """
        return self._root_state.reducer.syncing(False)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Switch gradient synchronization: False has the effect of `no_sync`, until True is set."""
        self._root_state.reducer.requires_sync = bool(requires_gradient_sync)

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
        The root, and the living models that had some of its units; see wrapping/shared_parts.py.

    Raises:
        ValueError, TypeError, RuntimeError: as `ZeRO3`.
    """
    if torch.get_default_device().type == "meta":
        # Inside `with torch.device("meta")`: what the engine itself makes has values.
        with torch.device("cpu"):
            return shard_in_place(module, given, unknown)
    from layerzero.wrapping import features
    from layerzero.wrapping.refusals import refuse_what_is_the_outermost_ones

    plan, arguments = plan_on_every_rank(
        module, given, lambda: features.checked(module, given, unknown), features.find_features
    )
    refuse_what_is_the_outermost_ones(each.module for each in plan.units)
    shared_with: list[ModuleWrapper] = []
    if any(unit.existing is not None for unit in plan.units):
        from layerzero.wrapping.shared_parts import models_that_share

        shared_with = models_that_share(module, plan.units, arguments)
    plan = features.with_comparisons(plan, arguments)
    topology = agree_on_topology(plan, arguments)
    root = build(plan, topology, arguments)
    features.install(root, module, plan, topology)
    return root, shared_with


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
