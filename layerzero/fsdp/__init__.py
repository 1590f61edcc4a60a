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
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from layerzero.build.device import current_accelerator
from layerzero.flat.names import clean_name
from layerzero.flat.parameter_info import change_info, get_info
from layerzero.fsdp.module import STATE, FSDPModule, State, follow_flags, state_of, states_inside
from layerzero.module_tree.conversions import guard
from layerzero.step import hooks
from layerzero.step.methods import put
from layerzero.step.unit import set_unit, unset_unit
from layerzero.wrapping.comm_hooks import set_hooks
from layerzero.wrapping.zero3 import KEYWORDS, keep_root, shard_in_place

__all__ = ["FSDPModule", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]
T = TypeVar("T")
"""A module, or a list of modules."""


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
    state = State(root.units[0], is_auto=reshard_after_forward is None)
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
    for part in top.modules():
        if hasattr(part, "generate"):  # That of transformers goes on until all ranks are done.
            part.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)
    for each in modules:
        each.__dict__[STATE] = state
        if "compile" in each.__dict__:  # Not if its class has one of its own.
            own = each.__dict__["compile"]
            put(each.__dict__, "compile", functools.partial(_compile, weakref.ref(each), own))
        kind: Any = type(each)
        # `torch.compile` returns a module whose `__setattr__` would set it on the one inside.
        object.__setattr__(each, "__class__", _class_of(kind))
    for other in states_inside(top).keys() - {state}:
        _join(other, top)
    follow_flags(root)
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
    if STATE in module.__dict__:
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
        if STATE in part.__dict__:
            (own if part is ref() else part.compile)(*args, **named)


def _join(state: State, top: nn.Module) -> None:
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
            for index, sharded in enumerate(handle.sharded_params):
                handle.fqns[index] = names.get(id(sharded), handle.fqns[index])
                change_info(sharded, fqn=handle.fqns[index])


@functools.cache
def _class_of(cls: Any) -> Any:
    """`cls` with the methods of `FSDPModule`: one class for all modules of `cls`, so that code
    compiled for one of them fits the others."""
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make `module.method_name(...)` unshard and reshard parameters as `module(...)` does.

    Does nothing to a module that is not sharded.

    Raises:
        ValueError: `module` has no such method.
    """
    if isinstance(module, FSDPModule):
        if not callable(getattr(module, method_name, None)):
            raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
        hooks.install(module, method_name, state_of(module).unit)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """No effect: each model has streams of its own, and memory is not bound to them for long.

    Raises:
        ValueError: a module is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected modules that fully_shard sharded, got {type(module)}")
