"""Tensor-parallel styles of modules that peft has wrapped: LoRA, and modules trained in full.

Note [LoRA over tensor-parallel ranks]
--------------------------------------
A layer with LoRA computes `base_layer(x) + lora_B(lora_A(x))`; rank r is small, and so are tensors
between A and B. B's output is placed as the base layer's, and A's input is:

- column-wise: every rank has all of x, computes all of A, and its rows of B. B sums the gradient of
  its input over ranks, so the gradient of A is whole on each.
- row-wise: every rank has columns of x, and those of A; their sum is reduced, and B is whole. If
  the sum is scattered over sequences, B computes on parts, and its gradient is summed over ranks.

What is not split is a replicated DTensor, so that adapters merge: B times A is placed as the base.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from layerzero.parallel.styles import Arrived, InOrder, Whole


def inside_adapters(model: nn.Module, styles: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """The styles, with those of modules that peft has wrapped on the modules inside.

    Raises:
        ValueError: an adapter other than LoRA of a linear layer, or a style that does not fit it.
    """
    found: dict[str, ParallelStyle] = {}
    for name, style in styles.items():
        children = dict(model.get_submodule(name).named_children())
        if "base_layer" in children:
            found |= dict(_of_lora(name, model.get_submodule(name), style))
        elif "original_module" in children:  # peft's modules_to_save
            copies = children["modules_to_save"].named_children()
            names = ["original_module", *(f"modules_to_save.{copy}" for copy, _ in copies)]
            found |= {f"{name}.{inner}": style for inner in names}
        else:
            found[name] = style
    return found


def holder_of(module: nn.Module, parameter: str) -> str:
    """The name of the module that has a parameter, or that peft has wrapped and has it inside."""
    name = ""
    for part in parameter.split(".")[:-1]:
        module = module.get_submodule(part)
        name = f"{name}.{part}" if name else part
        if hasattr(module, "base_layer") or hasattr(module, "modules_to_save"):
            break
    return name


def _of_lora(
    name: str, layer: nn.Module, style: ParallelStyle
) -> Iterator[tuple[str, ParallelStyle]]:
    others = [
        inner
        for inner, _ in layer.named_parameters()
        if inner.split(".")[0] not in ("base_layer", "lora_A", "lora_B")
    ]
    parts = style.styles if isinstance(style, InOrder) else (style,)
    split = [part for part in parts if isinstance(part, (ColwiseParallel, RowwiseParallel))]
    if others or getattr(layer, "lora_variant", None) or not hasattr(layer, "lora_A"):
        raise ValueError(
            f"{name}: tensor parallelism splits LoRA of linear layers, without variants such as "
            f"DoRA; got {type(layer).__module__}.{type(layer).__name__}"
            f"{f' with {others[0]!r}' if others else ''}; leave the module out of target_modules, "
            "pass a tp_plan that leaves it whole, or use tp_size=1"
        )
    if not split or not split[0].use_local_output:
        raise ValueError(
            f"{name}: a layer with LoRA needs the style ColwiseParallel or RowwiseParallel, "
            f"without use_local_output=False; got {type(style).__name__}"
        )
    yield f"{name}.base_layer", style
    (given,), (wanted,) = split[0].input_layouts, split[0].output_layouts
    for adapter, _ in layer.get_submodule("lora_A").named_children():
        first, second = f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}"
        if isinstance(split[0], ColwiseParallel):
            yield first, Whole(given)
            yield second, InOrder(ColwiseParallel(output_layouts=wanted), Arrived())
        else:
            yield first, style
            if isinstance(wanted, Shard):
                yield second, SequenceParallel(sequence_dim=wanted.dim, use_local_output=True)
            else:
                yield second, Whole(wanted)
