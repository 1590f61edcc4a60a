"""AdamW that steps a whole flat parameter in one pass over its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from layerzero.ops import step_reference
from layerzero.optim.flat_optimizer import FlatOptimizer, StateDtype


class AdamW(FlatOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` for the parameters of one ZeRO3 module, in one pass over memory.

    It has torch's arguments, groups and state dict; in float32 on the CPU its bits are those of
    `torch.optim.AdamW(fused=True)` on the same sharded parameters. It also
    unscales (`GradScaler`) and clips (`clip_grad_norm_`).

    Args:
        params: parameters of one ZeRO3 module, or groups of them.
        lr, betas, eps, weight_decay, amsgrad, maximize: as for `torch.optim.AdamW`.
        foreach, fused: have no effect: there is one implementation, with the bits of torch's fused.
        capturable, differentiable: False.
        state: dtype of the two averages. "float32": 8 bytes an element (float64 for float64
            parameters). "bfloat16": 4 bytes. "8bit": 2 bytes, and a scale for each 256 elements.
            Both round at random, so that small changes add up.
        seed: of the random bits. They depend on it, the parameter's name, the index in the whole
            parameter and the step: for the same gradients, weights and states have the same bits at
            every world size, but for 8-bit states of blocks that a border between shards cuts.

    Raises:
        ValueError: a parameter belongs to no ZeRO3 module, to another one than the others, or to
            another optimizer; or an argument is out of range.
        NotImplementedError: `capturable` or `differentiable` is set.
    """

    _kind = step_reference.ADAMW
    _fixed: ClassVar = {"differentiable": False, "decoupled_weight_decay": True}
    _all_keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state: StateDtype = "float32",
        seed: int = 0,
    ) -> None:
        self._set_up(state, seed, capturable=capturable, differentiable=differentiable)
        torch.optim.AdamW.__init__(
            self, params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True
        )

    def _keys(self) -> Sequence[str]:
        has_most = any(group["amsgrad"] for group in self.param_groups)
        return self._all_keys if has_most else self._all_keys[:2]

    def _coefficients(self, group: Mapping[str, Any], step: int) -> list[float]:
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        return [
            1 - lr * float(group["weight_decay"]),
            1 - beta1,
            beta2,
            1 - beta2,
            -lr / correction1,
            math.sqrt(correction2),
            float(group["eps"]),
            1 / math.sqrt(correction2),
            -1.0 if group["maximize"] else 1.0,
            float(group["amsgrad"]),
        ]
