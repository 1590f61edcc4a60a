"""Forward without backward: between training steps, on parts of the model, by other methods."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import layerzero
from tests.harness.checks import assert_bitwise
from tests.harness.compare import assert_same_gradients, assert_trains_alike, sharded, zero3
from tests.harness.models import CASES, WIDTH, Block, Mlp, Transformer, TransformerBlock, tensors_of
from tests.harness.ranks import on_ranks
from tests.harness.reference import batches_of, plain, seeded

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
def test_a_layer_of_a_unit_may_be_called_directly() -> None:
    """Whole units are by random models, which also unshard them by hand."""
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    for each in (
        model,
        plain,
    ):  # Every rank has the same batch, so the mean gradient is this one's.
        each.blocks[1].down(x).square().sum().backward()
    assert_same_gradients(model, plain)
    optimizers = []
    model.unshard()
    assert model.head.weight.shape == (3, WIDTH)
    assert model.blocks[0].up.weight.dim() == 1, "not of units inside"
    for given in (model.parameters(), model.named_parameters()):
        optimizers.append(torch.optim.SGD(given, lr=0.1))
    model.reshard()
    for optimizer in optimizers:
        assert optimizer.param_groups[0]["params"] == [*model.parameters()], "they get the shards"
    assert model.head.weight.dim() == 1


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


@on_ranks(3)
def test_ranks_evaluate_unequally_where_all_parameters_are_full() -> None:
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
