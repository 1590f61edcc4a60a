"""Tensor-parallel styles: torch's, by the names model plans use; and what those lack.

A model's plan names styles by strings. `style_named` makes torch's `ParallelStyle` of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

SEQUENCE_DIM = 1
"""Of hidden states, [batch, sequence, width]."""


class PlaceHidden(ParallelStyle):
    """Bring a module's hidden states, its first argument or `hidden_states`, from one placement to
    another.

    Args:
        given: placement of a local tensor that the module's caller passes.
        wanted: placement that the module computes on.
        as_dtensor: hand on a DTensor, so that its gradient is summed once for all its uses.
    """

    def __init__(self, given: Placement, wanted: Placement, *, as_dtensor: bool) -> None:
        self.given = given
        self.wanted = wanted
        self.as_dtensor = as_dtensor

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hook = partial(self._before_forward, device_mesh)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module

    def _before_forward(
        self, mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._place(args[0], mesh, module), *args[1:]), kwargs
        if "hidden_states" in kwargs:
            placed = self._place(kwargs["hidden_states"], mesh, module)
            return args, {**kwargs, "hidden_states": placed}
        raise TypeError(
            f"{type(module).__name__}: expected hidden states as the first argument or as "
            f"hidden_states=, to split over tensor-parallel ranks; got {sorted(kwargs)}"
        )

    def _place(self, hidden: Tensor, mesh: DeviceMesh, module: nn.Module) -> Tensor:
        if self.wanted.is_shard():
            self._check_length(hidden, mesh, module)
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, [self.given], run_check=False)
        placed = hidden.redistribute(placements=[self.wanted])
        return placed if self.as_dtensor else arrived(placed.to_local())

    def _check_length(self, hidden: Tensor, mesh: DeviceMesh, module: nn.Module) -> None:
        # Parts of unequal lengths would be taken for equal ones further inside.
        if hidden.ndim <= SEQUENCE_DIM or hidden.shape[SEQUENCE_DIM] % mesh.size():
            raise ValueError(
                f"{type(module).__name__}: sequence_parallel needs hidden states [batch, sequence, "
                f"width] whose sequence tp_size={mesh.size()} divides, got {tuple(hidden.shape)}; "
                "pad the sequence"
            )


class Arrived(ParallelStyle):
    """Wait for an output that a collective still brings.

    torch hands such a tensor on as an `AsyncCollectiveTensor`. Given to a compiled module, with
    torch 2.13, it loses its gradient or fails in backward.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(self._after_forward)
        return module

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return arrived(output)


def arrived(value: Any) -> Any:
    """The value, waited for if a collective still brings it."""
    if isinstance(value, AsyncCollectiveTensor):
        return _Wait.apply(value)  # type: ignore[no-untyped-call]
    return value


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        return tensor.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class InOrder(ParallelStyle):
    """Several styles on one module; hooks of the later ones see what the earlier ones return."""

    def __init__(self, *styles: ParallelStyle) -> None:
        self.styles = styles

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in self.styles:
            style.src_data_rank = self.src_data_rank
            module = style._apply(module, device_mesh)
        return module


def whole_to_whole() -> ParallelStyle:
    """Around several column-wise modules: one sum of their input's gradient instead of one each."""
    return PlaceHidden(Replicate(), Replicate(), as_dtensor=True)


def whole_to_part() -> ParallelStyle:
    """Where sequences are cut."""
    return PlaceHidden(Replicate(), Shard(SEQUENCE_DIM), as_dtensor=False)


def part_to_whole() -> ParallelStyle:
    """Around several column-wise modules: one gather of the sequence for all of them."""
    return PlaceHidden(Shard(SEQUENCE_DIM), Replicate(), as_dtensor=True)


def norm_of_parts() -> ParallelStyle:
    """A module that computes on parts of the sequence, row by row."""
    return SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=True)


def norm_of_parts_to_whole() -> ParallelStyle:
    """The same, where sequences are put together again."""
    output = PrepareModuleOutput(
        output_layouts=Shard(SEQUENCE_DIM), desired_output_layouts=Replicate()
    )
    return InOrder(SequenceParallel(sequence_dim=SEQUENCE_DIM), output)


def norm_of_own_heads() -> ParallelStyle:
    """A module whose parameters all ranks have, computing row by row on what each rank has alone.

    As parts of a batch: then autograd knows that each rank's gradient is a term of a sum.
    """
    return SequenceParallel(sequence_dim=0, use_local_output=True)


def rows_of_whole() -> ParallelStyle:
    """Of an embedding: each rank has some of the symbols. Of a linear module: of the inputs."""
    return InOrder(RowwiseParallel(input_layouts=Replicate()), Arrived())


def embedding_to_parts() -> ParallelStyle:
    """Each rank has some of the symbols; it gets the sums for its part of the sequence.

    As a DTensor of the whole sequence's shape, from which models make positions and masks.
    """
    return RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(SEQUENCE_DIM), use_local_output=False
    )


def rows_to_parts() -> ParallelStyle:
    """Each rank has some of the inputs; it gets the sum for its part of the sequence."""
    return RowwiseParallel(output_layouts=Shard(SEQUENCE_DIM))


def columns_to_whole() -> ParallelStyle:
    """Each rank computes some of the outputs, and gathers all."""
    return InOrder(ColwiseParallel(output_layouts=Replicate()), Arrived())


_STYLES: dict[str, Callable[[], ParallelStyle | None]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": columns_to_whole,
    "colwise_rep": columns_to_whole,
    "rowwise": RowwiseParallel,
    "rowwise_split_input": rows_of_whole,
    "rowwise_rep": rows_of_whole,
    "embedding_rowwise": rows_of_whole,
    "embedding_colwise": columns_to_whole,
    "sequence_parallel": norm_of_parts,
    "replicated_with_grad_allreduce": norm_of_own_heads,
    "replicate": lambda: None,
}
"""Those of transformers, present and past, that torch has or that are made of torch's."""


def style_named(name: str, where: str) -> ParallelStyle | None:
    """The style of that name; None for one that does nothing.

    Args:
        where: for the error.

    Raises:
        ValueError: a name that is not known.
    """
    make = _STYLES.get(name)
    if make is None:
        raise ValueError(
            f"{where}: layerzero has no tensor-parallel style {name!r}; expected one of "
            f"{sorted(_STYLES)}, or a torch ParallelStyle: give tp_plan a mapping that says it"
        )
    return make()
