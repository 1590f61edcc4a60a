"""An optimizer that needs whole tensors, as users write them."""

from typing import Any

import torch
from torch import Tensor


class Shampoo(torch.optim.Optimizer):
    """A preconditioner of n x n for each dimension, in a list; beside them a float, a count, and a
    key that depends on the size. Counts its steps in each group, in place."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """With a learning rate that is a tensor, on which torchao's classes insist in a step."""
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = torch.as_tensor(self.param_groups[-1]["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert isinstance(group["lr"], Tensor)
            rate = (group["lr"] / group.setdefault("steps", torch.zeros(())).add_(1)).item()
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, rate)

    def _step_one(self, parameter: Tensor, rate: float) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        if not state:
            state["factors"] = [torch.eye(n, dtype=gradient.dtype) for n in gradient.shape]
            state["seen"], state["count"] = {"norm": torch.zeros(())}, 0
            state["small" if gradient.numel() <= 4 else "large"] = True
        state["count"] += 1
        update = gradient
        for dim, factor in enumerate(state["factors"]):
            flat = gradient.unsqueeze(-1).movedim(dim, 0).flatten(1)
            factor.add_(flat @ flat.T)
            update = torch.tensordot(torch.linalg.inv(factor), update, ([1], [dim]))
            update = update.movedim(0, dim)
        state["seen"]["norm"] = update.norm().float()
        parameter.sub_(update, alpha=rate)
