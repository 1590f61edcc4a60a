"""Optimizers that need whole tensors, as users write them."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BLOCK = 16


class Shampoo(Optimizer):
    """A preconditioner for each dimension, from its gradients' second moments.

    Counts its steps in each group, as many optimizers do, and in an attribute.
    """

    def __init__(self, params: Any, lr: float = 0.01, every: int = 2) -> None:
        super().__init__(params, {"lr": lr, "every": every})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
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


class BlockwiseAdam(Optimizer):
    """Adam with moments of 8 bits, one scale for each block of neighbouring elements."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["first"] = _quantized(torch.zeros_like(parameter, dtype=torch.float32))
                    state["second"] = _quantized(torch.zeros_like(parameter, dtype=torch.float32))
                state["step"] += 1
                gradient = parameter.grad.float()
                first = _dequantized(*state["first"], parameter).lerp_(gradient, 0.1)
                second = _dequantized(*state["second"], parameter)
                second.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
                state["first"], state["second"] = _quantized(first), _quantized(second)
                corrected = first / (1 - 0.9 ** state["step"])
                scale = (second / (1 - 0.99 ** state["step"])).sqrt_().add_(1e-6)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_((group["lr"] * corrected / scale).to(parameter.dtype))

    def load_state_dict(self, state_dict: Any) -> None:
        """Without torch's cast of all state to the dtype of the parameter."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            self.state[parameters[number]] = dict(state)


def _quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    flat = values.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12)
    return (padded / scales * 127).round_().to(torch.int8), scales


def _dequantized(codes: Tensor, scales: Tensor, like: Tensor) -> Tensor:
    return (codes.float() / 127 * scales).view(-1)[: like.numel()].view(like.shape)


class CountsInATensor(Optimizer):
    """Its steps, in a tensor of its own: several calls of `step` would count several."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.num_steps = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * (group["lr"] / self.num_steps))
