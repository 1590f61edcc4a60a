"""Rules of other projects that go by a parameter's dimensions, over sharded parameters of rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from layerzero import ZeRO3, fully_shard
from tests.harness.checks import assert_same_parameters
from tests.harness.ranks import on_ranks
from tests.harness.reference import full_parameters, seeded

WIDTH, STEPS = 32, 5
Groups = list[dict[str, Any]]


class Vision(nn.Module):
    """Parameters of 1, 2, 3 and 4 dimensions. Each rank's part is a multiple of 16 elements: fused
    kernels round what is left after those otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, WIDTH, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, 4, WIDTH) * 0.02)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU())
        self.head = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.mlp(self.norm(x)).mean(1)).square().mean()


def as_timm(model: nn.Module, weight_decay: float) -> Groups:
    """By timm's rule: matrices are decayed, vectors and biases are not."""
    decay, rest = [], []
    for name, parameter in model.named_parameters():
        is_excluded = parameter.ndim <= 1 or name.endswith(".bias")
        (rest if is_excluded else decay).append(parameter)
    return [{"params": rest, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}]


def as_nanogpt(model: nn.Module, weight_decay: float) -> Groups:
    """By nanoGPT's rule, which goes by `dim()` alone."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]


RULES: dict[str, tuple[Callable[[nn.Module, float], Groups], dict[str, Any]]] = {
    "timm": (as_timm, {}),
    "nanoGPT": (as_nanogpt, {"betas": (0.9, 0.95), "fused": True}),
}


def by_hand(model: nn.Module) -> nn.Module:
    fully_shard(model.mlp)
    return fully_shard(model)


WAYS: tuple[Callable[[nn.Module], nn.Module], ...] = (
    lambda model: ZeRO3(model, auto_wrap_policy={nn.Sequential}, layout="rows"),
    by_hand,
)


def _names(model: nn.Module, groups: Groups) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


def _trained(model: nn.Module, optimizer: AdamW, ranks: range) -> None:
    """Five steps; the batches of several ranks are micro-batches of one process."""
    for step in range(STEPS):
        for rank in ranks:
            images = torch.randn(
                3, 2, 8, 8, generator=torch.Generator().manual_seed(9 * step + rank)
            )
            (model(images) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_groups_and_training_are_those_of_one_process() -> None:
    rank = dist.get_rank()
    for rule, options in RULES.values():
        plain = seeded(Vision)
        groups = rule(plain, 0.3)
        expected = _names(plain, groups)
        _trained(plain, AdamW(groups, lr=1e-2, **options), range(2))
        for shard in WAYS:
            model = shard(seeded(Vision))
            groups = rule(model, 0.3)
            assert _names(model, groups) == expected
            for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
                assert (parameter.ndim, parameter.shape[1:]) == (whole.ndim, whole.shape[1:])
            _trained(model, AdamW(groups, lr=1e-2, **options), range(rank, rank + 1))
            assert_same_parameters(full_parameters(model), full_parameters(plain))


@on_ranks(2)
def test_shards_of_two_matrices_do_not_multiply() -> None:
    """Where each rank has half of the rows, what would be a product of whole matrices raises."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    for layer in model:
        fully_shard(layer)
    first, second = fully_shard(model).parameters()
    assert first.shape == second.shape == (WIDTH // 2, WIDTH)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        first @ second
