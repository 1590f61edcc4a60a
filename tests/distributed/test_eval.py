"""Forward without backward: between training steps, on parts of the model, by other methods."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero import ZeRO3
from tests.harness.checks import assert_bitwise
from tests.harness.compare import (
    assert_same_gradients,
    assert_trains_alike,
    sharded,
    zero3,
)
from tests.harness.models import CASES, WIDTH, Block, Mlp, Transformer, TransformerBlock, tensors_of
from tests.harness.ranks import on_ranks
from tests.harness.reference import batches_of, forward_backward, plain, seeded

CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@on_ranks(2)
def test_outputs_without_gradients_are_those_of_the_plain_model() -> None:
    for name, case in CASES.items():
        model, reference = sharded(case), plain(case)
        for context, batch in zip(CONTEXTS.values(), batches_of(case, 2, steps=1)[0], strict=True):
            with context():
                own, expected = tensors_of(model(batch)), tensors_of(reference(batch))
                assert own and len(own) == len(expected)
                for left, right in zip(own, expected, strict=True):
                    assert not left.requires_grad
                    assert left.is_inference() == right.is_inference()
                    assert_bitwise(left.clone(), right.clone(), f"{name}: output")


@on_ranks(2)
def test_a_part_of_the_model_may_be_called_directly() -> None:
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    parts = {
        "a unit": lambda model: model.blocks[1],
        "a layer inside a unit": lambda model: model.blocks[1].down,
        "a layer of the root": lambda model: model.stem,
    }
    for name, part in parts.items():
        x = torch.randn(3, 7) if name == "a layer inside a unit" else batch
        with torch.no_grad():
            assert_bitwise(part(model)(x), part(plain)(x), name)
        # Every rank has the same batch, so the mean gradient is this one's.
        for each in (model, plain):
            each.zero_grad()
            part(each)(x).square().sum().backward()
        assert_same_gradients(model, plain, what=f"{name}: gradient of")
    model.zero_grad()
    plain.zero_grad()
    assert_trains_alike(model, plain)


class _Generator(Transformer):
    """Has methods that use parameters beside forward."""

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            following = self.logits(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens

    def encode(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) @ self.embed.weight.t()


@on_ranks(2)
def test_registered_methods_gather_parameters_and_have_gradients() -> None:
    model = zero3(_Generator, TransformerBlock)
    plain = seeded(_Generator)
    tokens = torch.arange(6).view(2, 3)
    for name in ("generate", "encode", "logits"):
        layerzero.register_forward_method(model, name)
    assert torch.equal(model.generate(tokens, 4), plain.generate(tokens, 4))
    assert torch.equal(model.generate(tokens, count=2), plain.generate(tokens, count=2))
    with torch.inference_mode():
        assert_bitwise(model.logits(tokens).clone(), plain.logits(tokens).clone(), "logits")
    for each in (model, plain):
        each.encode(tokens).square().sum().backward()
    assert_same_gradients(model, plain)
    for each in (model, plain):
        each.zero_grad()
        each.logits(tokens).square().sum().backward()
    assert_same_gradients(model, plain)
    for each in (model, plain):
        each.zero_grad()
    batches = batches_of(CASES["transformer"], dist.get_world_size(), steps=2)
    assert_trains_alike(model, plain, batches)


@on_ranks(2)
def test_a_wrapped_model_may_be_a_submodule() -> None:
    """The wrapped model is part of a plain one, which is called."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.inner(x))

    model, plain = Outer(zero3(Mlp, Block)), Outer(seeded(Mlp))
    step = batches_of(CASES["mlp"], 1, steps=1)[0]
    own, expected = forward_backward(model, step[0]), forward_backward(plain, step[0])
    assert_bitwise(own, expected, "loss")
    assert isinstance(model.inner, ZeRO3)
    assert_same_gradients(model.inner, plain.inner)
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]


@on_ranks(2)
def test_parameters_may_be_unsharded_and_resharded_by_hand() -> None:
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=4)
    model.unshard()
    assert model.head.weight.shape == (3, WIDTH)
    assert_bitwise(model.head.weight.detach(), plain.head.weight.detach(), "head.weight")
    assert model.blocks[0].up.weight.dim() == 1, "not of units inside"
    model.reshard()
    assert model.head.weight.dim() == 1
    assert_trains_alike(model, plain, batches[:1])

    def run_unsharded(model: nn.Module, batch: Tensor) -> Tensor:
        """With the root's parameters there already."""
        if isinstance(model, ZeRO3):
            handle = model.unshard(async_op=True)
            assert handle is not None
            handle.wait()
            assert model.head.weight.shape == (3, WIDTH)
        return forward_backward(model, batch)

    assert_trains_alike(model, plain, batches[1:], run=run_unsharded)
    model.unshard()
    with torch.no_grad():
        assert_bitwise(model(batches[0][0]), plain(batches[0][0]), "output")
    model.reshard()
    assert_trains_alike(model, plain, batches[:2])


@on_ranks(3)
def test_ranks_evaluate_unequally_where_all_parameters_are_full() -> None:
    """Any number of forwards on each rank while all parameters are there."""
    plain, model = seeded(Mlp).eval(), zero3(Mlp, Block).eval()
    own = [torch.full((2, WIDTH), float(index)) for index in range(3 * dist.get_rank())]
    with model.summon_full_params(writeback=False), torch.no_grad():
        outputs = [model(batch) for batch in own]
        outputs += [block(batch) for batch in own for block in model.blocks]
    with torch.no_grad():
        expected = [plain(batch) for batch in own]
        expected += [block(batch) for batch in own for block in plain.blocks]
    for index, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        assert_bitwise(output, other, f"output {index}")
    assert_trains_alike(model, plain, batches_of(CASES["mlp"], dist.get_world_size(), steps=1))
