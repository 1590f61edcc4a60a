"""ZeRO3(module, ...): the one way in. Checks arguments, builds units, holds the user's methods."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.config import (
    Accumulation,
    BackwardPrefetch,
    GradientReduction,
    MixedPrecision,
    OffloadPolicy,
    PrefetchPolicy,
    ReductionPolicy,
    ReshardAfterForward,
)
from layerzero.construct import advice
from layerzero.construct.arguments import check_arguments
from layerzero.construct.build import build
from layerzero.construct.foreign import guard_saving
from layerzero.construct.plan import plan_wrapping
from layerzero.construct.topology import agree_on_topology
from layerzero.construct.wrap import WrapPolicy
from layerzero.core.parameter_info import get_info
from layerzero.log import log_units
from layerzero.optim import attach
from layerzero.optim.clip import Clipped, clip_grad_norm_, clipped, refuse_used
from layerzero.optim.earlier import hand_over_pieces
from layerzero.optim.in_backward import StepInBackward
from layerzero.runtime import surroundings
from layerzero.runtime.misuse import explain_uncaught
from layerzero.runtime.pieces import remember_root
from layerzero.runtime.root import RootState, UnshardHandle, root_of
from layerzero.runtime.summon import SummonOptions, summon
from layerzero.runtime.unit import Unit, get_unit, set_unit
from layerzero.runtime.unit_view import UnitView
from layerzero.state_dict.whole import teach_torch
from layerzero.wrapper import ModuleWrapper

_ROOT = "_layerzero_root"
_NOT_GIVEN = {"self", "__class__", "unknown"}


class ZeRO3(ModuleWrapper):
    """Shards a module's parameters, gradients and optimizer state over a process group.

    Every module that `auto_wrap_policy` names becomes a *unit*, whose parameters are gathered
    before it runs and freed after; the module itself is the root unit and takes what is left.
    `parameters()` are this rank's 1-D pieces under the original names: give them to any
    element-wise optimizer. Names in `named_parameters()`, `named_modules()`, `state_dict()` and so
    on are the original ones. Attributes that are not the wrapper's are the wrapped module's.

    Forward and backward are collective over `process_group`: every rank calls the same units in
    the same order. Construction is, too.

    Args:
        module: any module, on one device or on the meta device; it is changed in place.
        process_group: ranks that share the model: a ProcessGroup, None for all, or a DeviceMesh of
            one axis (the shard group) or two (outer, shard group). With DTensor parameters the
            data-parallel ranks alone (docs/reference/parallelism.md).
        auto_wrap_policy: set of module classes, or callable(module, fqn) -> bool, or a mapping: a
            unit with arguments of its own (`mixed_precision`, `reshard_after_forward`,
            `gradient_reduction`, `offload`, and for experts `process_group` and `expert_numbers`,
            see docs/reference/parallelism.md), or with a `hook_module` whose calls are the unit's
            as well; or a policy of `torch.distributed.fsdp.wrap`, which chooses as it does there.
            None: units are the nested ZeRO3 modules, or the root alone.
        zero3_size: ranks of a shard group inside `process_group`, neighbours in rank order; None:
            all of it. The same on every rank.
        outer: what the axis outside the shard group does: "zero1" splits the optimizer over it too,
            "replicate" copies it, "shard" gathers over all ranks in one hop
            (docs/reference/layered.md).
        mixed_precision: dtypes of the parts of a step; see `MixedPrecision`.
        forward_prefetch: how many units ahead are gathered in forward once the order is recorded.
        backward_prefetch: when the next unit of the backward pass is gathered; None: on demand.
        limit_all_gathers: bound on what prefetching keeps resident: False, True (a default), an
            int (units) or a string such as "2GB" (bytes).
        reshard_after_forward: True: free a unit after its forward. False: it stays until its
            backward. "compute_shard": with outer="shard", keep enough in each shard group to gather
            it again there. Or callable(module, fqn) -> one of these for each unit.
        offload: what lives in host memory; see `OffloadPolicy`.
        ignored_modules: modules left alone, with all they contain.
        ignored_parameters: parameters left alone.
        param_init_fn: called with each module that has meta parameters or buffers of its own, with
            memory in their place; it writes them all. What it leaves, as functions written for FSDP
            do, which ask `is_meta` and call `to_empty`, is put back on meta and it is called again.
            None: the module's `reset_parameters`. "later": a load brings the values before the
            first forward, which is refused without.
        sync_module_states: start from the parameters and buffers of the group's first rank.
        device: where parameters and buffers go; None: where they are (from meta: the device the
            group's backend serves).
        gradient_reduction: "mean" over the group, or "sum".
        accumulation: where micro-batches without gradient synchronization (`no_sync`) add up:
            "unsharded" before anything is sent, "sharded" after a reduction over the shard group;
            "auto" decides by what they cost, and logs it.
        deterministic: sum gradients in rank order, in float32.
        timeout: of any collective, after which the error says who waits for what; None: what
            the process group, or else the default group, was made with if somebody chose it, else
            5 minutes (docs/reference/errors.md).
        prefetch: `forward_prefetch`, `backward_prefetch` and `limit_all_gathers` as one policy.
        reduction: `gradient_reduction`, `accumulation` and `deterministic` as one policy.

    Raises:
        ValueError, TypeError: a bad argument, named with what was expected; ranks that have other
            parameters; a meta tensor that nothing initialised. On every rank.
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
        gradient_reduction: GradientReduction = "mean",
        accumulation: Accumulation = "auto",
        deterministic: bool = False,
        timeout: timedelta | None = None,
        prefetch: PrefetchPolicy | None = None,
        reduction: ReductionPolicy | None = None,
        **unknown: NoReturn,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in _NOT_GIVEN}
        if "_wrapped" not in self.__dict__:  # else it is wrapped again (rewrap.py)
            super().__init__()
        arguments = check_arguments(given, unknown)
        plan = plan_wrapping(module, arguments)
        topology = agree_on_topology(plan, arguments)
        root = build(plan, topology, arguments)
        self._become(module, root)
        self.__dict__["_given"] = given
        self.__dict__["_kept_whole"] = [p for p in module.parameters() if get_info(p) is None]
        advice.warn(module, arguments, plan, topology.placement)
        guard_saving(module)
        log_units(module, root, topology.placement.is_first)
        attach.watch()
        explain_uncaught()
        hand_over_pieces(root.units)
        teach_torch()
        surroundings.install(module)

    def _become(self, module: nn.Module, root: RootState) -> None:
        for unit in root.units:
            unit.module.__dict__.pop(_ROOT, None)
        module.__dict__[_ROOT] = root
        root.wrapper_ref = weakref.ref(self)
        remember_root(root)
        set_unit(self, root.units[0])
        self._become_wrapper_of(module)

    # The wrapped module ---------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`torch.compile` every unit by itself, with these arguments.

        A graph ends where another unit is called, and another one goes on after. To compile some
        units alone call `unit.module.compile()`, before or after wrapping.
        """
        for unit in self._subtree():
            unit.module.compile(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """A shard of each parameter, and all buffers, under the original names. Not collective.

        Shards have the original shapes and this rank's piece as `.local`, sharing memory with the
        parameter; `torch.distributed.checkpoint` saves and loads them as they are. Full tensors:
        `layerzero.checkpoint.get_model_state_dict(model, full=True)`.
        """
        return self.module.state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        unit = self._unit
        where = str(unit.handles[0].placement) if unit.handles else "no parameters of its own"
        return f"{len(self._subtree())} units of {type(self.module).__name__}, {where}"

    # State ----------------------------------------------------------------------------------

    @property
    def _unit(self) -> Unit:
        unit = get_unit(self)
        assert unit is not None, "set at construction"
        return unit

    @property
    def _root_state(self) -> RootState:
        return root_of(self._unit)

    def _subtree(self) -> list[Unit]:
        """The units of this module, in the order of the root's list."""
        inside = {id(unit) for m in self.module.modules() if (unit := get_unit(m)) is not None}
        return [unit for unit in self._root_state.units if id(unit) in inside]

    # Around the step ------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add gradients up; the first one after it reduces the sum.

        Where they add up, and so what is sent and kept until then, is the `accumulation` the
        model was made with (docs/reference/layered.md). It applies to the whole model this module
        belongs to.
        """
        root = self._root_state
        before = root.reducer.requires_sync
        root.reducer.set_requires_sync(False)
        try:
            yield
        finally:
            root.reducer.set_requires_sync(before)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """`no_sync` as a switch: False until set to True again."""
        self._root_state.reducer.set_requires_sync(bool(requires_gradient_sync))

    def reduce_gradients(self) -> None:
        """Reduce the sum that micro-batches inside `no_sync` left, without another backward.

        For loops that learn afterwards which micro-batch was the last. Collective over
        `process_group`; nothing happens where no gradient waits. The whole model this module
        belongs to is reduced.

        Raises:
            RuntimeError: inside forward or backward.
        """
        self._root_state.reduce_waiting()

    def step_in_backward(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Run `optimizer` on each unit as soon as its gradients are there, in `backward()`.

        From now on a backward that synchronizes gradients ends with all parameters updated: do not
        call `optimizer.step()`, but `zero_grad()` as ever. With offloaded parameters the host then
        updates one unit while the device computes the gradients of the next ones. Not collective.

        Args:
            optimizer: element-wise, as always; None: back to `optimizer.step()`. What it has beside
                this model's pieces is stepped last.

        What needs all gradients before the first step cannot go with it: `clip_grad_norm_` raises,
        and a `GradScaler` would come too late.
        """
        root = self._root_state
        step = None if optimizer is None else StepInBackward(optimizer, root.units).step_unit
        root.reducer.call_on_delivered(step)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`.

        Collective over `process_group`, and the mesh of DTensor parameters: a gather of a scalar
        for each axis. Does not block the host on a device with streams.

        Args:
            norm_type: p > 0, or infinity.

        Returns:
            The norm before clipping, a scalar tensor, the same on all ranks.

        Raises:
            RuntimeError: gradients were used already (`step_in_backward`).
            NotImplementedError: an ignored parameter is a DTensor with a gradient.
        """
        return clip_grad_norm_(gradients_to_clip(self), max_norm, norm_type)

    def summon_full_params(
        self,
        *,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """A context in which parameters are full, in the original shapes and main dtype.

        Collective at entry and exit. Memory: all parameters of this module at once.

        Parameters that came as DTensors are DTensors inside, on their mesh and in their placements:
        full over `process_group`, split over tensor-parallel ranks as ever. `full_tensor()` of one,
        collective over its mesh, is the whole; what is written into `to_local()`, or into the
        DTensor in place, is written back. `.grad` with `with_grads` is one too.

        Args:
            writeback: changes made inside go into the shards at the end (not after an exception).
            rank0_only: only the group's first rank sees full parameters, the others their pieces;
                with `writeback`, its changes go to all. With DTensors this is the first rank of
                each data-parallel group, hence all ranks of one tensor-parallel mesh, and
                collective calls such as `full_tensor()` work on these.
            offload_to_cpu: the full parameters are on the CPU; a DTensor has its local tensor
                there, and still the mesh of its device.
            with_grads: `.grad` is full inside as well, and written back alike.

        Raises:
            RuntimeError: inside forward, backward or another `summon_full_params`.
        """
        options = SummonOptions(
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )
        return summon(self._root_state, self._subtree(), options)

    def unshard(self, *, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's own parameters (not those of units inside it). Collective.

        They stay until the end of the unit's next forward or of the next backward, or until
        `reshard`. With `async_op` the gather runs on, and the parameters are full after `wait()`
        of the returned handle.
        """
        return self._root_state.unshard_explicitly(self._unit, async_op)

    def reshard(self) -> None:
        """Free this unit's full parameters. Not collective."""
        self._unit.reshard()

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these units when this one's forward begins, instead of the recorded next ones."""
        UnitView(self._unit).set_modules_to_forward_prefetch(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these units when this one's backward begins, instead of the recorded next ones."""
        UnitView(self._unit).set_modules_to_backward_prefetch(modules)


def gradients_to_clip(model: ZeRO3) -> Clipped:
    """What `model.clip_grad_norm_` takes the norm of, for `optim.clip.grad_norm`."""
    root = model._root_state
    refuse_used(root)
    return clipped(root, model._subtree(), model._kept_whole)
