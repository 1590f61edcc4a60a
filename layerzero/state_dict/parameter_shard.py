"""Entries of sharded state dicts that stand for what one rank has: ParameterShard and RankLocal.

Like a DTensor, a ParameterShard has the shape of the full tensor. It implements the
`_Checkpointable` protocol of `torch.distributed.checkpoint`: which boxes of the full tensor this
rank writes, and where those it reads go. So that library saves and loads it with no communication
other than its own planning.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from layerzero.notices import warn_once
from layerzero.state_dict.full_tensors import gather
from layerzero.state_dict.preconditions import refuse_other_name, unit_of
from layerzero.state_dict.ranges import Box, Extent, boxes
from layerzero.step.root import RootState, root_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_SAME_SHAPE = {
    *("detach", "alias", "clone", "_to_copy", "copy_", "fill_", "zero_", "_pin_memory"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "is_pinned", "equal"),
}
"""Operations that work on a shard as on the full tensor, besides element-wise ones."""


class ParameterShard(torch.Tensor):
    """A tensor of which this rank holds elements [start, stop) of the flattened block `extent`.

    Attributes:
        local: this rank's elements, contiguous, in the shape of the sharded parameter. In a state
            dict it shares memory with the model or the optimizer: writing to it changes them.
        extent: the full tensor's shape, and this rank's tensor-parallel block of it.
        range: (start, stop).

    Copies, casts and element-wise operations work on `local` and return a shard. Operations that
    need elements of other ranks raise NotImplementedError; `full_tensor()` gathers them.
    """

    local: torch.Tensor
    extent: Extent
    range: tuple[int, int]
    sharded_param: weakref.ref[nn.Parameter] | None = None
    """The sharded parameter, which leads to the ranks to gather from; None if read from a file."""

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        extent: Extent,
        range: tuple[int, int],
        sharded_param: weakref.ref[nn.Parameter] | None = None,
    ) -> ParameterShard:
        shard: ParameterShard = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(extent.shape), dtype=local.dtype, device=local.device
        )
        shard.local = local
        shard.extent = extent
        shard.range = range
        shard.sharded_param = sharded_param
        return shard

    @property
    def _local_tensor(self) -> torch.Tensor:
        """`local`, as a DTensor has it: some programs gather whatever has this attribute."""
        return self.local

    def __reduce_ex__(self, protocol: Any) -> Any:
        # No other pickler uses this protocol: copies and messages between ranks do not warn.
        if protocol == torch.serialization.DEFAULT_PROTOCOL and self.local.numel() < self.numel():
            warn_once(
                f"torch.save writes this rank's part alone, elements {self.range} of shape "
                f"{tuple(self.shape)}. To write the whole on one rank, save value.full_tensor(), "
                "which every rank calls; isinstance(value, DTensor) is False for such a value",
                key="torch.save of a shard",
            )
        return ParameterShard, (self.local, self.extent, self.range)

    def __repr__(self) -> str:  # type: ignore[override]
        whole = f"{tuple(self.shape)}, {self.dtype}, {self.device}"
        return f"ParameterShard(elements {self.range} of shape {whole})"

    def like(self, local: torch.Tensor) -> ParameterShard:
        """A shard of the same range with other elements."""
        return ParameterShard(local, self.extent, self.range, self.sharded_param)

    def full_tensor(self) -> torch.Tensor:
        """A new full tensor of this shard's shape and dtype, on every rank.

        Collective over the ranks that share the model, between steps.

        Raises:
            ValueError: the shard was read from a file, or its model is gone.
            CollectiveError: a rank died, or did not take part within the timeout.
        """
        root, sharded_param = self.owner()
        ((_, full),) = gather(root, {0: (sharded_param, self.local)})
        return full.detach().clone()

    def owner(self) -> tuple[RootState, nn.Parameter]:
        """Its model, and its sharded parameter. Raises as `full_tensor`."""
        sharded_param = None if self.sharded_param is None else self.sharded_param()
        unit = None if sharded_param is None else unit_of(sharded_param)
        if sharded_param is None or unit is None:
            raise ValueError(
                f"{self} belongs to no model in this process: it was read from a file, or its "
                "model was deleted. Load it into a model first"
            )
        return root_of(unit), sharded_param

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a plain tensor of the full shape, in the shape of `local`."""
        ends = zip(self.extent.offsets, self.extent.local_shape, strict=True)
        block = whole[tuple(slice(at, at + size) for at, size in ends)]
        return block.reshape(-1)[slice(*self.range)].view(self.local.shape)

    def _refuse_bytes(self, **options: object) -> NoReturn:
        raise RuntimeError(
            f"a sharded tensor of shape {tuple(self.shape)}, of which this rank has elements "
            f"{self.range} (.local), cannot be written or read whole (safetensors, numpy, "
            "load_state_dict of a plain module); call full = "
            "layerzero.checkpoint.get_model_state_dict(model, full=True, "
            "cpu_offload=True, rank0_only=True) on every rank, and write full on the first rank; "
            "layerzero.checkpoint.save writes a folder with the weights as safetensors"
        )

    numpy = tolist = untyped_storage = _refuse_bytes
    storage = _refuse_bytes  # The last method that safetensors tries.

    def is_of_same_place(self, other: ParameterShard) -> bool:
        return (self.extent, self.range) == (other.extent, other.range)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("_foreach_"):  # One by one: averages over state dicts use it.
            columns = [x if isinstance(x, list) else [x] * len(args[0]) for x in args]
            single = getattr(torch.Tensor, name.removeprefix("_foreach_"))
            results = [single(*row, **kwargs) for row in zip(*columns, strict=True)]
            return results if func._schema.returns else None
        operands = (*args, *kwargs.values())
        shards = [each for each in operands if isinstance(each, cls)]
        first: Any = shards[0] if shards else None
        if name == "copy_" and first is not args[0]:
            args[1]._refuse_bytes()  # Elements of a shard would be broadcast over a whole tensor.
        if shards and name == "new_empty" and tuple(args[1]) == tuple(first.shape):
            return first.like(first.local.new_empty(first.local.shape, **kwargs))
        plain = [x for x in operands if isinstance(x, torch.Tensor) and not isinstance(x, cls)]
        is_pointwise = torch.Tag.pointwise in func.tags and not any(each.ndim for each in plain)
        of_one_range = shards and all(first.is_of_same_place(other) for other in shards)
        if not (of_one_range and (name in _SAME_SHAPE or is_pointwise)):
            raise NotImplementedError(
                f"{func} needs the whole tensor, or shards of one range; this rank has {shards}. "
                "Use .local, or .full_tensor() on all ranks"
            )
        is_plain = name == "copy_" and type(args[1]) in (torch.Tensor, nn.Parameter)
        if is_plain and args[1].shape == first.shape:  # `state_dict()[name].copy_(whole)`
            args = (first, first.part_of(args[1]), *args[2:])
        local_args = [each.local if isinstance(each, cls) else each for each in args]
        local_kwargs = {k: v.local if isinstance(v, cls) else v for k, v in kwargs.items()}
        result = func(*local_args, **local_kwargs)
        if not isinstance(result, torch.Tensor):
            return result
        return first if result is first.local else first.like(result)

    def _boxes(self) -> list[Box]:
        found = list(boxes(self.extent, *self.range))
        if not found and not self.numel():
            # A tensor without elements still needs a box: one that no rank writes cannot be read.
            return [Box(0, self.extent.offsets, self.extent.local_shape)]
        return found

    def _check_name(self, key: str) -> None:
        if self.sharded_param and (sharded_param := self.sharded_param()) is not None:
            refuse_other_name(sharded_param, key)

    def _chunk(self, box: Box) -> ChunkStorageMetadata:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self._check_name(fqn)
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(self._chunk(box), properties, self.shape),
            )
            for box in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(box) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        self._check_name(index.fqn)
        for box in self._boxes():
            if index.offset is None or torch.Size(box.offsets) == index.offset:
                numel = torch.Size(box.sizes).numel()
                return self.local.view(-1)[box.local : box.local + numel].view(box.sizes)
        raise ValueError(
            f"{index.fqn}: no box of this rank begins at {index.offset}; this rank has elements "
            f"{self.range} of shape {tuple(self.shape)}"
        )


class RankLocal(torch.Tensor):
    """A plain tensor that `torch.distributed.checkpoint` must not treat as equal on all ranks.

    It differs between ranks, and there is no rule to reshard it for other ranks. It can be used and
    copied like any tensor, and its rank may torch.save it.
    """

    what: str = "a tensor of this rank only"

    def plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rank_local, (self.plain(), self.what)

    def __deepcopy__(self, memo: dict[int, Any]) -> RankLocal:
        return rank_local(copy.deepcopy(self.plain(), memo), self.what)

    def refuse(self, *args: object) -> NoReturn:
        raise NotImplementedError(
            f"{self.what}: this rank alone has this tensor of shape {tuple(self.shape)}, which "
            "cannot be resharded. With a WholeTensorOptimizer use layerzero.checkpoint.save, or "
            "layerzero.checkpoint.get_optimizer_state_dict(full=True); with another, torch.save "
            "each rank's state separately"
        )

    # What torch.distributed.checkpoint calls.
    __create_write_items__ = __create_chunk_list__ = __get_tensor_shard__ = refuse


def rank_local(value: torch.Tensor, what: str) -> RankLocal:
    """A view of `value`. `what` names it in the error."""
    marked = value.detach().as_subclass(RankLocal)
    marked.what = what
    return marked


# A rank may torch.save its own state dict, and load it with weights_only.
torch.serialization.add_safe_globals([ParameterShard, Extent, rank_local])
