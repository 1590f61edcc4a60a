"""Optimizers that need whole tensors, as users write them."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Shampoo(Optimizer):
    """A preconditioner for each dimension, from its gradients' second moments.

    Counts its steps in each group, as many optimizers do, and in an attribute.
    """

    def __init__(self, params: Any, lr: float = 0.01, every: int = 2) -> None:
        super().__init__(params, {"lr": lr, "every": every})
        self.num_steps = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """With a learning rate that is a tensor, on which torchao's classes insist in a step."""
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = torch.as_tensor(self.param_groups[-1]["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            assert isinstance(group["lr"], Tensor)
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        if parameter.ndim == 0 or not parameter.numel():
            parameter.sub_(group["lr"] * gradient / group["step"])
            return
        if not state:
            state["moments"] = [torch.eye(n, dtype=parameter.dtype) * 1e-3 for n in parameter.shape]
            state["roots"] = [torch.eye(n, dtype=parameter.dtype) for n in parameter.shape]
        update = gradient
        for dim in range(parameter.ndim):
            rows = gradient.movedim(dim, 0).reshape(parameter.shape[dim], -1)
            state["moments"][dim].addmm_(rows, rows.T)
            if (group["step"] + self.num_steps) % (2 * group["every"]) == 0:
                values, vectors = torch.linalg.eigh(state["moments"][dim].double())
                root = vectors @ torch.diag(values.clamp(min=1e-6) ** (-0.5 / parameter.ndim))
                state["roots"][dim] = (root @ vectors.T).to(parameter.dtype)
            update = torch.tensordot(update, state["roots"][dim], dims=([0], [0]))
        parameter.sub_(group["lr"] * update)
