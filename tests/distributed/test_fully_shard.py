"""fully_shard: what torch's function of that name does, with nothing but the import changed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import layerzero
from layerzero import FSDPModule, MixedPrecisionPolicy, fully_shard, units
from layerzero.checkpoint import get_model_state_dict
from layerzero.flat.names import clean_name
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.models import CASES, Block, Transformer, TransformerBlock
from tests.harness.ranks import run_ranks
from tests.harness.reference import OPTIMIZERS, batches_of, seeded, train_rank

Engine = Any
"""`torch.distributed.fsdp`, or `layerzero`."""
CASE = CASES["transformer"]
BF16 = torch.bfloat16


def by_blocks(engine: Engine, model: nn.Module, root: bool = True, **options: Any) -> nn.Module:
    for module in model.modules():
        if isinstance(module, (Block, TransformerBlock)):
            engine.fully_shard(module, **options)
    if root:
        if "mp_policy" in options:  # A loss in float32.
            policy = dataclasses.replace(options["mp_policy"], output_dtype=torch.float32)
            options["mp_policy"] = policy
        engine.fully_shard(model, **options)
    return model


def in_one_list(engine: Engine, model: nn.Module, root: bool = True, **options: Any) -> nn.Module:
    engine.fully_shard([model.norm, model.head], **options)
    return by_blocks(engine, model, root, **options)


def untied() -> Transformer:
    return Transformer(tied=False)


def batches(steps: int) -> list[list[Any]]:
    return (batches_of(CASE, dist.get_world_size(), steps=3) * steps)[:steps]


def train(model: nn.Module, steps: int = 4, optimizer: str = "adamw") -> list[Tensor]:
    made = OPTIMIZERS[optimizer](model.parameters())
    return train_rank(model, made, batches(steps), dist.get_rank())


def weights(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.detach() for name, p in model.named_parameters()}
    if any(isinstance(p, DTensor) for p in found.values()):
        return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in found.items()}
    full: dict[str, Tensor] = get_model_state_dict(model, full=True)
    return {name: full[clean_name(name)] for name in found}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Full gradients by name, from those of either engine's shards. Collective."""
    found: dict[str, Tensor | None] = {}
    for name, p in model.named_parameters():
        grad = p.grad
        if isinstance(grad, DTensor):
            found[name] = grad.full_tensor()
        elif grad is None or (info := getattr(p, "layerzero", None)) is None:
            found[name] = grad
        else:
            whole = torch.zeros(info.shape.numel(), dtype=grad.dtype)
            whole[slice(*info.range)] = grad.flatten()
            dist.all_reduce(whole)
            found[name] = whole.view(info.shape)
    return found


def assert_losses(own: Sequence[Tensor], theirs: Sequence[Tensor], what: str) -> None:
    for step, (loss, other) in enumerate(zip(own, theirs, strict=True)):
        assert_bitwise(loss, other, f"{what}: loss of step {step}")


Step = Callable[[nn.Module], Any]


def assert_alike(
    build: Callable[[], nn.Module], shard: Callable[..., nn.Module], run: Step, what: str
) -> tuple[nn.Module, nn.Module]:
    """Run the same under both engines: equal results, gradients and weights, bitwise."""
    own, theirs = (shard(engine, seeded(build)) for engine in (layerzero, torchs))
    assert_losses(run(own), run(theirs), what)
    assert_same_parameters(gradients(own), gradients(theirs), what=f"{what}: gradient of")
    assert_same_parameters(weights(own), weights(theirs), what=f"{what}: parameter")
    return own, theirs


# Training -----------------------------------------------------------------------------------

POLICIES = {
    "float32": {},
    "bf16": {"param_dtype": BF16, "reduce_dtype": torch.float32},
    "inputs as they are": {"reduce_dtype": torch.float32, "cast_forward_inputs": False},
}


def _like_torch() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, policy in POLICIES.items():
        for reshard in (None, True, False):

            def shard(engine: Engine, model: nn.Module) -> nn.Module:
                mp_policy = engine.MixedPrecisionPolicy(**policy)  # noqa: B023
                options = {"mesh": mesh, "mp_policy": mp_policy}
                return by_blocks(engine, model, reshard_after_forward=reshard, **options)  # noqa: B023

            assert_alike(Transformer, shard, train, f"{name}, reshard_after_forward={reshard}")


def test_training_is_bitwise_torchs() -> None:
    run_ranks(2, _like_torch)


def _sum_in_bf16() -> None:
    """torch rounds a sum in bfloat16, this engine what it delivers: one rounding apart."""
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    own, theirs = (
        by_blocks(engine, seeded(Transformer), mp_policy=policy) for engine in (layerzero, torchs)
    )
    for model in (own, theirs):
        model(batches(1)[0][dist.get_rank()]).backward()
    expected = gradients(theirs)
    bounds = {name: torch.finfo(BF16).eps / 2 * g.abs() for name, g in expected.items()}
    assert_same_parameters(gradients(own), expected, bounds, "gradient of")


def test_sums_in_bfloat16_are_one_rounding_from_torchs() -> None:
    run_ranks(2, _sum_in_bf16)


def _ways_to_shard() -> None:
    assert_alike(untied, in_one_list, train, "a list of modules")
    assert_alike(Transformer, lambda e, m: by_blocks(e, m, root=False), _blocks, "no root")

    def wrapped(engine: Engine, model: nn.Module) -> nn.Module:
        for index, layer in enumerate(model.layers):
            model.layers[index] = engine.fully_shard(checkpoint_wrapper(layer))
        return engine.fully_shard(model)

    def wrapped_later(engine: Engine, model: nn.Module) -> nn.Module:
        for index, layer in enumerate(model.layers):
            model.layers[index] = checkpoint_wrapper(engine.fully_shard(layer))
        return engine.fully_shard(model)

    assert_alike(Transformer, wrapped, train, "inside checkpoint_wrapper")
    assert_alike(Transformer, wrapped_later, train, "around checkpoint_wrapper")

    def recomputed(engine: Engine, model: nn.Module) -> nn.Module:
        for layer in model.layers:
            forward = layer.forward
            layer.forward = lambda *args, f=forward: checkpoint(f, *args, use_reentrant=False)
        return by_blocks(engine, model)

    assert_alike(Transformer, recomputed, train, "checkpoint in forward")


def _blocks(model: nn.Module) -> list[Tensor]:
    """Layers that are models of their own, in a model that is not sharded."""
    optimizer = OPTIMIZERS["adamw"](model.layers.parameters())
    losses = []
    for step in batches(3):
        model.zero_grad()
        losses.append(model(step[dist.get_rank()]))
        losses[-1].backward()
        nn.utils.clip_grad_norm_(model.layers.parameters(), 1e3)
        optimizer.step()
    model.zero_grad()  # Others than the layers' are this rank's own.
    return [loss.detach() for loss in losses]


def test_each_way_to_shard_trains_bitwise_as_torchs() -> None:
    run_ranks(2, _ways_to_shard)


# The module ---------------------------------------------------------------------------------


def _same_module() -> None:
    plain = seeded(untied)
    names, buffers = list(plain.state_dict()), dict(plain.named_buffers())
    model = copy.deepcopy(plain)
    model.note = "of the user"
    layer, logits = model.layers[0], model.logits
    assert fully_shard(layer) is layer
    assert type(fully_shard(model.layers[1])) is type(layer)
    listed = [model.norm, model.head]
    assert fully_shard(listed) is listed
    assert fully_shard(model) is model
    assert model.layers[0] is layer and model.note == "of the user"
    assert isinstance(model, Transformer) and isinstance(model, FSDPModule)
    assert type(model).__name__ == "FSDPTransformer" and isinstance(layer, TransformerBlock)
    assert model.logits == logits
    assert list(model.state_dict()) == names and model.state_dict()["head.weight"].shape == (31, 24)
    assert [name for name, _ in model.named_parameters()] == names
    assert [p.layerzero.fqn for p in model.parameters()] == names
    assert dict(model.named_buffers()).keys() == buffers.keys()
    assert [unit.fqn for unit in units(model)] == ["", "layers.0", "layers.1", "norm"]
    assert_same_parameters(weights(model), dict(plain.state_dict()))
    model.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    for name, value in weights(model).items():
        assert_bitwise(value, plain.state_dict()[name] + 1, name)
    sequence = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert type(sequence[1:]) is nn.Sequential and len(sequence[1:]) == 2
    with pytest.raises(NotImplementedError, match="cannot be copied"):
        copy.deepcopy(model)


def test_the_module_stays_what_it_was() -> None:
    run_ranks(2, _same_module)
