"""SGD that steps a whole flat parameter in one pass over its memory."""

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
        lr, momentum, dampening, weight_decay, nesterov, maximize: as for `torch.optim.SGD`.
        foreach, differentiable, fused, state, seed: as for `AdamW`; states are the momentum.

    Raises:
        ValueError, NotImplementedError: as for `AdamW`.
    """

    _kind = step_reference.SGD
    _all_keys = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        state: StateDtype = "float32",
        seed: int = 0,
    ) -> None:
        self._set_up(state, seed, differentiable=differentiable)
        torch.optim.SGD.__init__(
            self,
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            fused=True,
        )

    @property
    def _shows_step(self) -> bool:
        # torch's has none; random bits need one.
        return self._state_dtype != "float32"

    def _keys(self) -> Sequence[str]:
        return self._all_keys if any(group["momentum"] for group in self.param_groups) else ()

    def _coefficients(self, group: Mapping[str, Any], step: int) -> list[float]:
        return [
            float(group["weight_decay"]),
            float(group["momentum"]),
            1 - float(group["dampening"]),
            -float(group["lr"]),
            float(group["nesterov"]),
            float(step == 1),
            0.0,
            0.0,
            -1.0 if group["maximize"] else 1.0,
            0.0,
        ]
