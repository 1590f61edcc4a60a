"""Lion, which torch has not, in one pass over the memory of a flat parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from layerzero.ops import step_reference
from layerzero.optim.flat_optimizer import FlatOptimizer, StateDtype


class Lion(FlatOptimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), in one pass.

    Decays the weight by lr * weight_decay, subtracts lr * sign(beta1 * m + (1 - beta1) * g), and
    then updates the average m with beta2.

    Args:
        params: parameters of one ZeRO3 module, or groups of them.
        lr: usually 3 to 10 times less than for AdamW.
        betas: for the direction, and for the average.
        weight_decay: usually 3 to 10 times more than for AdamW.
        maximize: go along the gradient instead of against it.
        state, seed: as for `AdamW`.

    Raises:
        ValueError: as for `AdamW`.
    """

    _kind = step_reference.LION
    _all_keys = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state: StateDtype = "float32",
        seed: int = 0,
    ) -> None:
        for name, value in (("lr", float(lr)), ("weight_decay", weight_decay)):
            if not value >= 0.0:
                raise ValueError(f"Lion: expected {name} >= 0, got {value}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"Lion: expected betas in [0, 1), got {betas}")
        self._set_up(state, seed)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        torch.optim.Optimizer.__init__(self, params, defaults)

    def _keys(self) -> Sequence[str]:
        return self._all_keys

    def _coefficients(self, group: Mapping[str, Any], step: int) -> list[float]:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        return [
            1 - lr * float(group["weight_decay"]),
            *(beta1, 1 - beta1, beta2, 1 - beta2, -lr, 0.0, 0.0),
            -1.0 if group["maximize"] else 1.0,
            0.0,
        ]
