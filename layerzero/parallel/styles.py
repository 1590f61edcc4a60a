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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
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
        # Modules inside get local tensors, and would treat parts of unequal length as equal.
        if self.wanted.is_shard() and (
            hidden.ndim <= SEQUENCE_DIM or hidden.shape[SEQUENCE_DIM] % mesh.size()
        ):
            raise ValueError(
                f"{type(module).__name__}: sequence_parallel needs hidden states [batch, sequence, "
                f"width] whose sequence tp_size={mesh.size()} divides, got {tuple(hidden.shape)}; "
                "pad the sequence"
            )
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, [self.given], run_check=False)
        placed = hidden.redistribute(placements=[self.wanted])
        return placed if self.as_dtensor else arrived(placed.to_local())


class Whole(ParallelStyle):
    """Every rank computes the whole module; its parameters become DTensors that are not split.

    Args:
        given: placement of a local tensor that the module's caller passes.
    """

    def __init__(self, given: Placement) -> None:
        self.given = given

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh)
        place = PlaceHidden(self.given, Replicate(), as_dtensor=True)
        place._apply(module, device_mesh)
        module.register_forward_hook(lambda module, args, output: output.to_local())
        return module


class Arrived(ParallelStyle):
    """Waits for the collective that produces a module's output.

    torch returns such an output as an `AsyncCollectiveTensor`. Passed to a compiled module, with
    torch 2.13, it loses its gradient or fails in backward.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda module, args, output: arrived(output))
        return module


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


_WHOLE, _PART = Replicate(), Shard(SEQUENCE_DIM)
_STYLES: dict[str, Callable[[], ParallelStyle | None]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: InOrder(ColwiseParallel(output_layouts=_WHOLE), Arrived()),
    "rowwise": RowwiseParallel,
    # Of a whole input: each rank has some symbols of an embedding, or some of a linear's inputs.
    "rowwise_split_input": lambda: InOrder(RowwiseParallel(input_layouts=_WHOLE), Arrived()),
    # Row by row on this rank's part of the sequence, such as a norm. Its parameters are whole.
    "sequence_parallel": lambda: SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=True),
    # Row by row on each rank's own heads. The input is declared as sharded along the batch, so
    # that DTensor sums the gradients of the whole parameters over ranks.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(
        sequence_dim=0, use_local_output=True
    ),
    "replicate": lambda: None,
}
"""Style names of transformers that torch's styles can express."""
_STYLES |= {
    "colwise_rep": _STYLES["colwise_gather_output"],
    "embedding_colwise": _STYLES["colwise_gather_output"],
    "rowwise_rep": _STYLES["rowwise_split_input"],
    "embedding_rowwise": _STYLES["rowwise_split_input"],
}
OF_LLAMA: dict[str, Callable[[], ParallelStyle]] = {
    # Around several column-wise modules: sums the gradient of their shared input once.
    "shared_input": lambda: PlaceHidden(_WHOLE, _WHOLE, as_dtensor=True),
    # The same, and all-gathers the sequence once for all of them.
    "shared_input_of_parts": lambda: PlaceHidden(_PART, _WHOLE, as_dtensor=True),
    # For the module where sequences are split.
    "split_sequence": lambda: PlaceHidden(_WHOLE, _PART, as_dtensor=False),
    "rowwise_to_parts": lambda: RowwiseParallel(output_layouts=_PART),
    "norm_that_gathers": lambda: InOrder(
        SequenceParallel(sequence_dim=SEQUENCE_DIM),
        PrepareModuleOutput(output_layouts=_PART, desired_output_layouts=_WHOLE),
    ),
}
"""Names that Llama's plan uses as well."""


def style_named(name: str, where: str) -> ParallelStyle | None:
    """The style of that name of transformers; None for one that does nothing. `where`: prefix of
    the error message."""
    make = _STYLES.get(name)
    if make is None:
        raise ValueError(
            f"{where}: layerzero has no tensor-parallel style {name!r}; expected one of "
            f"{sorted(_STYLES)}, or a torch ParallelStyle: pass a mapping with it as tp_plan"
        )
    return make()
