"""Checks of what `ZeRO3` is given, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from layerzero.comm.collectives import Operation, gather_small
from layerzero.config import (
    Accumulation,
    BackwardPrefetch,
    MixedPrecision,
    OffloadPolicy,
    ReshardAfterForward,
)
from layerzero.construct.same_start import Outline
from layerzero.construct.torch_arguments import to_unit_arguments
from layerzero.construct.wrap import UnitPlan
from layerzero.core.groups import ShardGroup, resolve_process_groups
from layerzero.core.host import is_apart_from
from layerzero.core.placement import Outer
from layerzero.core.tensor_parallel import is_supported
from layerzero.notices import warn_once
from layerzero.runtime.unit import get_unit

_OUTER: tuple[Outer, ...] = get_args(Outer)

GradientReduction = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class UnitArguments:
    """The arguments of `ZeRO3` that may differ between the units of one call."""

    mixed_precision: MixedPrecision
    reshard_after_forward: ReshardAfterForward | Callable[[nn.Module, str], ReshardAfterForward]
    gradient_reduction: GradientReduction
    offload: OffloadPolicy
    process_group: dist.ProcessGroup | DeviceMesh | None = None
    """The ranks that have the unit, where these are some of those that share the model."""
    expert_numbers: Mapping[int, int] | dist.ProcessGroup | DeviceMesh | None = None
    """Of experts that have the same names on every rank: see expert_numbers.py."""
    hook_module: nn.Module | None = None
    """Whose calls are the unit's, beside those of the unit's own module."""

    def of_unit(self, plan: UnitPlan, device: torch.device) -> UnitArguments:
        """These, with what `auto_wrap_policy` gave for one unit, and what functions say of it.

        Raises:
            ValueError, TypeError: an argument that units share, or a bad value.
        """
        if plan.existing is not None:
            return self
        try:
            mine = self._overridden(to_unit_arguments(plan.arguments, plan.module), device)
            reshard = mine.reshard_after_forward
            if callable(reshard):
                chosen = reshard(plan.module, plan.fqn)
                mine = replace(mine, reshard_after_forward=check_reshard_after_forward(chosen))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{plan.label}: {error}") from None
        return mine

    def _overridden(self, own: Mapping[str, Any], device: torch.device) -> UnitArguments:
        known = [field.name for field in fields(UnitArguments)]
        for name in own:
            if name not in known:
                raise ValueError(
                    f"auto_wrap_policy gave {name}={own[name]!r}; expected arguments that "
                    f"may differ between units, {known}: give others to ZeRO3 itself"
                )
        mixed_precision = own.get("mixed_precision", self.mixed_precision)
        check_mixed_precision(mixed_precision)
        check_gradient_reduction(own.get("gradient_reduction", "mean"))
        if not callable(own.get("reshard_after_forward")):
            check_reshard_after_forward(own.get("reshard_after_forward", True))
        _check_hook_module(own.get("hook_module"))
        changes = dict(own, mixed_precision=mixed_precision or MixedPrecision())
        if "offload" in own:
            changes["offload"] = effective_offload(own["offload"], device)
        return replace(self, **changes)


def _check_hook_module(module: object) -> None:
    if module is not None and not isinstance(module, nn.Module):
        raise TypeError(f"hook_module: expected an nn.Module or None, got {module!r}")


def check_mixed_precision(mixed_precision: object) -> None:
    if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecision):
        raise TypeError(
            f"mixed_precision: expected a MixedPrecision or None, got {mixed_precision!r}"
        )


def check_gradient_reduction(value: object) -> None:
    if value not in get_args(GradientReduction):
        raise ValueError(f"gradient_reduction: expected 'mean' or 'sum', got {value!r}")


def check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        several = (
            ": put one module around them, or leave them out of auto_wrap_policy, and they are "
            "gathered with the unit around them (docs/reference/migrating.md)"
        )
        raise TypeError(
            f"ZeRO3: expected an nn.Module, got {type(module).__name__}"
            + (several if isinstance(module, (list, tuple)) else "")
        )
    unit = get_unit(module)
    if unit is None:
        return
    root = unit.root_if_alive
    # A module whose wrapper is gone may be wrapped again; a wrapper is no such module.
    if unit.module is not module or (root is not None and root.is_wrapped):
        raise RuntimeError(
            f"ZeRO3: this {type(module).__name__} is wrapped already; wrap each module once, or "
            "wrap a module that contains it"
        )


def check_group(
    process_group: dist.ProcessGroup | DeviceMesh | None, zero3_size: int | None, outer: str
) -> dist.ProcessGroup:
    """A group with the backends of all, to find the device with. Not collective.

    Raises:
        ValueError, TypeError: a group, a size or a mode that does not exist.
    """
    check_outer(outer)
    check_zero3_size(zero3_size)
    return resolve_process_groups(process_group)[0]


def check_outer(value: object) -> None:
    if value not in _OUTER:
        raise ValueError(f"outer: expected 'zero1', 'replicate' or 'shard', got {value!r}")


def check_zero3_size(value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"zero3_size: expected an int or None, got {value!r}")


def check_backward_prefetch(value: object) -> None:
    if value is not None and not isinstance(value, BackwardPrefetch):
        raise TypeError(f"backward_prefetch: expected a BackwardPrefetch or None, got {value!r}")


def check_agreement(
    axes: Sequence[ShardGroup],
    device: torch.device,
    zero3_size: int | None,
    outer: Outer,
    tensor_parallel: DeviceMesh | None,
    experts: int,
    outline: Outline,
) -> None:
    """Refuse what differs between ranks, or does not fit. Collective over `axes`.

    Args:
        axes: the ranks that share the model: one group, or a mesh's inner and outer ones.
        tensor_parallel: the mesh of the parameters that are DTensors.
        experts: what `structure_of` (experts.py) says of the model.
        outline: of the parameters that all these ranks have.

    Raises:
        ValueError: the same on every rank, with every rank's values where they differ.
        CollectiveError: a rank did not come.
    """
    num_inner, num_outer = axes[0].size, axes[1].size if len(axes) == 2 else 1
    own = [
        num_inner if zero3_size is None else zero3_size,
        _OUTER.index(outer),
        -1 if tensor_parallel is None else _place_in(tensor_parallel),
        experts,
        outline.number,
    ]
    values = torch.tensor(own, device=device)
    for axis in axes:
        if axis.size > 1:
            values = gather_small(values, axis, Operation("agreement", "zero3_size and outer", 0))
    every = values.view(-1, len(own)).tolist()
    if any(other[:2] != every[0][:2] for other in every):
        listed = "; ".join(f"zero3_size={size}, outer={_OUTER[mode]!r}" for size, mode, *_ in every)
        raise ValueError(
            f"zero3_size and outer differ between ranks, in the group's order: {listed}"
        )
    if any(other[3] != every[0][3] for other in every):
        raise ValueError(
            "experts: ranks of the model's group have units of unequal sizes, or experts (units "
            f"with a process_group of their own) at unequal places; rank {dist.get_rank()} has "
            f"{'some' if experts else 'none'}; give every rank as many experts, of equal size"
        )
    if any(other[2] != every[0][2] for other in every):
        raise ValueError(
            "process_group: its ranks have different parts of the DTensor parameters: their "
            f"places in the tensor-parallel mesh (-1: no DTensors) are {[e[2] for e in every]}, "
            "in the group's order; cut both groups from one mesh: "
            'mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp")), '
            'parallelize_module(..., mesh["tp"]), ZeRO3(..., process_group=mesh["dp"])'
        )
    if any(other[4] != every[0][4] for other in every):
        raise ValueError(outline.explain(axes, device))
    if zero3_size is not None and len(axes) == 2 and zero3_size != num_inner:
        raise ValueError(
            f"zero3_size={zero3_size} and a mesh (outer, inner) of {num_outer, num_inner}: the "
            f"shard groups of the mesh have {num_inner} ranks; leave out zero3_size"
        )
    if zero3_size is not None and (zero3_size < 1 or num_inner % zero3_size):
        raise ValueError(
            f"zero3_size: expected a divisor of the group size {num_inner}, got {zero3_size}"
        )
    has_outer = num_outer > 1 or zero3_size not in (None, num_inner)
    if outer != "zero1" and not has_outer:
        warn_once(
            f"outer={outer}",
            f"outer={outer!r} has no effect: the shard group is the whole group, there is no axis "
            "outside it",
            is_first=not any(other.rank for other in axes) and not own[2] > 0,
            stacklevel=3,
        )


def _place_in(mesh: DeviceMesh) -> int:
    return mesh.mesh.flatten().tolist().index(dist.get_rank())


def tensor_parallel_mesh(
    plans: list[UnitPlan], process_group: dist.ProcessGroup | DeviceMesh | None
) -> DeviceMesh | None:
    """The mesh of the parameters that are DTensors; None where none is. Not collective.

    Raises:
        ValueError: a DTensor whose placements cannot be sharded further, DTensors on several
            meshes, or a mesh that does not cross the process group.
    """
    mesh: DeviceMesh | None = None
    first = ""
    for fqn, parameter_mesh in _meshes(plans):
        if mesh is not None and parameter_mesh != mesh:
            raise ValueError(
                f"rank {dist.get_rank()}: DTensor parameters of one model need one mesh, got "
                f"{mesh} ({first!r}) and {parameter_mesh} ({fqn!r}); parallelize all modules on "
                "one mesh"
            )
        if mesh is None:
            mesh, first = parameter_mesh, fqn
    if mesh is not None:
        _check_crossing(mesh, first, process_group)
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


def _check_crossing(
    mesh: DeviceMesh, fqn: str, process_group: dist.ProcessGroup | DeviceMesh | None
) -> None:
    rank = dist.get_rank()
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {rank} is not in the mesh {mesh.mesh.tolist()} of DTensor parameter {fqn!r}; "
            "parallelize and wrap the model on ranks of the mesh alone"
        )
    shared = set(mesh.mesh.flatten().tolist())
    if isinstance(process_group, DeviceMesh):
        shared &= set(process_group.mesh.flatten().tolist())
    else:
        shared &= set(dist.get_process_group_ranks(process_group))
    if shared != {rank}:
        raise ValueError(
            f"process_group: on rank {rank} it has the ranks {sorted(shared)} in common with the "
            f"mesh {mesh.mesh.tolist()} that DTensor parameter {fqn!r} is split over; expected "
            'this rank alone: pass the data-parallel axis, such as process_group=mesh["dp"]'
        )


def check_accumulation(accumulation: str) -> None:
    if accumulation not in get_args(Accumulation):
        raise ValueError(
            f"accumulation: expected 'sharded', 'unsharded' or 'auto', got {accumulation!r}"
        )


def effective_offload(offload: OffloadPolicy | None, device: torch.device) -> OffloadPolicy:
    """What can be offloaded from `device`; a warning where nothing can."""
    if offload is None:
        return OffloadPolicy()
    if not isinstance(offload, OffloadPolicy):
        raise TypeError(f"offload: expected an OffloadPolicy or None, got {offload!r}")
    if (offload.params or offload.grads) and not is_apart_from(device):
        text = f"offload={offload} has no effect: {device} has no memory of its own"
        warn_once(text, text, stacklevel=3)
        return OffloadPolicy()
    return offload


def check_reshard_after_forward(value: object) -> ReshardAfterForward:
    if value == "compute_shard":
        return "compute_shard"
    if isinstance(value, bool):
        return value
    advice = ""
    if isinstance(value, int):
        advice = (
            f"; for shards over {value} ranks use zero3_size={value}, outer='shard', "
            "reshard_after_forward='compute_shard'"
        )
    raise ValueError(
        f"reshard_after_forward: expected True, False or 'compute_shard', got {value!r}{advice}"
    )
