"""How a ParallelManager divides the world into axes, and the device meshes that it makes of them.

Eight ranks, pp 1, dp 2, cp 2, tp 2; ranks along the last axis are neighbours:

    rank             0  1  2  3  4  5  6  7
    dp               0  0  0  0  1  1  1  1
    cp               0  0  1  1  0  0  1  1
    tp               0  1  0  1  0  1  0  1
    dp_cp = (dp, cp) 0  0  1  1  2  2  3  3      one group: ranks 0, 2, 4, 6
    edp, with ep 2   0  0  0  0  1  1  1  1      (edp, ep) = divmod(dp_cp, 2)
    ep               0  0  1  1  0  0  1  1      one group: ranks 0, 2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from layerzero.comm.new_groups import options_like
from layerzero.flat.groups import resolve_process_groups

AXES = ("pp", "dp", "cp", "tp")
"""Axes of the mesh, from the slowest links to the fastest."""
EXPERT_AXES = ("edp", "ep")
DATA_AXIS = "dp_cp"


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Number of ranks along each axis. The product without `ep` is the world size."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int

    @classmethod
    def infer(cls, world_size: int, **given: int | None) -> MeshSizes:
        """Complete the sizes so that they fill the world.

        Args:
            given: dp_size; None, 0 or less: the world divided by the other sizes. And tp_size,
                cp_size, ep_size, pp_size; None and 0, which recipes write for an axis that they do
                not use, mean 1. And zero3_size.

        Raises:
            TypeError, ValueError: a size is not a number of ranks, or the sizes do not fit.
        """
        for name, size in given.items():
            if isinstance(size, bool) or not isinstance(size, int | None):
                raise TypeError(
                    f"ParallelManager: {name}: expected a number of ranks, got {size!r}"
                )
            least = int(name == "zero3_size")
            if name != "dp_size" and size is not None and size < least:
                raise ValueError(f"ParallelManager: {name}: expected at least {least}, got {size}")
        tp_size, cp_size, ep_size, pp_size, zero3_size = (
            given[f"{axis}_size"] or 1 for axis in ("tp", "cp", "ep", "pp", "zero3")
        )
        dp_size = given["dp_size"]
        if dp_size is not None and dp_size <= 0:
            dp_size = None
        others = pp_size * cp_size * tp_size
        product = f"pp_size={pp_size} x cp_size={cp_size} x tp_size={tp_size} = {others}"
        if dp_size is None:
            if world_size % others:
                raise ValueError(
                    f"ParallelManager: {product} ranks do not divide the world of {world_size}; "
                    f"choose sizes whose product divides {world_size}, or start another number of "
                    "ranks"
                )
            dp_size = world_size // others
        elif dp_size * others != world_size:
            raise ValueError(
                f"ParallelManager: dp_size={dp_size} x {product} makes {dp_size * others} ranks, "
                f"but the world has {world_size}; leave out dp_size to have it inferred, or start "
                f"{dp_size * others} ranks"
            )
        sizes = cls(pp=pp_size, dp=dp_size, cp=cp_size, tp=tp_size, ep=ep_size)
        for name, size in (("ep_size", ep_size), ("zero3_size", zero3_size)):
            if sizes.data % size:
                raise ValueError(
                    f"ParallelManager: {name}={size} does not divide the {sizes.data} "
                    f"data-parallel ranks (dp_size={dp_size} x cp_size={cp_size}); choose a "
                    f"divisor of {sizes.data}"
                )
        return sizes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the mesh, in the order of `AXES`."""
        return self.pp, self.dp, self.cp, self.tp

    @property
    def world(self) -> int:
        return math.prod(self.shape)

    @property
    def data(self) -> int:
        """Number of ranks whose gradients are reduced together."""
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """Number of ranks that have the same experts."""
        return self.data // self.ep


def make_meshes(sizes: MeshSizes, backend: str | None) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """Make the groups of every axis. Collective over the world.

    Args:
        backend: backend of every group that is made; None: that of the default group.

    Returns:
        A mesh of all ranks, with axes pp, dp, cp and tp; and two meshes of this rank's
        data-parallel ranks, with one axis, dp_cp, and with axes edp and ep.
    """
    device_type = device_type_of(backend or dist.get_backend_config())
    override = partial(_backends, device_type=device_type, backend=backend)
    everyone = init_device_mesh(
        device_type,
        sizes.shape,
        mesh_dim_names=AXES,
        backend_override=override(AXES, sizes.shape),
    )
    if sizes.cp == 1 or sizes.dp == 1:
        along = everyone["dp" if sizes.cp == 1 else "cp"]
    else:
        shared = override((DATA_AXIS,), (sizes.data,)) or {}
        along = everyone["dp", "cp"]._flatten(DATA_AXIS, shared.get(DATA_AXIS))
    # Under its own name whichever axis it is.
    data = DeviceMesh.from_group(along.get_group(), device_type, mesh_dim_names=(DATA_AXIS,))
    split = sizes.edp, sizes.ep
    experts = along._unflatten(0, split, EXPERT_AXES, override(EXPERT_AXES, split))
    return everyone, data, experts


def _backends(
    axes: Sequence[str], sizes: Sequence[int], *, device_type: str, backend: str | None
) -> dict[Any, Any] | None:
    """The backend of each axis, or its options; without any torch takes its own defaults."""
    if backend is not None:
        return dict.fromkeys(axes, backend)
    (world,) = resolve_process_groups(None)
    options = {axis: options_like(world, torch.device(device_type)) for axis in axes}
    # An axis of all ranks is the default group itself, unless something is said of it.
    parts = [axis for axis, size in zip(axes, sizes, strict=True) if size != world.size()]
    return {axis: options[axis] for axis in parts if options[axis] is not None} or None


def device_type_of(backend: str) -> str:
    """The device type that a backend is for.

    "cpu" if one backend serves the CPU and the accelerator, as gloo does.

    Args:
        backend: a name such as "nccl", or pairs such as "cpu:gloo,cuda:nccl".
    """
    if ":" not in backend:
        backend = str(dist.distributed_c10d.BackendConfig(dist.Backend(backend)))
    by_device = dict(pair.split(":") for pair in backend.split(","))
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type not in by_device:
        return "cpu" if "cpu" in by_device else next(iter(by_device))
    is_for_both = by_device.get("cpu") == by_device[accelerator.type]
    return "cpu" if is_for_both else accelerator.type
