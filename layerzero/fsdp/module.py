"""FSDPModule: the methods of a module that `fully_shard` sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from layerzero.step.root import RootState, root_if_alive, root_of
from layerzero.step.unit import Hold, Unit
from layerzero.wrapping.comm_hooks import by_reduce_scatter, set_hooks
from layerzero.wrapping.units import UnitMethods

STATE = "_layerzero_fully_shard"
_SYNC = "every backward ends its reductions; to reduce once, use set_requires_gradient_sync"


@dataclass(eq=False)
class State:
    """One call of `fully_shard`; each module of a list has the same."""

    unit: Unit
    is_auto: bool
    """Whether the unit is kept full between forward and backward if, and only if, it is a root."""
    around: nn.Module | None = None
    """A `_Together` whose names the unit has, see Note [Modules of a list]; None: others' names."""
    requires_sync: bool = True
    requires_all_reduce: bool = True


def states_inside(module: Any) -> dict[State, None]:
    """The states of this module and those inside it, outermost first."""
    found = (part.__dict__.get(STATE) for part in module.modules())
    return dict.fromkeys(state for state in found if state is not None)


class FSDPModule:
    """Methods of a module that `fully_shard` sharded, as torch documents them.

    `recurse`: for the units inside it as well. No base: in `__mro__` a module's class follows it.
    """

    unshard, reshard = UnitMethods.unshard, UnitMethods.reshard
    set_modules_to_forward_prefetch = UnitMethods.set_modules_to_forward_prefetch
    set_modules_to_backward_prefetch = UnitMethods.set_modules_to_backward_prefetch

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Containers make parts of themselves by their class: `blocks[1:]`.
        return cls.__mro__[2](*args, **kwargs)

    @property
    def _layerzero_unit(self) -> Unit:
        return state_of(self).unit

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """False: backward passes add up gradients on each rank; the first one after True reduces.
        Units may differ; the same on every rank."""
        for state in self._chosen(recurse):
            state.requires_sync = state.requires_all_reduce = bool(requires_gradient_sync)
        follow_flags(root_of(self._layerzero_unit))

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: with a mesh of two axes, gradients add up after they were reduced over the shard
        axis. Units may differ; the same on every rank."""
        for state in self._chosen(recurse):
            state.requires_all_reduce = bool(requires_all_reduce)
        follow_flags(root_of(self._layerzero_unit))

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change it from the next forward on. The same on every rank; between steps."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward: expected a bool, got {reshard_after_forward!r}"
            )
        for state in self._chosen(recurse):
            state.is_auto = False
            state.unit.set_options(reshard_after_forward=reshard_after_forward)
            root_of(state.unit).scheduler.recorder.forget()

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """False: keep units full from their forward on, until a forward with changed weights."""
        for state in self._chosen(recurse):
            change = state.unit.end_hold if reshard_after_backward else state.unit.hold
            change(int(Hold.AFTER_BACKWARD))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of this unit's gradients by `factor`, instead of the number of ranks."""
        self._layerzero_unit.set_options(gradient_scale=1.0 / factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce-scatter this unit's gradients by `comm`, an object as torch's `ReduceScatter`. Its
        input is in this engine's order; see docs/reference/migrating.md."""
        self._set_hook("instead", by_reduce_scatter(comm))

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], Any], *, stream: object = None
    ) -> None:
        """Call `hook` with this rank's chunk of this unit's reduced gradients, 1-D, which it may
        write. It runs on the engine's own stream."""
        self._set_hook("after", hook)

    def _set_hook(self, place: str, hook: Callable[..., Any]) -> None:
        unit = self._layerzero_unit
        if any(handle.placement.num_ranks == 1 for handle in unit.handles):
            raise NotImplementedError(
                "set_custom_reduce_scatter, set_all_reduce_hook: one rank has this unit alone, so "
                "nothing is reduced; register hooks on its parameters instead"
            )
        unit.comm_hooks = {**unit.comm_hooks, place: hook}
        set_hooks(root_of(unit))

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Order what follows, gathers included, after an event of the optimizer's stream."""
        if event is not None:  # torch's streams of the CPU record none.
            event.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, also where a backward failed before."""
        if root := root_if_alive(self._layerzero_unit):
            root.backward.clear_abandoned()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def reset_iter_state(self) -> None:
        """Drop the gradients of a step that failed, those of earlier micro-batches included."""
        root = root_of(self._layerzero_unit)
        if root.units[0] is not self._layerzero_unit:
            raise RuntimeError("reset_iter_state: call it on the outermost sharded module")
        root.abort()
        root.shown.give_up()

    def summon_full_params(self, **options: bool) -> AbstractContextManager[None]:
        """Show full parameters of this module and those inside, as `ZeRO3.summon_full_params`."""
        from layerzero.state_dict.summon import SummonOptions, summon

        root, inside = root_of(self._layerzero_unit), {state.unit for state in states_inside(self)}
        chosen = [unit for unit in root.units if unit in inside]
        return summon(root, chosen, SummonOptions(**options))

    # Nothing depends on these here; arguments as in torch.

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: every backward waits for its reductions."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect: reductions are sums, scaled afterwards."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """No effect: a parameter without a gradient on some ranks counts as zeros there."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """No effect: a unit is gathered in backward, unless it is full."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """No effect: one reduction is in flight."""

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """No effect: gathers and reductions use the mesh's group."""

    # Refused.

    def set_custom_all_gather(self, comm: object) -> NoReturn:
        _refuse("set_custom_all_gather", "units are gathered into their own flat buffers")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        if enable:
            _refuse("set_allocate_memory_from_process_group_for_comm", "leave it out")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        _refuse("set_symm_mem_for_comm", "leave it out")

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        if keep:
            _refuse("set_keep_unsharded_storage", "ZeRO3(arena=True) keeps addresses")

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        if enabled:
            _refuse("set_manual_backward_finalization", _SYNC)

    def finalize_backward(self, *, async_op: bool = False) -> NoReturn:
        _refuse("finalize_backward", _SYNC)

    def _chosen(self, recurse: bool) -> Iterable[State]:
        return states_inside(self) if recurse else [state_of(self)]


def follow_flags(root: RootState) -> None:
    """Have the model reduce the gradients of those units whose flags say so."""
    flags: dict[Unit, tuple[bool, bool]] = {}
    units = {*root.units}
    states = [state for state in states_inside(root.units[0].module) if state.unit in units]
    for state in states:
        unit = state.unit
        before = in_shards = root.reducer.unit_flags.get(unit, (False, False))[1]
        has_copies = any(handle.placement.outer_group is not None for handle in unit.handles)
        waits = not state.requires_sync or (has_copies and not state.requires_all_reduce)
        if waits:
            in_shards = state.requires_sync
        if in_shards is not before and any(h.gradients.host_sum is not None for h in unit.handles):
            raise RuntimeError(
                f"{unit.label}: set_requires_all_reduce or set_requires_gradient_sync was called "
                "while sums of micro-batches wait in host memory; call it between steps"
            )
        if waits or in_shards:
            flags[unit] = waits, in_shards
    root.reducer.unit_flags = flags
    syncs = any(not flags.get(s.unit, (False,))[0] for s in states if s.unit.handles)
    root.reducer.requires_sync = syncs


def _refuse(name: str, advice: str) -> NoReturn:
    raise NotImplementedError(f"fully_shard: {name} has no counterpart in layerzero: {advice}")


def state_of(module: Any) -> State:
    state: State = module.__dict__[STATE]
    return state
