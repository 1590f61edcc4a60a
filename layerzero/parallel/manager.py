"""ParallelManager: makes one mesh for all kinds of parallelism, and parallelizes models on it.

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

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import experimental

from layerzero.comm.new_groups import options_like
from layerzero.config import MixedPrecision, OffloadPolicy
from layerzero.flat.groups import resolve_process_groups
from layerzero.notices import warn_once
from layerzero.parallel.split import split_modules
from layerzero.parallel.tp_plans import TensorParallelPlan, resolve_styles
from layerzero.plan.options import near_matches, read_options
from layerzero.plan.resolve import Resolved
from layerzero.plan.shard import shard_with_plan
from layerzero.plan.sharding_plan import ShardingPlan
from layerzero.wrapping.refusals import check_module, has_forward
from layerzero.wrapping.zero3 import KEYWORDS, ZeRO3

logger = logging.getLogger(__name__)
_DEVICES_OF_CONTEXT_PARALLEL = ("cuda",)
"""Device types with attention kernels that torch can run context-parallel."""

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
        """The sizes given to `ParallelManager`, completed so that they fill the world. Recipes
        write 0 for an axis that they do not use."""
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
        dp_size, others = max(given["dp_size"] or 0, 0), pp_size * cp_size * tp_size
        product = f"pp_size={pp_size} x cp_size={cp_size} x tp_size={tp_size} = {others}"
        if not dp_size and world_size % others:
            raise ValueError(
                f"ParallelManager: {product} ranks do not divide the world of {world_size}; choose "
                f"sizes whose product divides {world_size}, or start another number of ranks"
            )
        dp_size = dp_size or world_size // others
        if dp_size * others != world_size:
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
    def data(self) -> int:
        """Number of ranks whose gradients are reduced together."""
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """Number of ranks that have the same experts."""
        return self.data // self.ep


class ParallelManager:
    """Divides the world into pipeline-, data-, context- and tensor-parallel ranks.

    See docs/reference/parallelism.md.

    Construction is collective over the world; every rank must give the same sizes. On accelerators,
    select this rank's device first (`torch.cuda.set_device`).

    Args:
        dp_size: number of ranks with batches of their own; None, 0 or less: the world divided by
            the other sizes.
        tp_size: number of neighbouring ranks that split each matrix. For this and the next three
            sizes, None and 0 mean 1.
        cp_size: number of ranks that split each sequence; gradients are reduced over them as over
            data-parallel ranks.
        ep_size: number of ranks that split the experts; a divisor of dp_size x cp_size.
        pp_size: number of pipeline stages that split the layers.
        zero3_size: size of the shard groups, a divisor of dp_size x cp_size; optimizer state is
            sharded over all dp x cp ranks. None: all of them.
        sequence_parallel: tensor-parallel ranks split the sequence between their matrices.
        mixed_precision, offload: for every model, as in `ZeRO3`.
        backend: backend of the groups that are made; None: that of the default group.
        mp_policy, offload_policy: names of `fully_shard` for `mixed_precision` and `offload`.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError, TypeError: sizes do not fit the world, or differ between ranks.
    """

    sizes: MeshSizes
    mesh: DeviceMesh
    """All ranks, with axes pp, dp, cp, tp; `mesh["tp"]` is this rank's tensor-parallel group."""
    data_mesh: DeviceMesh
    """This rank's dp x cp ranks as one axis, "dp_cp"; gradients are reduced over it."""
    expert_mesh: DeviceMesh
    """The same ranks as two axes, edp and ep; experts are split over `expert_mesh["ep"]`."""

    def __init__(
        self,
        dp_size: int | None = None,
        tp_size: int | None = 1,
        cp_size: int | None = 1,
        ep_size: int | None = 1,
        pp_size: int | None = 1,
        zero3_size: int | None = None,
        sequence_parallel: bool = False,
        mixed_precision: MixedPrecision | None = None,
        offload: OffloadPolicy | None = None,
        backend: str | None = None,
        mp_policy: Any = None,
        offload_policy: Any = None,
    ) -> None:
        resolve_process_groups(None)  # Raises if torch.distributed is not initialised.
        policies: dict[str, Any] = {"mixed_precision": mixed_precision, "offload": offload}
        policies |= {"mp_policy": mp_policy, "offload_policy": offload_policy}
        policies = {name: value for name, value in policies.items() if value is not None}
        policies = read_options("ParallelManager", policies, ("mixed_precision", "offload"))
        self.sizes = MeshSizes.infer(
            dist.get_world_size(),
            dp_size=dp_size,
            tp_size=tp_size,
            cp_size=cp_size,
            ep_size=ep_size,
            pp_size=pp_size,
            zero3_size=zero3_size,
        )
        _check_agreement(f"{self.sizes}, sequence_parallel={sequence_parallel}")
        if sequence_parallel and self.sizes.tp == 1:
            warn_once("sequence_parallel=True has no effect: tp_size is 1")
        self.sequence_parallel = sequence_parallel
        self.mixed_precision: MixedPrecision | None = policies.get("mixed_precision")
        self._own = policies if zero3_size is None else {**policies, "zero3_size": zero3_size}
        self.mesh, self.data_mesh, self.expert_mesh = _meshes_of(self.sizes, backend)

    def parallelize(
        self,
        model: nn.Module,
        plan: ShardingPlan | None = None,
        tp_plan: TensorParallelPlan | None = None,
        **options: Any,
    ) -> ZeRO3:
        """Split a model over tp, and shard it over dp x cp. Collective over both.

        With pipeline stages, `model` is this rank's stage.

        Args:
            model: changed in place; on this rank's device or on the meta device. Unless it has
                equal values on all dp x cp ranks (from one seed or file), pass
                `sync_module_states=True`. Over tp, the first rank's values are broadcast.
            plan: which modules are units, with which options. None: the layers of the model, that
                is, the members of every outermost `nn.ModuleList` of several modules of one class.
                With ep_size above 1, its `ep_plan` must name the experts; each rank of the ep axis
                holds different ones.
            tp_plan: "llama", "model" (transformers), or a mapping from module names, in which `*`
                is one part of a name, to torch ParallelStyles or names of styles; an empty mapping
                if you parallelized it on `mesh["tp"]` yourself. Or the import path of a mapping, or
                of a function without arguments that returns one. None and "auto": the model's own
                plan, else Llama's. Without effect if tp_size is 1.
            options: arguments of `ZeRO3`; only without a plan.

        Returns:
            The wrapped model.

        Raises:
            ValueError, TypeError: plans or sizes that do not fit the model.
        """
        check_module(model)
        if self.sizes.ep > 1 and not (plan is not None and plan.ep_plan):
            raise ValueError(
                f"ParallelManager.parallelize: ep_size={self.sizes.ep}, but no plan names the "
                "experts: pass a plan with ep_plan; otherwise the experts of different ranks would "
                "be treated as copies of each other"
            )
        if plan is None:
            arguments = self._arguments(model, options)
        else:
            plan = self._completed(plan, options)
            if not callable(getattr(model, "fully_shard", None)):
                Resolved(plan, model).raise_or_warn()  # before anything is changed
        if self.sizes.tp > 1:
            chosen = "auto" if tp_plan is None else tp_plan
            if styles := resolve_styles(model, chosen, self.sequence_parallel):
                split_modules(model, styles, self.mesh["tp"])
        if plan is None:
            return ZeRO3(model, self.data_mesh, **arguments)
        experts = self.expert_mesh if plan.ep_plan else None
        return shard_with_plan(model, plan, self.data_mesh, expert_mesh=experts)

    def _arguments(self, model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `ZeRO3`, without a plan."""
        for name in options:
            if name not in KEYWORDS:
                raise TypeError(
                    f"ParallelManager.parallelize: unknown argument {name!r}"
                    f"{near_matches(name, KEYWORDS)}; expected arguments of ZeRO3 other than "
                    "process_group"
                )
        return {"auto_wrap_policy": _layers_of(model), **self._own, **options}

    def _completed(self, plan: ShardingPlan, options: dict[str, Any]) -> ShardingPlan:
        """The plan with the manager's own options in its defaults, unless it sets them itself."""
        if not isinstance(plan, ShardingPlan):
            raise TypeError(f"plan: expected a ShardingPlan or None, got {plan!r}")
        if options:
            raise TypeError(
                f"ParallelManager.parallelize: {sorted(options)} and a plan are both given; put "
                "arguments of ZeRO3 into the plan's defaults"
            )
        return replace(plan, defaults={**self._own, **plan.defaults})

    def context_parallel(
        self, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]
    ) -> AbstractContextManager[None]:
        """A context in which each rank has its part of the sequences and attention spans them all.

        Run forward and backward of a step inside. This is torch's `context_parallel` on
        `mesh["cp"]`: `F.scaled_dot_product_attention` exchanges keys and values. Buffers are
        split in place and restored on exit. No effect if cp_size is 1. Collective over cp.

        Args:
            buffers: all tensors of sequence length: inputs, labels, positions, rotary tables.
            seq_dims: the sequence dimension of each buffer; cp_size must divide its length.

        Raises:
            ValueError: buffers have sequences of different lengths, or of one that cp_size does not
                divide, so that means over parts would weigh tokens differently.
            NotImplementedError: torch has no context-parallel attention for this device.
        """
        mesh = self.mesh["cp"]
        if mesh.size() == 1:
            return nullcontext()
        if mesh.device_type not in _DEVICES_OF_CONTEXT_PARALLEL:
            raise NotImplementedError(
                "context_parallel: torch supports attention over parts of a sequence on CUDA only, "
                f"not on {mesh.device_type!r}; cut sequences yourself, and gather keys and values "
                'over manager.mesh["cp"] in your own attention: docs/reference/parallelism.md'
            )
        lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, seq_dims, strict=True)}
        if len(lengths) != 1 or max(lengths) % mesh.size():
            raise ValueError(
                "context_parallel: expected buffers of one sequence length, divisible by cp_size="
                f"{mesh.size()}, got lengths {sorted(lengths)}; pad the sequence"
            )
        return experimental.context_parallel(
            mesh, buffers=list(buffers), buffer_seq_dims=list(seq_dims)
        )


def _check_agreement(own: str) -> None:
    """Raise on every rank if arguments differ. Collective over the world.

    With different arguments, ranks would wait for groups or collectives that others never enter.
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    first_with = {each: every.index(each) for each in every}
    if len(first_with) > 1:
        listed = "; ".join(f"rank {rank}: {each}" for each, rank in first_with.items())
        raise ValueError(
            "ParallelManager: arguments differ between ranks; pass the same to each. The first "
            f"rank with each: {listed}"
        )


def _layers_of(model: nn.Module) -> Callable[[nn.Module, str], bool] | None:
    """The auto-wrap policy used without a plan: layers of the outermost series; None if none."""
    layers: dict[int, str] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        members = list(module) if isinstance(module, nn.ModuleList) else []
        if len(members) > 1 and len(set(map(type, members))) == 1 and has_forward(members[0]):
            inside += (f"{name}.",)
            layers |= {id(each): f"{name}.{index}" for index, each in enumerate(members)}
    if not layers:
        return None
    logger.info("ParallelManager: units are the root and %s", list(layers.values()))
    return lambda module, fqn: id(module) in layers


def _meshes_of(sizes: MeshSizes, backend: str | None) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """Make the groups of every axis; see the meshes of `ParallelManager`. Collective over the
    world. `backend`: of every group that is made; None: that of the default group."""
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
    """The device type that a backend is for, such as "nccl" or "cpu:gloo,cuda:nccl"; "cpu" if one
    serves the CPU and the accelerator, as gloo does."""
    if ":" not in backend:
        backend = str(dist.distributed_c10d.BackendConfig(dist.Backend(backend)))
    by_device = dict(pair.split(":") for pair in backend.split(","))
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type not in by_device:
        return "cpu" if "cpu" in by_device else next(iter(by_device))
    is_for_both = by_device.get("cpu") == by_device[accelerator.type]
    return "cpu" if is_for_both else accelerator.type
