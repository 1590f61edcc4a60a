"""Parameters of classes of their own keep these, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import ZeRO3
from tests.harness.compare import assert_trains_alike
from tests.harness.models import CASES, WIDTH, Block
from tests.harness.ranks import run_ranks
from tests.harness.reference import batches_of, seeded


class Scaled(nn.Parameter):
    """A parameter that knows how it is used."""

    scale: float

    @property
    def is_scaled(self) -> bool:
        return self.scale != 1


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.weight = Scaled(torch.randn(WIDTH, WIDTH))
        self.weight.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Scaled and self.weight.is_scaled
        return self.block(x) @ (self.weight * self.weight.scale)


class Packed(Tensor):
    """Values with operations of their own, as quantized ones are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Watched(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _classes() -> None:
    for options in ({}, {"zero3_size": 1}):
        model = ZeRO3(seeded(Uses), auto_wrap_policy={Block}, **options)
        assert type(model.weight) is Scaled and model.weight.scale == 0.5
        assert_trains_alike(model, seeded(Uses), batches_of(CASES["mlp"], 2, steps=2))
        with model.summon_full_params():
            assert type(model.weight) is Scaled and model.weight.shape == (WIDTH, WIDTH)
    with torch.device("meta"):
        module = Uses()
    module.weight = Scaled(torch.empty(WIDTH, WIDTH, device="meta"))
    module.weight.scale = 2.0
    module.reset_parameters = lambda: nn.init.ones_(module.weight)
    model = ZeRO3(module, auto_wrap_policy={Block})
    assert type(model.weight) is Scaled and model.weight.scale == 2.0


def test_a_class_derived_from_parameter_is_kept() -> None:
    run_ranks(2, _classes)


def _refused() -> None:
    values = torch.ones(WIDTH).as_subclass(Packed)
    for parameter in (nn.Parameter(values), Watched(torch.ones(WIDTH))):
        module = nn.Sequential(Block(), nn.Linear(WIDTH, 2))
        module[0].scale = parameter
        kind = type(parameter).__name__
        with pytest.raises(
            ValueError,
            match=rf"0 \(rank {dist.get_rank()}\): parameter '0\.scale' is a \S+\.{kind}, a tensor "
            "subclass with its own operations.*ignored_parameters",
        ):
            ZeRO3(module, auto_wrap_policy={Block})
        assert module[0].scale is parameter
        ZeRO3(module, auto_wrap_policy={Block}, ignored_parameters=[parameter])
        assert module[0].scale is parameter
    with pytest.raises(ValueError, match=r"parameter '0\.weight' has no shape yet.*lazy.*forward"):
        ZeRO3(nn.Sequential(nn.LazyLinear(3)))
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].table = nn.Buffer(torch.ones(2), persistent=False)
    model = ZeRO3(module)
    assert isinstance(model[0].table, nn.Buffer)
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2))
        module[0].table = nn.Buffer(torch.ones(2))

    def fill(part: nn.Module) -> None:
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            tensor.detach().fill_(1)

    assert isinstance(ZeRO3(module, param_init_fn=fill)[0].table, nn.Buffer)


def test_a_tensor_with_operations_of_its_own_is_refused_by_name() -> None:
    run_ranks(2, _refused)
