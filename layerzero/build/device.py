"""Finds the device and the mesh of the parameters, and checks that all can be sharded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from layerzero.build.wrap import UnitPlan
from layerzero.flat.flatten import OriginalParameter
from layerzero.flat.groups import own_rank, resolve_process_groups
from layerzero.flat.names import clean_name
from layerzero.flat.parameter_hooks import kind_of_hooks
from layerzero.flat.parameter_info import foreign_class, get_info, sharded_param_of
from layerzero.flat.tensor_parallel import is_supported, local_of
from layerzero.watch.events import has_streams


def resolve_device(
    device: torch.device | None,
    plans: list[UnitPlan],
    process_group: dist.ProcessGroup | DeviceMesh | None,
    mesh: DeviceMesh | None,
) -> torch.device:
    """The device for all parameters; checks the parameters as well. Changes nothing.

    In this order: `device`, the device that the parameters are on, the mesh's device, the current
    accelerator if `process_group` has a backend for it, the CPU.

    Args:
        mesh: mesh of the DTensor parameters, which stay on its device type.

    Raises:
        ValueError: parameters are on several devices and `device` is None, a parameter cannot be
            sharded, the engine cannot run on the device, or the device is not of the mesh's type.
    """
    rank, found = own_rank(), _devices_of(plans)
    if device is not None:
        target = device
    elif len(found) > 1:
        places = " and ".join(f"{place} ({fqn!r})" for place, fqn in found.items())
        raise ValueError(
            f"rank {rank}: parameters need one device, got {places}; move the module first, or "
            "pass device="
        )
    elif found:
        target = next(iter(found))
    elif mesh is not None:
        target = torch.device(mesh.device_type)
    else:
        config = dist.get_backend_config(resolve_process_groups(process_group)[0])
        kinds = [part.partition(":")[0] for part in config.split(",")]
        accelerator, host = current_accelerator(), torch.device("cpu")
        target = accelerator if accelerator and accelerator.type in kinds else host
    check_device_type(target, f"rank {rank}: parameters go to {target}")
    if mesh is not None and target.type != mesh.device_type:
        raise ValueError(
            f"rank {rank}: parameters go to {target}, but the DTensors among them are "
            f"on a mesh of {mesh.device_type!r}: make the mesh for {target.type!r}, or pass "
            f"device={mesh.device_type!r}"
        )
    if target.type != "cpu" and target.index is None:
        target = torch.device(target.type, torch.get_device_module(target).current_device())
    return target


def check_device_type(device: torch.device, what: str) -> None:
    """Raise ValueError for a device without the streams and events that overlap needs.

    Args:
        what: the argument or object that requires the device, for the message.
    """
    if device.type == "cpu":
        return
    if device.type == "meta" or not has_streams(device):
        raise ValueError(
            f"{what}: expected the CPU or an accelerator with streams and events like CUDA's"
        )
    module = getattr(torch, device.type, None)
    if module is None or not module.is_available() or (device.index or 0) >= module.device_count():
        raise ValueError(f"{what}: torch finds no such device here")


def _devices_of(plans: list[UnitPlan]) -> dict[torch.device, str]:
    """The name of the first parameter on each device; raises if one cannot be sharded."""
    found: dict[torch.device, str] = {}
    for plan in plans:
        if plan.existing is not None and plan.existing.handles:
            found.setdefault(plan.existing.context.device, plan.existing.handles[0].fqns[0])
        for original in plan.originals:
            problem = _problem_of(original.parameter, original)
            if problem is not None:
                raise ValueError(
                    f"{plan.label} (rank {own_rank()}): parameter {original.fqn!r} {problem}"
                )
            if not original.parameter.is_meta:
                found.setdefault(original.parameter.device, original.fqn)
    return found


def current_accelerator() -> torch.device | None:
    """This process's accelerator, of any kind that has streams; None without one."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or not has_streams(kind):
        return None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _problem_of(parameter: nn.Parameter, original: OriginalParameter) -> str | None:
    """Why a parameter cannot be sharded; None if it can."""
    if is_lazy(parameter):
        return (
            "has no shape yet, because its module is lazy; run one forward on a batch of the right "
            "shape before wrapping"
        )
    foreign = foreign_class(parameter)
    if foreign is not None:
        return (
            f"is a {foreign.__module__}.{foreign.__qualname__}, a tensor subclass with its own "
            "operations; expected a plain nn.Parameter or a DTensor: convert it (dequantize a "
            "quantized one), or add it to ignored_parameters, which stay whole on every rank"
        )
    for slot in original.slots:
        if isinstance(slot.module, torch.jit.ScriptModule):
            return (
                "is in a scripted or traced module, where Python cannot replace it; use the Python "
                "module and compile() or, if nothing in it is trained, ignored_modules"
            )
    if parameter.layout is not torch.strided:
        return f"has layout {parameter.layout}; expected a dense parameter"
    if parameter.grad_dtype not in (None, parameter.dtype):
        return (
            f"has grad_dtype {parameter.grad_dtype}, but gradients of shards have the dtype of "
            "their parameter; build it in that dtype, and compute in a lower one with "
            "MixedPrecision(param_dtype=...)"
        )
    hooks_from = kind_of_hooks(parameter)
    if hooks_from is not None and (sharded := sharded_param_of(parameter)) is not None:
        info = get_info(sharded)
        return (
            f"is tied to {info.fqn if info else 'one'!r} of a module that was sharded without this "
            "one: shard both in one call (fully_shard of a list), or leave both to the module "
            "around them"
        )
    if hooks_from is not None:
        return (
            f"has hooks, registered with {hooks_from}: they would never run, because wrapping "
            "replaces the parameter; remove them, and register hooks on the sharded parameters of "
            "the wrapped model (docs/howto/recipes.md)"
        )
    if parameter.requires_grad and not (parameter.is_floating_point() or parameter.is_complex()):
        return (
            f"has dtype {parameter.dtype} and requires grad; expected a floating-point dtype: call "
            "requires_grad_(False) on it, or cast it"
        )
    return None


def tensor_parallel_mesh(
    plans: list[UnitPlan], everyone: tuple[int, ...] | None
) -> DeviceMesh | None:
    """The mesh of the DTensor parameters; None if there are none. Not collective.

    Args:
        everyone: the ranks that share the model; None: these are only planned.

    Raises:
        ValueError: a DTensor has placements other than Shard and Replicate, DTensors are on
            several meshes, or the mesh and the process group share ranks besides this one.
    """
    named = [*_meshes(plans)]
    if not named:
        return None
    rank = dist.get_rank()
    first, mesh = named[0]
    for fqn, other in named:
        if other != mesh:
            raise ValueError(
                f"rank {rank}: DTensor parameters of one model need one mesh, got "
                f"{mesh} ({first!r}) and {other} ({fqn!r}); parallelize all modules on one mesh"
            )
    shared = set(mesh.mesh.flatten().tolist()) & set(everyone or ())
    if everyone is not None and shared != {rank}:
        raise ValueError(
            f"process_group: on rank {rank} it shares ranks {sorted(shared)} with the mesh "
            f"{mesh.mesh.tolist()} of DTensor parameter {first!r}; expected this rank only: wrap "
            'on ranks of the mesh alone, with its data-parallel axis: process_group=mesh["dp"]'
        )
    return mesh


def _meshes(plans: list[UnitPlan]) -> Iterator[tuple[str, DeviceMesh]]:
    for plan in plans:
        for handle in plan.existing.handles if plan.existing is not None else ():
            for fqn, split in zip(handle.fqns, handle.splits, strict=True):
                if split is not None:
                    yield fqn, split.mesh
        for original in plan.originals:
            parameter = original.parameter
            if not isinstance(parameter, DTensor):
                continue
            if not is_supported(parameter):
                raise ValueError(
                    f"{plan.label} (rank {dist.get_rank()}): parameter {original.fqn!r} is a "
                    f"DTensor with placements {parameter.placements}; expected Shard(dim) or "
                    "Replicate() along each axis of its mesh: redistribute() it before wrapping"
                )
            yield original.fqn, parameter.device_mesh


def refuse_shared_memory(
    named: Iterable[tuple[str, nn.Parameter]], sharded: Collection[int]
) -> None:
    """Raise ValueError if the memory of two parameters overlaps, and one of them is to be sharded.

    Args:
        sharded: the ids of those that are to be.

    Each would become shards of its own. Takes n log n steps for n parameters, and reads no values.
    """
    # Of the parameters before, in memory, the one that ends last: others that overlap this one
    # overlap that one, too.
    device, reached, other, other_is_sharded = "", 0, "", False
    for place, start, stop, name, is_sharded in sorted(_memory_of(named, sharded)):
        if place == device and start < reached and (is_sharded or other_is_sharded):
            raise ValueError(
                f"parameters {other!r} and {name!r} are two Parameters over the same memory: each "
                "would get shards of its own, and a write to one would no longer change the other; "
                "make them one Parameter, which stays tied (b.weight = a.weight, without "
                "nn.Parameter or .data), or give one of them memory of its own (clone)"
            )
        if place != device or stop > reached:
            device, reached, other, other_is_sharded = place, stop, name, is_sharded


def _memory_of(
    named: Iterable[tuple[str, nn.Parameter]], sharded: Collection[int]
) -> Iterator[tuple[str, int, int, str, bool]]:
    """Device, first and last address of each parameter, its name, and whether it is sharded."""
    for name, parameter in named:
        if get_info(parameter) is not None or foreign_class(parameter) is not None:
            continue
        local = local_of(parameter)
        if local.layout is not torch.strided or not local.numel():
            continue
        if local.untyped_storage().device.type != "meta":  # That of a fake tensor is, too.
            start = local.data_ptr()
            steps = zip(local.shape, local.stride(), strict=True)
            stop = start + (sum((n - 1) * step for n, step in steps) + 1) * local.itemsize
            yield str(local.device), start, stop, clean_name(name), id(parameter) in sharded
