"""GradScaler: loss scaling for float16 whose ranks agree on every overflow."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for sharded gradients.

    Each rank sees only its pieces, so an overflow on one rank must make all of them skip the step
    and lower the scale. `unscale_` (called by `step` when you did not) is therefore collective
    over `process_group`: one scalar per device.

    Args:
        device: device type of the gradients.
        process_group: ranks that must agree; None: the default group.
        **options: of `torch.amp.GradScaler`.
    """

    def __init__(
        self,
        device: str = "cuda",
        *,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(device, **options)
        self._process_group = process_group

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale and agree on infinities. Collective."""
        super().unscale_(optimizer)
        if not self.is_enabled():
            return
        state = self._per_optimizer_states[id(optimizer)]
        found = state["found_inf_per_device"]
        if not found:
            # No gradient here; others may have some, and the reduction needs every rank.
            assert self._scale is not None, "unscale_ has set the scale up"
            found[self._scale.device] = torch.zeros((), device=self._scale.device)
        for found_inf in found.values():
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self._process_group)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step unless any rank found an infinity or NaN. Collective when it has to unscale."""
        if self.is_enabled():
            stage = self._per_optimizer_states[id(optimizer)]["stage"]
            if stage is torch.amp.grad_scaler.OptState.READY:
                # Optimizers that unscale by themselves would look at their own pieces alone.
                self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)
