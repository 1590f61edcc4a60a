"""MeshStrategy: data-parallel times tensor-parallel ranks under Lightning's Trainer.

    data_parallel_size 2, tensor_parallel_size 2      rank             0  1  2  3
    device_mesh, with Lightning's axis names          data_parallel    0  0  1  1
                                                      tensor_parallel  0  1  0  1

Ranks that differ only along `tensor_parallel` hold parts of one model: they need the same batch,
and count as one when samples are distributed and values reduced.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from layerzero.integrations.engine import equalize, get_info

DATA, TENSOR = "data_parallel", "tensor_parallel"
Size = int | Literal["auto"]


class MeshStrategy(DDPStrategy):
    """Makes the device mesh, and distributes samples and reduces values over it; shards nothing."""

    def __init__(
        self,
        data_parallel_size: Size,
        tensor_parallel_size: Size,
        process_group: dist.ProcessGroup | DeviceMesh | None,
        **of_ddp: Any,
    ) -> None:
        if process_group is not None and (data_parallel_size, tensor_parallel_size) != ("auto", 1):
            raise ValueError(
                "ZeRO3Strategy: process_group and sizes are all given: pass either the process "
                "group, or the sizes of a mesh that the strategy makes"
            )
        super().__init__(**of_ddp)
        self._sizes = data_parallel_size, tensor_parallel_size
        self._given_group = process_group
        self._device_mesh: DeviceMesh | None = None

    @property
    def device_mesh(self) -> DeviceMesh:
        """A mesh with axes "data_parallel" and "tensor_parallel"; or the root of `process_group`.

        Raises:
            RuntimeError: the Trainer has not started, or `process_group` is not a mesh.
        """
        if self._device_mesh is None:
            raise RuntimeError(
                "ZeRO3Strategy: no device mesh yet: it is made when the Trainer starts"
            )
        return self._device_mesh

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | DeviceMesh | None:
        """The ranks that the model is sharded over; None: all."""
        if self._given_group is not None:
            return self._given_group
        if self._device_mesh is None or self._device_mesh[TENSOR].size() == 1:
            return None
        return self._device_mesh[DATA]

    def _groups(self) -> list[dist.ProcessGroup]:
        """A group for each axis of `data_parallel_group`; none if that is all ranks."""
        group = self.data_parallel_group
        if isinstance(group, DeviceMesh):
            return group.get_all_groups()
        return [] if group is None else [group]

    def setup_environment(self) -> None:
        """Join the process group, and make the mesh. Collective.

        Raises:
            ValueError: on all ranks: the sizes do not fill the world.
        """
        super().setup_environment()
        if self._given_group is not None:
            if isinstance(self._given_group, DeviceMesh):
                self._device_mesh = self._given_group._get_root_mesh()
        elif self._device_mesh is None:
            kind, sizes = self.root_device.type, self._resolved_sizes()
            self._device_mesh = init_device_mesh(kind, sizes, mesh_dim_names=(DATA, TENSOR))
        if self.lightning_module is not None:
            # `LightningModule.device_mesh`, used in `configure_model`, reads this attribute.
            self.lightning_module._device_mesh = self._device_mesh

    def _resolved_sizes(self) -> tuple[int, int]:
        given_data, given_tensor = self._sizes
        world = dist.get_world_size()
        if given_tensor != "auto":
            tensor = given_tensor
        else:  # As in Lightning: one tensor-parallel group for each node.
            tensor = self.num_processes if given_data == "auto" else max(world // given_data, 1)
        data = max(world // tensor, 1) if given_data == "auto" else given_data
        if data * tensor != world:
            raise ValueError(
                f"ZeRO3Strategy: data_parallel_size={self._sizes[0]!r} and "
                f"tensor_parallel_size={self._sizes[1]!r} make {data} x {tensor} = {data * tensor} "
                f"ranks, but the Trainer has {world}; choose a tensor_parallel_size that divides it"
            )
        return data, tensor

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for the sampler; tensor-parallel ranks get the same samples."""
        groups = self._groups()
        if not groups:
            return super().distributed_sampler_kwargs
        number, place = 1, 0
        for group in groups:
            number *= group.size()
            place = place * group.size() + dist.get_rank(group)
        return {"num_replicas": number, "rank": place}

    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean"
    ) -> torch.Tensor:
        """Reduce over `group`; None: over the data-parallel ranks. Collective."""
        for each in (group,) if group is not None else self._groups() or (None,):
            tensor = super().reduce(tensor, each, reduce_op)
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or any rank) of the world decided True. Collective."""
        votes = torch.tensor(int(decision), device=self.root_device)
        votes = super().reduce(votes, dist.group.WORLD, "sum")
        return bool(votes == self.world_size) if all else bool(votes)

    def prepare_mesh(self, model: nn.Module, sync_copies: bool) -> None:
        """Prepare a model for sharding. Collective over the tensor-parallel ranks. `sync_copies`:
        broadcast replicated parameters and buffers from the first of these ranks."""
        groups = self._groups()
        if len(groups) == 1:
            for module in model.modules():
                if isinstance(module, Metric) and module.process_group is None:
                    module.process_group = groups[0]
        split = next(filter(None, map(_tensor_mesh_of, model.parameters())), None)
        if self._given_group is None:
            assert self._device_mesh is not None, "setup_environment has made it"
            mesh = self._device_mesh[TENSOR]
            if split is not None and mesh.size() == 1 and split.size() > 1:
                raise ValueError(
                    f"ZeRO3Strategy: parameters are split over ranks {split.mesh.tolist()} already;"
                    f" pass tensor_parallel_size={split.size()} and split them over this strategy's"
                    " device_mesh, or pass as process_group the data-parallel axis of your own"
                )
        if sync_copies and split is not None:
            # Not sharded parameters: `sync_module_states` of the ZeRO3 inside decided about those.
            own = [parameter for parameter in model.parameters() if get_info(parameter) is None]
            equalize((*own, *model.buffers()), split, self.root_device)


def _tensor_mesh_of(parameter: nn.Parameter) -> DeviceMesh | None:
    """The mesh of a DTensor, sharded or not; None for another parameter."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh
    info = get_info(parameter)
    return None if info is None or info.tensor_parallel is None else info.tensor_parallel.mesh
