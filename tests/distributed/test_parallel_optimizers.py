"""Native optimizers over a mesh: tensor-parallel parameters, and experts on some ranks only."""

import pytest
import torch
from torch import Tensor, nn

from layerzero import ZeRO3
from layerzero.optim import AdamW
from tests.distributed import test_experts as experts
from tests.distributed import test_tensor_parallel as tensor_parallel
from tests.distributed.test_tensor_parallel import Llama
from tests.harness.checks import assert_bitwise
from tests.harness.ranks import run_ranks
from tests.harness.reference import full_parameters, seeded


def _piece(whole: Tensor, sharded: nn.Parameter) -> Tensor:
    """This rank's part of a gradient."""
    info = sharded.layerzero
    if info.tensor_parallel is not None:
        ends = zip(info.tensor_parallel.offset, info.tensor_parallel.local_shape, strict=True)
        whole = whole[tuple(slice(at, at + size) for at, size in ends)]
    return whole.reshape(-1)[slice(*info.range)].clone()


def _steps(model: ZeRO3, plain: nn.Module) -> dict[str, Tensor]:
    """The whole weights after steps with gradients that are the same at every world size."""
    optimizer = AdamW(model.parameters(), lr=1e-2, state="bfloat16")
    shapes = {name: p.shape for name, p in plain.named_parameters()}
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        drawn = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        for name, parameter in model.named_parameters():
            parameter.grad = _piece(drawn[name], parameter)
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


def _weights(num_data: int) -> list[dict[str, Tensor]]:
    """After steps that round by where an element is in its whole parameter; experts last."""
    found = []
    for arguments in ({}, {"zero3_size": 1})[:num_data]:
        model = tensor_parallel.wrapped(tensor_parallel.grid(num_data), **arguments)
        found.append(_steps(model, seeded(Llama)))
    return [*found, _steps(experts.wrapped(2), seeded(experts.Model))]


@pytest.mark.slow
def test_native_optimizers_have_the_same_bits_at_every_number_of_data_parallel_ranks() -> None:
    expected: dict[tuple[bool, str], Tensor] = {}
    for num_data in (1, 2):
        for *dense, of_experts in run_ranks(2 * num_data, _weights, num_data):
            for values in (*dense, of_experts):
                for name, value in values.items():
                    key = values is of_experts, name
                    assert_bitwise(value, expected.setdefault(key, value), str(key))
    assert len(expected) > 20
