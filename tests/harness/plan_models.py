"""A model with units in lists, in a bank of parameters and around each other, for plans."""

import torch
from torch import Tensor, nn

from tests.harness.models import WIDTH, Block


class Layer(nn.Module):
    """An attention, experts in a list, and shifts in another that only this forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Block()
        self.experts = nn.ModuleList(Block() for _ in range(2))
        self.bank = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(x)
        for expert, shift in zip(self.experts, self.bank, strict=True):
            x = x + self.act(expert(x + shift))
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
