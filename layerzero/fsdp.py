"""fully_shard: torch's function of that name over this engine; modules are sharded in place.

Each call makes one unit of the parameters that earlier calls left, and the model as it is so far:
units of modules inside join it, as those of a nested `ZeRO3` do. So a block that has no root around
it is a model of its own, and parameters are shards as soon as the call returns.

Note [Modules of a list]
    A list of modules is one unit, whose module is the first of them; calls of each gather it. The
    engine builds it from a `_Together` around them, which stays until a call for a module around
    them, which gives its parameters, and those of units inside, the names that they have there.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from layerzero.build.device import current_accelerator
from layerzero.comm_hooks import by_reduce_scatter, set_hooks
from layerzero.flat.names import clean_name
from layerzero.flat.parameter_info import change_info, get_info
from layerzero.model_functions import UnitMethods
from layerzero.module_tree.conversions import guard
from layerzero.step import hooks
from layerzero.step.methods import put
from layerzero.step.root import RootState, root_if_alive, root_of
from layerzero.step.unit import Hold, Unit, set_unit, unset_unit
from layerzero.zero3 import KEYWORDS, keep_root, shard_in_place

_STATE = "_layerzero_fully_shard"
_AFTER_BACKWARD = int(Hold.AFTER_BACKWARD)
_SYNC = "every backward ends its reductions; to reduce once, use set_requires_gradient_sync"
T = TypeVar("T")
"""A module, or a list of modules."""


@dataclass(eq=False)
class _State:
    """One call of `fully_shard`; each module of a list has the same."""

    unit: Unit
    is_auto: bool
    """Whether the unit is kept full between forward and backward if, and only if, it is a root."""
    around: nn.Module | None = None
    """A `_Together` whose names the unit has, see Note [Modules of a list]; None: others' names."""
    requires_sync: bool = True
    requires_all_reduce: bool = True


def fully_shard(
    module: T,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> T:
    """Shard the parameters of a module that no earlier call has sharded; see torch's `fully_shard`.

    Collective over the mesh; every rank must call it for the same modules in the same order, those
    inside before those around. In place: the module keeps its identity, names, methods and
    attributes; its class becomes a subclass of its own and of `FSDPModule`. `parameters()` returns
    this rank's shards: some rows of each parameter, in its number of dimensions (`layout="rows"` of
    `ZeRO3`).

    Parameters on the meta device become shards without values: a load, or `to_empty` and what draws
    values, must write them before the first forward.

    Args:
        module: a module; or several, which are gathered together, whenever one of them is called.
        mesh: one axis, or two: (replicate, shard). None: all ranks, on the accelerator if there is
            one. Parameters and buffers are moved to its device.
        reshard_after_forward: True: free the unit after its forward. False: keep it until its
            backward. None: True, but False for a unit that no other one is around. An int: keep
            1/int of it, so that backward gathers over that many neighbours.
        shard_placement_fn: returns None or a Shard for each parameter. Only checked: borders lie on
            rows whatever dimension it names, and gathered values are the same.
        mp_policy: torch's `MixedPrecisionPolicy`, or a `MixedPrecision`.
        offload_policy: torch's `CPUOffloadPolicy` and `OffloadPolicy`, or our `OffloadPolicy`.
        ignored_params: parameters that stay whole, and whose gradients are not reduced.

    Returns:
        `module`.

    Raises:
        NotImplementedError: `dp_mesh_dims`, a `shard_placement_fn` that returns anything else, as a
            mesh for one parameter, or an int with two axes.
        ValueError, TypeError: another argument is wrong; also as `ZeRO3`.
        RuntimeError: the module is sharded already.
    """
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            "fully_shard: dp_mesh_dims is not supported: pass the data-parallel axes, "
            'mesh=mesh["dp"] or mesh=mesh["replicate", "shard"]'
        )
    modules = _outermost([module] if isinstance(module, nn.Module) else module)
    for each in modules:
        _check_module(each)
    top = modules[0] if len(modules) == 1 else _Together(*modules)
    _check_placements(top, shard_placement_fn)
    given = {
        **KEYWORDS,
        "module": top,
        "process_group": mesh,
        **_resharding(mesh, reshard_after_forward),
        "mixed_precision": mp_policy,
        "offload": offload_policy,
        "ignored_parameters": [p for p in top.parameters() if p in (ignored_params or ())],
        "param_init_fn": "later",
        "device": current_accelerator() or "cpu" if mesh is None else mesh.device_type,
        # As torch adds up micro-batches: before anything is sent.
        "accumulation": "unsharded",
        # Rules by `ndim` and shapes see what torch's local shards show.
        "layout": "rows",
    }
    root, _ = shard_in_place(top, given, {})
    state = _State(root.units[0], is_auto=reshard_after_forward is None)
    if isinstance(top, _Together):
        # Calls of each of `modules`, instead of `top`, unshard its unit.
        state.around = top
        unset_unit(top)
        set_unit(modules[0], state.unit)
        state.unit.move_to(modules[0])
        for each in modules:
            hooks.install_on_calls(each, state.unit)
            guard(each)
    keep_root(modules[0], root, modules[0])
    for each in modules:
        each.__dict__[_STATE] = state
        if "compile" in each.__dict__:  # Not if its class has one of its own.
            own = each.__dict__["compile"]
            put(each.__dict__, "compile", functools.partial(_compile, weakref.ref(each), own))
        kind: Any = type(each)
        # `torch.compile` returns a module whose `__setattr__` would set it on the one inside.
        object.__setattr__(each, "__class__", _class_of(kind))
    for other in _states(top).keys() - {state}:
        _join(other, top)
    _follow_flags(root)
    if any(unit.comm_hooks for unit in root.units):
        set_hooks(root)
    return module


def _outermost(modules: Any) -> list[nn.Module]:
    """The modules of a list, without those inside another one of it."""
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard: expected modules, got a {type(module).__name__}")
    if not modules:
        raise ValueError("fully_shard: got an empty list of modules")
    inside = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in dict.fromkeys(modules) if id(module) not in inside]


def _check_module(module: nn.Module) -> None:
    name = type(module).__name__
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if is_container and type(module).forward is nn.Module.forward:
        raise ValueError(
            "fully_shard does not support containers that do not implement forward, as this "
            f"{name}: nothing would gather its parameters; call it for each member"
        )
    if _STATE in module.__dict__:
        raise RuntimeError(f"fully_shard: this {name} is sharded already")


def _check_placements(top: nn.Module, function: Callable[[nn.Parameter], Any] | None) -> None:
    for name, parameter in top.named_parameters() if function is not None else ():
        if get_info(parameter) is None:
            found = function(parameter)  # type: ignore[misc]
            if found is not None and type(found) is not Shard:
                raise NotImplementedError(
                    f"fully_shard: shard_placement_fn returned {found} for {name!r}; expected None "
                    "or a Shard; for experts use ZeRO3, with a process_group of their own"
                )


def _resharding(mesh: DeviceMesh | None, value: object) -> dict[str, Any]:
    """Arguments of `ZeRO3` for torch's `reshard_after_forward` and the axes of the mesh."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"fully_shard: mesh: expected a DeviceMesh or None, got {mesh!r}")
    if mesh is not None and mesh.ndim > 2:
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    num_copies = mesh.size(0) if mesh is not None and mesh.ndim == 2 else 0
    arguments: dict[str, Any] = {"outer": "replicate"} if num_copies > 1 else {}
    if value is None or isinstance(value, bool):
        return {**arguments, "reshard_after_forward": bool(value)}
    size = dist.get_world_size() if mesh is None else mesh.size(mesh.ndim - 1)
    if not isinstance(value, int) or value < 1 or size % value:
        raise ValueError(
            f"fully_shard: reshard_after_forward: expected a bool, None or a divisor of {size}, "
            f"the ranks that share a unit, got {value!r}"
        )
    if value in (1, size):
        return {**arguments, "reshard_after_forward": value == size}
    if num_copies:
        raise NotImplementedError(
            f"fully_shard: reshard_after_forward={value} with a mesh of two axes is not supported; "
            "use True or False"
        )
    return {"zero3_size": value, "outer": "shard", "reshard_after_forward": "compute_shard"}


class _Together(nn.Sequential):
    """The modules of a list, under numbers; each is called by itself."""


def _compile(ref: Callable[[], Any], own: Callable[..., None], *args: Any, **named: Any) -> None:
    """Compile a module, whose graph ends at the units inside it, and these as graphs of theirs."""
    for part in ref().modules():
        if _STATE in part.__dict__:
            (own if part is ref() else part.compile)(*args, **named)


def _states(module: Any) -> dict[_State, None]:
    """The states of this module and those inside it, outermost first."""
    found = (part.__dict__.get(_STATE) for part in module.modules())
    return dict.fromkeys(state for state in found if state is not None)


def _join(state: _State, top: nn.Module) -> None:
    """The unit has joined the model of `top`."""
    if state.is_auto:
        state.unit.set_options(reshard_after_forward=True)
    numbered, state.around = state.around, top if isinstance(top, _Together) else None
    if numbered is not None:
        unit = state.unit
        names = {id(p): clean_name(name) for name, p in top.named_parameters()}
        path = next(name for name, part in top.named_modules() if part is unit.module)
        unit.fqn = ""
        unit.rename(clean_name(path))
        for handle in unit.handles:
            pairs = zip(handle.sharded_params, handle.fqns, strict=True)
            handle.fqns = [names.get(id(sharded), fqn) for sharded, fqn in pairs]
            for sharded, fqn in zip(handle.sharded_params, handle.fqns, strict=True):
                change_info(sharded, fqn=fqn)


@functools.cache
def _class_of(cls: Any) -> Any:
    """`cls` with the methods of `FSDPModule`: one class for all modules of `cls`, so that code
    compiled for one of them fits the others."""
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


class FSDPModule(UnitMethods):
    """Methods of a module that `fully_shard` sharded, as torch documents them.

    `recurse`: for the units inside it as well.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Containers make parts of themselves by their class: `blocks[1:]`.
        own = next(each for each in cls.__mro__ if not issubclass(each, UnitMethods))
        return own(*args, **kwargs)

    @property
    def _layerzero_unit(self) -> Unit:  # type: ignore[override]
        return _state(self).unit

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """False: backward passes add up gradients on each rank; the first one after True reduces.
        Units may differ; the same on every rank."""
        for state in self._chosen(recurse):
            state.requires_sync = state.requires_all_reduce = bool(requires_gradient_sync)
        _follow_flags(root_of(self._layerzero_unit))

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: with a mesh of two axes, gradients add up after they were reduced over the shard
        axis. Units may differ; the same on every rank."""
        for state in self._chosen(recurse):
            state.requires_all_reduce = bool(requires_all_reduce)
        _follow_flags(root_of(self._layerzero_unit))

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
            unit = state.unit
            (unit.end_hold if reshard_after_backward else unit.hold)(_AFTER_BACKWARD)

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
        unit = self._layerzero_unit
        root = root_of(unit)
        if root.units[0] is not unit:
            raise RuntimeError("reset_iter_state: call it on the outermost sharded module")
        root.give_up_step()

    def summon_full_params(self, **options: bool) -> AbstractContextManager[None]:
        """Show full parameters of this module and those inside. torch has no such method; see
        `ZeRO3.summon_full_params`."""
        from layerzero.state_dict.summon import SummonOptions, summon

        root, inside = root_of(self._layerzero_unit), {state.unit for state in _states(self)}
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

    def _chosen(self, recurse: bool) -> Iterable[_State]:
        return _states(self) if recurse else [_state(self)]


def _follow_flags(root: RootState) -> None:
    """Have the model reduce the gradients of those units whose flags say so."""
    flags: dict[Unit, tuple[bool, bool]] = {}
    units = {*root.units}
    states = [state for state in _states(root.units[0].module) if state.unit in units]
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
    root.reducer.set_requires_sync(syncs)


def _refuse(name: str, advice: str) -> NoReturn:
    raise NotImplementedError(f"fully_shard: {name} has no counterpart in layerzero: {advice}")


def _state(module: Any) -> _State:
    state: _State = module.__dict__[_STATE]
    return state


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make `module.method_name(...)` unshard and reshard parameters as `module(...)` does.

    Does nothing to a module that is not sharded.

    Raises:
        ValueError: `module` has no such method.
    """
    if isinstance(module, FSDPModule):
        if not callable(getattr(module, method_name, None)):
            raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
        hooks.install(module, method_name, _state(module).unit)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """No effect: each model has streams of its own, and memory is not bound to them for long.

    Raises:
        ValueError: a module is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected modules that fully_shard sharded, got {type(module)}")
