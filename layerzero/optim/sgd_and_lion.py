"""SGD and Lion that step a whole flat parameter in one pass over its memory, as AdamW here does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from layerzero.ops import step_reference
from layerzero.optim.flat_optimizer import FlatOptimizer, StateDtype


class SGD(FlatOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` for the parameters of one ZeRO3 module, in one pass over memory.

    As `AdamW` here: torch's arguments, groups and state dict, and in float32 on the CPU the bits of
    `torch.optim.SGD(fused=True)`.

    Args:
        params: parameters of one ZeRO3 module, or groups of them.
        positional, options: lr, momentum, dampening, weight_decay, nesterov and maximize, as for
            `torch.optim.SGD`.
        foreach, fused, differentiable, state, seed: as for `AdamW`; states are the momentum.

    Raises:
        ValueError, NotImplementedError: as for `AdamW`.
    """

    _kind = step_reference.SGD
    _all_keys = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        *positional: Any,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        state: StateDtype = "float32",
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._set_up(state, seed, differentiable=differentiable)
        torch.optim.SGD.__init__(self, params, *positional, fused=True, **options)

    @property
    def _shows_step(self) -> bool:
        # torch's has none; random bits need one.
        return self._state_dtype != "float32"

    def _keys(self) -> Sequence[str]:
        return self._all_keys if any(group["momentum"] for group in self.param_groups) else ()

    def _coefficients(self, group: Mapping[str, Any], step: int) -> list[float]:
        decay, momentum, lr = map(float, (group["weight_decay"], group["momentum"], group["lr"]))
        nesterov, sign = float(group["nesterov"]), -1.0 if group["maximize"] else 1.0
        damped = 1 - float(group["dampening"])
        return [decay, momentum, damped, -lr, nesterov, float(step == 1), 0.0, 0.0, sign, 0.0]


class Lion(FlatOptimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), in one pass.

    Decays the weight by lr * weight_decay, subtracts lr * sign(beta1 * m + (1 - beta1) * g), and
    then updates the average m with beta2. lr is usually 3 to 10 times less than for AdamW, and
    weight_decay as many times more. Arguments and errors as for `AdamW`.
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
        if not (float(lr) >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(
                "Lion: expected lr and weight_decay >= 0 and betas in [0, 1), got "
                f"{lr}, {weight_decay} and {betas}"
            )
        self._set_up(state, seed)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        torch.optim.Optimizer.__init__(self, params, defaults)

    def _keys(self) -> Sequence[str]:
        return self._all_keys

    def _coefficients(self, group: Mapping[str, Any], step: int) -> list[float]:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        decay, sign = 1 - lr * float(group["weight_decay"]), -1.0 if group["maximize"] else 1.0
        return [decay, beta1, 1 - beta1, beta2, 1 - beta2, -lr, 0.0, 0.0, sign, 0.0]
