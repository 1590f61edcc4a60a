"""transformers models that compute in one dtype, for comparisons in float64."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def in_default_dtype(model: Any) -> Any:
    """The model in torch's default dtype, with its norms and its loss.

    transformers computes these in float32, whatever the model has.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_normed, module)
    model.loss_function = _loss
    return model.to(torch.get_default_dtype())


def _normed(module: nn.Module, x: Tensor) -> Tensor:
    eps = getattr(module, "variance_epsilon", None) or module.eps  # Gemma's is called eps
    return module.weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _loss(
    logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None, **_: Any
) -> Tensor:
    """Of each symbol but the first; a mean, or a part of the mean over so many items."""
    wanted = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    total = F.cross_entropy(logits.flatten(0, -2), wanted, reduction="sum")
    return total / ((wanted != -100).sum() if num_items_in_batch is None else num_items_in_batch)
