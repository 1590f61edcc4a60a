"""Applies tensor-parallel styles to a model, and restores what torch's implementation drops.

torch's `parallelize_module` replaces the parameters of every module. Restored here: ties between
modules, `requires_grad`, attributes, and equal values on all ranks of parameters that are not
split.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from layerzero.flat.tensor_parallel import local_of
from layerzero.parallel.styles import InOrder
from layerzero.parallel.tp_plans import Styles


def split_modules(model: nn.Module, styles: Styles, mesh: DeviceMesh) -> None:
    """Convert the parameters that `styles` names to DTensors. Collective over the mesh.

    All parameters, split or not, get the values of the mesh's first rank. Raises ValueError; the
    model has changed only if tied parameters got different placements.
    """
    _check_parameters(model, mesh)
    for name, style in styles.items():
        for part in style.styles if isinstance(style, InOrder) else (style,):
            if isinstance(part, (ColwiseParallel, RowwiseParallel)):
                _check_shape(model, name, part, mesh.size())
    before = _dropped_by_torch(model)
    parallelize_module(model, mesh, dict(styles))
    for names, requires_grad, attributes in before:
        first = model.get_parameter(names[0])
        for other in names[1:]:
            _check_tie(model, names[0], other)
            module, _, name = other.rpartition(".")
            model.get_submodule(module).register_parameter(name, first)
        first.requires_grad_(requires_grad)
        vars(first).update(attributes)
    equalize(model.parameters(), mesh)  # Gradients of these are equal on all ranks.


def _check_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"rank {dist.get_rank()}: {name!r} is a DTensor already; parallelize the whole "
                'model yourself on manager.mesh["tp"] and pass tp_plan={}, or do not parallelize it'
            )
        if not parameter.is_meta and parameter.device.type != mesh.device_type:
            raise ValueError(
                f"rank {dist.get_rank()}: {name!r} is on {parameter.device}, but the mesh is on "
                f"{mesh.device_type!r}; move the model there, or pass backend="
                f'"{parameter.device.type}:gloo" (or another backend for that device) to '
                "ParallelManager"
            )


def _check_shape(
    model: nn.Module, name: str, style: ColwiseParallel | RowwiseParallel, tp_size: int
) -> None:
    module = model.get_submodule(name)
    kind = type(style).__name__
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ValueError(
            f"{name}: {kind} splits nn.Linear and nn.Embedding, got {type(module).__name__}"
        )
    if isinstance(module, nn.Embedding):
        return
    # Unequal parts work if the module gathers its output itself. Passed on to another module as
    # local tensors, they would be treated as equal.
    if isinstance(style, ColwiseParallel) and style.output_layouts[0].is_shard():
        _check_heads(model, name, module, tp_size)
        what, size = "out_features", module.out_features
    elif isinstance(style, RowwiseParallel) and style.input_layouts[0].is_shard():
        what, size = "in_features", module.in_features
    else:
        return
    if size % tp_size:
        raise ValueError(
            f"{name}: tp_size={tp_size} does not divide its {what}={size}; choose another tp_size, "
            "or a tp_plan that leaves the module whole"
        )


def _check_heads(model: nn.Module, name: str, projection: nn.Linear, tp_size: int) -> None:
    """Raise ValueError if a q, k or v projection would be split inside a head.

    Checked for modules with a `head_dim`.
    """
    parent, _, own_name = name.removesuffix(".base_layer").rpartition(".")
    head_dim = getattr(model.get_submodule(parent), "head_dim", None)
    if own_name not in ("q_proj", "k_proj", "v_proj") or not isinstance(head_dim, int):
        return
    num_heads, rest = divmod(projection.out_features, head_dim)
    if rest or num_heads % tp_size:
        raise ValueError(
            f"{name}: tp_size={tp_size} does not divide its {projection.out_features / head_dim:g} "
            f"heads (out_features={projection.out_features}, head_dim={head_dim}); choose a "
            "tp_size that divides them"
        )


def _dropped_by_torch(model: nn.Module) -> list[tuple[list[str], bool, dict[str, Any]]]:
    """The names of each parameter (several, if modules share it), `requires_grad` and attributes.
    Not the parameter itself, which would stay alive."""
    found: dict[int, tuple[list[str], bool, dict[str, Any]]] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(each), ([], each.requires_grad, dict(vars(each))))[0].append(name)
    return list(found.values())


def _check_tie(model: nn.Module, *names: str) -> None:
    placements = [getattr(model.get_parameter(name), "placements", None) for name in names]
    if placements[0] != placements[1]:
        raise ValueError(
            f"{names[0]!r} and {names[1]!r} are tied, but the tensor-parallel plan "
            f"places them differently: {placements[0]} and {placements[1]} (None: not split); give "
            "both modules styles that split the same dimension, and build the model again, because "
            "it has been changed"
        )


def equalize(
    tensors: Iterable[torch.Tensor], mesh: DeviceMesh, device: torch.device | None = None
) -> None:
    """Broadcast the values that are not split over `mesh` from its first rank. Collective over it.
    `device`: where tensors of another device are sent from; None: all are on that of the mesh."""
    for tensor in tensors:
        is_split = isinstance(tensor, DTensor) and any(p.is_shard() for p in tensor.placements)
        if not is_split and not tensor.is_meta:
            local = local_of(tensor)
            value = (local if device is None else local.to(device)).contiguous()
            for axis in range(mesh.ndim):
                dist.broadcast(value, group=mesh.get_group(axis), group_src=0)
            if value is not local:
                local.copy_(value)
