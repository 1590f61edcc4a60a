"""Tensor-parallel styles: torch's, and ours where torch has none.

A model's plan names styles by strings; `style_named` converts each to a `ParallelStyle`.
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
"""The sequence dimension of hidden states [batch, sequence, width]."""


class PlaceHidden(ParallelStyle):
    """Redistributes a module's hidden states: its first argument, or `hidden_states=`.

    Args:
        given: placement of a local tensor that the module's caller passes.
        wanted: placement that the module computes on.
        as_dtensor: pass a DTensor to the module, so that its gradient is reduced once for all uses.
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
        # Modules inside get local tensors, and would treat parts of unequal length as equal.
        if hidden.ndim <= SEQUENCE_DIM or hidden.shape[SEQUENCE_DIM] % mesh.size():
            raise ValueError(
                f"{type(module).__name__}: sequence_parallel needs hidden states [batch, sequence, "
                f"width] whose sequence tp_size={mesh.size()} divides, got {tuple(hidden.shape)}; "
                "pad the sequence"
            )


class Arrived(ParallelStyle):
    """Waits for the collective that produces a module's output.

    torch returns such an output as an `AsyncCollectiveTensor`. Passed to a compiled module, with
    torch 2.13, it loses its gradient or fails in backward.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(self._after_forward)
        return module

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return arrived(output)


def arrived(value: Any) -> Any:
    """`value`, after waiting for the collective that produces it, if any."""
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
    """Applies several styles to one module; later hooks get the results of earlier ones."""

    def __init__(self, *styles: ParallelStyle) -> None:
        self.styles = styles

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in self.styles:
            style.src_data_rank = self.src_data_rank
            module = style._apply(module, device_mesh)
        return module


def whole_to_whole() -> ParallelStyle:
    """Around several column-wise modules: sums the gradient of their shared input once."""
    return PlaceHidden(Replicate(), Replicate(), as_dtensor=True)


def whole_to_part() -> ParallelStyle:
    """For the module where sequences are split."""
    return PlaceHidden(Replicate(), Shard(SEQUENCE_DIM), as_dtensor=False)


def part_to_whole() -> ParallelStyle:
    """Around several column-wise modules: all-gathers the sequence once for all of them."""
    return PlaceHidden(Shard(SEQUENCE_DIM), Replicate(), as_dtensor=True)


def norm_of_parts() -> ParallelStyle:
    """For a module that computes on this rank's part of the sequence, row by row, such as a norm.

    Its parameters are replicated.
    """
    return SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=True)


def norm_of_parts_to_whole() -> ParallelStyle:
    """The same, and all-gathers the sequence of its output."""
    output = PrepareModuleOutput(
        output_layouts=Shard(SEQUENCE_DIM), desired_output_layouts=Replicate()
    )
    return InOrder(SequenceParallel(sequence_dim=SEQUENCE_DIM), output)


def norm_of_own_heads() -> ParallelStyle:
    """For a module with replicated parameters that runs row by row on each rank's own heads.

    The input is declared as sharded along the batch dimension, so that DTensor sums the gradients
    of the parameters over ranks.
    """
    return SequenceParallel(sequence_dim=0, use_local_output=True)


def rows_of_whole() -> ParallelStyle:
    """Row-wise, with a replicated input.

    Each rank has some of an embedding's symbols, or of a linear module's inputs.
    """
    return InOrder(RowwiseParallel(input_layouts=Replicate()), Arrived())


def embedding_to_parts() -> ParallelStyle:
    """Each rank has some of the symbols, and gets the summed output for its part of the sequence.

    The output is a DTensor with the shape of the whole sequence, because models derive positions
    and masks from that shape.
    """
    return RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(SEQUENCE_DIM), use_local_output=False
    )


def rows_to_parts() -> ParallelStyle:
    """Each rank has some of the inputs, and gets the summed output for its part of the sequence."""
    return RowwiseParallel(output_layouts=Shard(SEQUENCE_DIM))


def columns_to_whole() -> ParallelStyle:
    """Each rank computes some of the outputs, and all-gathers the others."""
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
"""Style names of transformers, current and old, that torch's styles can express."""


def style_named(name: str, where: str) -> ParallelStyle | None:
    """The style of that name; None for one that does nothing.

    Args:
        where: prefix of the error message.

    Raises:
        ValueError: an unknown name.
    """
    make = _STYLES.get(name)
    if make is None:
        raise ValueError(
            f"{where}: layerzero has no tensor-parallel style {name!r}; expected one of "
            f"{sorted(_STYLES)}, or a torch ParallelStyle: pass a mapping with it as tp_plan"
        )
    return make()
