"""fully_shard: what torch's function of that name does, with nothing but the import changed."""

import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import layerzero
from layerzero import (
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    notices,
    register_fsdp_forward_method,
    share_comm_ctx,
    units,
)
from tests.harness.checks import (
    assert_bitwise,
    assert_norm,
    assert_same_parameters,
    recorded_warnings,
)
from tests.harness.models import CASES, Block, Case, Transformer, TransformerBlock, loss_of
from tests.harness.ranks import on_ranks
from tests.harness.reference import (
    OPTIMIZERS,
    RunFn,
    backward_of,
    batches_of,
    forward_backward,
    full_gradients,
    on_meta,
    seeded,
    train_rank,
)

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


def batches(steps: int, case: Case = CASE) -> list[list[Any]]:
    return (batches_of(case, dist.get_world_size(), steps=3) * steps)[:steps]


def train(
    model: nn.Module,
    steps: int = 3,
    optimizer: str = "adamw",
    run: RunFn = forward_backward,
    case: Case = CASE,
) -> list[Tensor]:
    made = OPTIMIZERS[optimizer](model.parameters())
    return train_rank(model, made, batches(steps, case), dist.get_rank(), run)


def twice(model: nn.Module) -> list[Tensor]:
    """Two steps: the second one has a recorded order, and weights that the first one changed."""
    return train(model, steps=2)


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p).detach() for name, p in model.named_parameters()}


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
    assert_same_parameters(full_gradients(own), full_gradients(theirs), what=f"{what}: gradient of")
    assert_same_parameters(weights(own), weights(theirs), what=f"{what}: parameter")
    return own, theirs


POLICIES = {
    "float32": {},
    "bf16": {"param_dtype": BF16, "reduce_dtype": torch.float32},
    "inputs as they are": {"reduce_dtype": torch.float32, "cast_forward_inputs": False},
}
SINCE_2_15 = hasattr(torchs.MixedPrecisionPolicy, "param_dtype_override_fn")
if SINCE_2_15:
    POLICIES["sums in the dtype that parameters were built in"] = {"param_dtype": BF16}


@on_ranks(2)
def test_training_is_bitwise_torchs() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for (name, policy), reshard in zip(POLICIES.items(), cycle((None, True, False))):

        def shard(engine: Engine, model: nn.Module) -> nn.Module:
            mp_policy = engine.MixedPrecisionPolicy(**policy)  # noqa: B023
            options = {"mesh": mesh, "mp_policy": mp_policy}
            return by_blocks(engine, model, reshard_after_forward=reshard, **options)  # noqa: B023

        # From 2.15 on torch does not round gradients that autograd promotes to float32.
        case = CASES["mlp"] if SINCE_2_15 and "param_dtype" in policy else CASE
        run = functools.partial(train, case=case)
        assert_alike(case.build, shard, run, f"{name}, reshard_after_forward={reshard}")


@on_ranks(2)
def test_each_way_to_shard_trains_bitwise_as_torchs() -> None:
    assert_alike(untied, in_one_list, train, "a list of modules")
    assert_alike(Transformer, lambda e, m: by_blocks(e, m, root=False), _blocks, "no root")

    def wrapped(engine: Engine, model: nn.Module, later: bool = False) -> nn.Module:
        first, second = checkpoint_wrapper, engine.fully_shard
        for index, layer in enumerate(model.layers):
            model.layers[index] = first(second(layer)) if later else second(first(layer))
        return engine.fully_shard(model)

    assert_alike(Transformer, wrapped, twice, "inside checkpoint_wrapper")
    around = functools.partial(wrapped, later=True)
    assert_alike(Transformer, around, twice, "around checkpoint_wrapper")

    def recomputed(engine: Engine, model: nn.Module) -> nn.Module:
        for layer in model.layers:
            forward = layer.forward
            layer.forward = lambda *args, f=forward: checkpoint(f, *args, use_reentrant=False)
        return by_blocks(engine, model)

    assert_alike(Transformer, recomputed, twice, "checkpoint in forward")

    def by_columns(engine: Engine, model: nn.Module) -> nn.Module:
        return by_blocks(engine, model, shard_placement_fn=lambda p: Shard(p.ndim - 1))

    assert_alike(Transformer, by_columns, twice, "borders in another dimension")


def _blocks(model: nn.Module) -> list[Tensor]:
    """Layers that are models of their own, in a model that is not sharded."""
    optimizer = OPTIMIZERS["adamw"](model.layers.parameters())

    def run(model: nn.Module, batch: Tensor) -> Tensor:
        model.zero_grad()
        loss = forward_backward(model, batch)
        nn.utils.clip_grad_norm_(model.layers.parameters(), 1e3)
        return loss

    losses = train_rank(model, optimizer, batches(2), dist.get_rank(), run)
    model.zero_grad()  # Others than the layers' are this rank's own.
    return losses


@on_ranks(2, timeout=180)
def test_blocks_may_be_compiled_before_and_after() -> None:
    expected = twice(by_blocks(layerzero, seeded(Transformer)))

    def compile_each(model: Any, when: str) -> nn.Module:
        for index, layer in enumerate(model.layers):
            if when == "around":
                model.layers[index] = fully_shard(torch.compile(layer, backend="eager"))
                assert type(model.layers[index]).__name__ == "FSDPOptimizedModule"
                continue
            if when == "before":
                layer.compile(backend="eager")
            fully_shard(layer)
            if when == "after":
                layer.compile(backend="eager")
        fully_shard(model)
        if when == "whole":
            model.compile(backend="eager")
            assert all(layer._compiled_call_impl is not None for layer in model.layers)
        return model

    for when in ("around", "before", "after", "whole"):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="torch.compile around")
            assert_losses(twice(compile_each(seeded(Transformer), when)), expected, when)


@on_ranks(2)
def test_the_module_stays_what_it_was() -> None:
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
    assert type(sequence).__mro__[1:] == (FSDPModule, *nn.Sequential.__mro__)
    with pytest.raises(NotImplementedError, match="cannot be copied"):
        copy.deepcopy(model)
    model = copy.deepcopy(plain)
    fully_shard(model.layers[2].qkv)
    fully_shard([model.layers[1], model.layers[2]])
    assert [p.layerzero.fqn for p in fully_shard(model).parameters()] == names


def _accumulate(model: Any, micro_batches: int = 2) -> list[Tensor]:
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    losses, rank = [], dist.get_rank()
    for step in (batches(micro_batches), batches(micro_batches)[::-1]):
        optimizer.zero_grad()
        for index, batch in enumerate(step):
            is_last = index == micro_batches - 1
            model.set_is_last_backward(is_last)
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            loss = model(batch[rank])
            loss.backward()
            losses.append(loss.detach())
        found = [g for g in full_gradients(model).values() if g is not None]
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        assert_norm(norm.full_tensor() if isinstance(norm, DTensor) else norm, found)
        optimizer.step()
    return losses


def _with_lists(model: Any) -> list[Tensor]:
    first, *_, last = layers = list(model.layers)
    model.set_modules_to_forward_prefetch([first])
    first.set_modules_to_forward_prefetch(layers[1:])
    last.set_modules_to_backward_prefetch(layers[:-1])
    model.set_reshard_after_forward(False)
    losses = twice(model)
    model.set_reshard_after_forward(True, recurse=True)
    return losses + twice(model)


def _divided(model: Any) -> list[Tensor]:
    for module in model.modules():
        if isinstance(module, (FSDPModule, torchs.FSDPModule)):
            module.set_gradient_divide_factor(8.0)
            module.set_force_sum_reduction_for_comms(True)
    return train(model, steps=2, optimizer="sgd_momentum")


def _by_hand(model: Any) -> list[Tensor]:
    layer = model.layers[0]
    handle = layer.unshard(async_op=True)
    handle.wait()
    assert layer.qkv.weight.shape == (72, 24)
    layer.reshard()
    assert hasattr(layer.qkv.weight, "layerzero")
    model.unshard()
    losses = twice(model)
    model.reset_iter_state()
    return losses


def _in_chunks(model: Any) -> list[Tensor]:
    """The head is called outside the model's forward, for one part of the batch after another; it
    stays full, and reduces once, as in torchtitan's chunked loss."""
    head = model.head
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    losses = []
    for step in batches(3):
        tokens = step[dist.get_rank()]
        optimizer.zero_grad()
        hidden = model(tokens[:, :-1])
        detached = hidden.detach().requires_grad_()
        _keep_full(head, True)
        head.unshard()
        parts = [*zip(detached.chunk(2), tokens[:, 1:].chunk(2), strict=True)]
        for number, (part, targets) in enumerate(parts, start=1):
            head.set_requires_gradient_sync(number == len(parts), recurse=False)
            loss = functional.cross_entropy(head(part).flatten(0, 1), targets.flatten())
            loss.backward()
            losses.append(loss.detach())
        _keep_full(head, False)
        head.reshard()
        hidden.backward(detached.grad)
        optimizer.step()
    return losses


def _keep_full(module: Any, flag: bool) -> None:
    module.set_reshard_after_forward(not flag)
    module.set_reshard_after_backward(not flag)


class WithoutHead(Transformer):
    forward = Transformer.hidden


def registered(engine: Engine, model: nn.Module) -> nn.Module:
    engine.register_fsdp_forward_method(model, "logits")  # Not sharded yet: without effect.
    by_blocks(engine, model)
    engine.register_fsdp_forward_method(model, "logits")
    return model


@on_ranks(2, timeout=120)
def test_methods_do_what_torchs_do() -> None:
    assert_alike(Transformer, by_blocks, _accumulate, "accumulation")
    assert_alike(untied, in_one_list, _accumulate, "accumulation with a list")
    assert_alike(Transformer, by_blocks, _with_lists, "prefetch lists")
    assert_alike(Transformer, by_blocks, _divided, "divide factor")
    # torch's root stays full after its `unshard`, and computes with the weights of before a step.
    plain = twice(by_blocks(torchs, seeded(Transformer)))
    assert_losses(_by_hand(by_blocks(layerzero, seeded(Transformer))), plain, "unshard")
    calls = backward_of(lambda model, batch: loss_of(model.logits(batch)))
    run = functools.partial(train, run=calls)
    assert_alike(Transformer, registered, run, "a registered method")


@pytest.mark.since_torch("2.13")  # torch's own engine crashes in it with 2.11
@on_ranks(2)
def test_a_lists_modules_may_be_used_apart() -> None:
    assert_alike(
        lambda: WithoutHead(tied=False), in_one_list, _in_chunks, "a list's modules used apart"
    )


class FunctionAsHead(Transformer):
    """The head is a function of the embedding's weight, recomputed for half of the batch."""

    def logits(self, tokens: Tensor) -> Tensor:
        def head(x: Tensor) -> Tensor:
            return functional.linear(x, self.embed.weight)

        one, other = self.hidden(tokens).chunk(2)
        return torch.cat([head(one), checkpoint(head, other, use_reentrant=False)])


def with_embedding_kept(engine: Engine, model: nn.Module) -> nn.Module:
    del model.head
    engine.fully_shard(model.embed, reshard_after_forward=False)
    return by_blocks(engine, model)


@on_ranks(2)
def test_a_unit_that_stays_for_backward_may_be_used_until_the_forward_ends() -> None:
    own, _ = assert_alike(FunctionAsHead, with_embedding_kept, train, "a head as a function")
    with torch.no_grad():
        own(batches(1)[0][0])
    assert own.embed.weight.shape[0] < own.embed.num_embeddings  # Rows of this rank again.
    own.embed.register_forward_hook(lambda *_: 1 / 0)  # An error that the model's forward catches.
    own.forward = functools.partial(_catches, own.embed)
    own(batches(1)[0][0])
    assert own.embed.weight.shape[0] < own.embed.num_embeddings


def _catches(part: nn.Module, tokens: Tensor) -> None:
    with contextlib.suppress(ZeroDivisionError):
        part(tokens)


FLAGS: dict[str, Callable[[Any], object]] = {
    "first waits": lambda model: model.layers[0].set_requires_gradient_sync(False),
    "others wait": lambda model: (
        model.set_requires_gradient_sync(False),
        model.layers[0].set_requires_gradient_sync(True),
    ),
    "all sync": lambda model: model.set_requires_gradient_sync(True),
    "first in shards": lambda model: model.layers[0].set_requires_all_reduce(False),
    "rest in shards": lambda model: (
        model.set_requires_all_reduce(False),
        model.layers[0].set_requires_gradient_sync(False),
    ),
    "all in shards": lambda model: model.set_requires_all_reduce(False),
    "all reduce": lambda model: model.set_requires_all_reduce(True),
}


def with_flags(*changes: str) -> Step:
    """A micro-batch after each change of flags; a step after the last one."""

    def run(model: Any) -> list[Tensor]:
        optimizer, losses = OPTIMIZERS["adamw"](model.parameters()), []
        for _ in range(2):
            for change, batch in zip(changes, batches(len(changes)), strict=True):
                FLAGS[change](model)
                losses.append(model(batch[dist.get_rank()]))
                losses[-1].backward()
            assert all(p.grad is not None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    return run


@on_ranks(2)
def test_what_waits_in_some_units_is_dropped_by_zero_grad_and_after_a_step_that_failed() -> None:
    batch = batches(1)[0][dist.get_rank()]
    fresh = by_blocks(layerzero, seeded(Transformer))
    fresh(batch).backward()
    for wait, drop in (("first waits", "zero_grad"), ("others wait", "reset_iter_state")):
        model: Any = by_blocks(layerzero, seeded(Transformer))
        FLAGS[wait](model)
        model.layers[0].set_requires_gradient_sync(False)
        model(batch).backward()
        getattr(model, drop)()
        FLAGS["all sync"](model)
        model(batch).backward()
        assert_same_parameters(full_gradients(model), full_gradients(fresh), what=f"{drop}: of")


@on_ranks(2)
@pytest.mark.parametrize("build_others", [seeded, on_meta])
def test_the_first_rank_sends_its_values_to_emptied_ranks(
    build_others: Callable[[type[nn.Module]], nn.Module],
) -> None:
    is_first = dist.get_rank() == 0
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    losses = []
    for engine in (layerzero, torchs):
        with recorded_warnings() as texts:
            built = seeded(Transformer) if is_first else build_others(Transformer)
            model: Any = by_blocks(engine, built)
        if engine is layerzero and build_others is on_meta:
            assert not texts
            with pytest.raises(RuntimeError, match=r"has no value yet \(rank 1\)"):
                model(batches(1)[0][dist.get_rank()])
        whole = dict(seeded(Transformer, seed=1).state_dict()) if is_first else {}
        model = model.to("cpu") if is_first else model.to_empty(device="cpu")
        set_model_state_dict(model, whole, options=options)
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
        losses.append(twice(model))
    assert_losses(*losses, "values of the first rank")


def _save_as_torchs_example(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Whole tensors, as the checkpoint of pytorch's example for `fully_shard` gathers them."""
    state = optimizer.state_dict()
    state["state"] = {
        number: {key: whole(value) for key, value in own.items()}
        for number, own in state["state"].items()
    }
    file = io.BytesIO()
    with recorded_warnings() as texts:
        torch.save([{k: whole(v) for k, v in model.state_dict().items()}, state], file)
    assert not texts
    return file.getvalue()


def _load_as_torchs_example(engine: Engine, model: nn.Module, file: bytes) -> Any:
    """Its optimizer, made after the load: torch's parameters are others then."""

    def part(whole: Tensor, entry: Any) -> Tensor:
        if engine is layerzero or not isinstance(entry, DTensor):
            return whole
        return distribute_tensor(whole, entry.device_mesh, entry.placements)

    saved, saved_state = torch.load(io.BytesIO(file), weights_only=True)
    entries = model.state_dict()
    given = {name: nn.Parameter(part(whole, entries[name])) for name, whole in saved.items()}
    model.load_state_dict(given, strict=False, assign=True)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    _init_optim_state(optimizer)
    state = optimizer.state_dict()
    for number, own in state["state"].items():
        for key, entry in own.items():
            own[key] = part(saved_state["state"][number][key], entry)
    groups = zip(state["param_groups"], saved_state["param_groups"], strict=True)
    state["param_groups"] = [{**theirs, "params": own["params"]} for own, theirs in groups]
    optimizer.load_state_dict(state)
    return optimizer


@on_ranks(2, fresh=True)
def test_the_checkpoints_of_torchs_example_work_with_either_engine() -> None:
    """Written and read by either engine, then trained on: all losses are those of one run."""
    rank, expected = dist.get_rank(), None
    for writer in (layerzero, torchs):
        model = by_blocks(writer, seeded(untied))
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        train_rank(model, optimizer, batches(2), rank)
        file = _save_as_torchs_example(model, optimizer)
        losses = train_rank(model, optimizer, batches(2), rank)
        expected = expected or losses
        assert_losses(losses, expected, writer.__name__)
        for reader in (layerzero, torchs):
            again = by_blocks(reader, seeded(untied, 1))
            optimizer = _load_as_torchs_example(reader, again, file)
            losses = train_rank(again, optimizer, batches(2), rank)
            assert_losses(losses, expected, f"{writer.__name__}, then {reader.__name__}")


@on_ranks(2, fresh=True)
def test_a_save_of_this_ranks_shards_warns_once() -> None:
    """Where the example gathers a value only if it is a DTensor, its files would have shards."""
    model = by_blocks(layerzero, seeded(untied))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train_rank(model, optimizer, batches(1), dist.get_rank())
    for state in (optimizer.state_dict(), model.state_dict()):
        with mock.patch.object(notices, "_issued", set()), recorded_warnings() as texts:
            pickle.dumps(copy.deepcopy(state))
            assert not notices._issued
            for _ in range(2):
                torch.save(state, io.BytesIO())
        assert len(texts) == (dist.get_rank() == 0)
        assert all("this rank's part alone, elements (0, " in text for text in texts)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    files = [file.getvalue()]
    dist.broadcast_object_list(files)  # Every rank reads what the first one wrote.
    given = torch.load(io.BytesIO(files[0]), weights_only=True)
    if dist.get_rank() == 0:
        model.load_state_dict(given)
    else:
        with pytest.raises(RuntimeError, match="it was saved by another rank"):
            model.load_state_dict(given)


@on_ranks(2, fresh=True)
def test_dtensors_do_not_load_for_shards() -> None:
    model: Any = by_blocks(layerzero, Transformer())
    mesh = init_device_mesh("cpu", (2,))
    given = {k: distribute_tensor(whole(v), mesh) for k, v in model.state_dict().items()}
    with pytest.raises(
        RuntimeError, match=r"the entry is a DTensor, but .* load .*full_tensor\(\)"
    ):
        model.load_state_dict(given, strict=False, assign=True)
    for attribute in ("placements", "device_mesh"):
        for value in (model.head.weight, model.state_dict()["head.weight"]):
            assert not hasattr(value, attribute)


@on_ranks(2)
def test_derivatives_in_forward_mode_are_those_of_one_process() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def derive(module: nn.Module) -> Tensor:
        with forward_ad.dual_level():
            output = forward_ad.unpack_dual(module(forward_ad.make_dual(batch, direction)))
            return output.tangent

    batch, direction = torch.randn(2, 3, 8)
    plain = seeded(build)
    model = on_meta(build)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    model.to_empty(device="cpu")
    # Before the ranks agree that every parameter has a value, which a transform would break.
    with pytest.raises(NotImplementedError, match=r"torch\.func transforms.*forward_ad"):
        torch.func.jvp(model, (batch,), (direction,))
    with torch.no_grad():
        for shard, value in zip(
            model.state_dict().values(), plain.state_dict().values(), strict=True
        ):
            shard.copy_(value)
    for module in (model, plain):
        derive(module).square().sum().backward()  # Both ranks have one batch: the mean is equal.
    assert_bitwise(derive(model).detach(), derive(plain).detach(), "derivative")
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_same_parameters(full_gradients(model), expected, what="gradient of")


@on_ranks(2)
def test_a_parameter_gathers_itself() -> None:
    model: Any = by_blocks(layerzero, seeded(Transformer))
    plain = dict(seeded(Transformer).named_parameters())
    for name, parameter in model.named_parameters():
        info = parameter.layerzero
        assert_bitwise(info.full_tensor(), plain[name].detach(), name)
        # As weights are taken for an inference engine, from DTensors and others.
        taken = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert_bitwise(taken, plain[name].detach(), name)
        again = copy.copy(info)
        assert again == info
        with pytest.raises(RuntimeError, match="copied or read from a file"):
            again.full_tensor()

    with model.summon_full_params():
        assert not any(hasattr(whole, "full_tensor") for whole in model.parameters())


@on_ranks(2)
def test_ignored_and_frozen_parameters_are_as_in_torch() -> None:
    def shard(engine: Engine, model: nn.Module) -> nn.Module:
        ignored = {model.norm.weight, model.layers[1].mlp_norm.weight}
        for parameter in ignored:
            parameter.requires_grad_(False)
        model.layers[0].requires_grad_(False)
        return by_blocks(engine, model, ignored_params=ignored)

    own, theirs = assert_alike(Transformer, shard, twice, "ignored parameters")
    for model in (own, theirs):
        assert type(model.norm.weight) is nn.Parameter and model.norm.weight.shape == (24,)


@on_ranks(4, timeout=120)
def test_copies_and_smaller_groups() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def shard(engine: Engine, model: nn.Module) -> nn.Module:
        return by_blocks(engine, model, mesh=mesh)

    assert_alike(Transformer, shard, twice, "replicated")

    over_shards = with_flags("all in shards", "all reduce")
    assert_alike(Transformer, shard, over_shards, "over shards first")
    some = ("first in shards", "rest in shards", "first in shards", "first waits", "all sync")
    assert_alike(Transformer, shard, with_flags(*some), "some in shards")

    def train_with(root: Any, layers: Any) -> list[Tensor]:
        model: Any = seeded(Transformer)
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=layers)
        return twice(fully_shard(model, reshard_after_forward=root))

    expected = train_with(True, True)
    for root, layers in ((None, 2), (2, 2), (4, 1), (2, True)):
        assert_losses(train_with(root, layers), expected, f"reshard_after_forward={root, layers}")
    with pytest.raises(ValueError, match="a divisor of 4"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward=3)
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(NotImplementedError, match="with a mesh of two axes"):
        fully_shard(nn.Linear(8, 8), mesh=mesh, reshard_after_forward=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # One copy is no mistake, and `outer` no word of torch's.
        fully_shard(nn.Linear(8, 8), mesh=mesh)


@on_ranks(1)
def test_what_has_no_counterpart_is_refused_by_name() -> None:
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (NotImplementedError, "dp_mesh_dims", {"dp_mesh_dims": object()}),
        (NotImplementedError, "shard_placement_fn", {"shard_placement_fn": lambda p: Replicate()}),
        (TypeError, "expected a DeviceMesh", {"mesh": dist.group.WORLD}),
        (ValueError, "reshard_after_forward", {"reshard_after_forward": "no"}),
        (TypeError, "mixed_precision", {"mp_policy": torch.bfloat16}),
        (TypeError, "offload", {"offload_policy": True}),
    ]
    for error, text, options in refused:
        with pytest.raises(error, match=text):
            fully_shard(module, **options)
    for several, error, text in (
        (nn.ModuleList([module]), ValueError, "as this ModuleList: nothing would gather"),
        ([], ValueError, "an empty list"),
        ([module, 1], TypeError, "expected modules"),
    ):
        with pytest.raises(error, match=text):
            fully_shard(several)
    fully_shard(module[0])
    fully_shard(module, offload_policy=OffloadPolicy())
    with pytest.raises(RuntimeError, match="sharded already"):
        fully_shard(module[0])
    around = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match="inside before those around"):
        fully_shard(around[0])
    tied = Transformer()
    fully_shard(tied.embed)
    with pytest.raises(ValueError, match="tied to 'weight' of a module that was sharded without"):
        fully_shard([tied.norm, tied.head])
    for name, *arguments in (
        ("set_custom_all_gather", None),
        ("set_allocate_memory_from_process_group_for_comm", True),
        ("set_symm_mem_for_comm",),
        ("set_keep_unsharded_storage", True),
        ("set_manual_backward_finalization", True),
        ("finalize_backward",),
    ):
        with pytest.raises(NotImplementedError, match=name):
            getattr(module, name)(*arguments)
    with pytest.raises(ValueError, match=r"modules to prefetch must be units, got Linear"):
        module.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
    with pytest.raises(RuntimeError, match="outermost"):
        module[0].reset_iter_state()
    with pytest.raises(ValueError, match="has no method"):
        register_fsdp_forward_method(module, "missing")
    share_comm_ctx([module, module[0]])
    with pytest.raises(ValueError, match="expected modules that fully_shard sharded"):
        share_comm_ctx([nn.Linear(2, 2)])


def test_methods_are_those_of_torch() -> None:
    theirs = {name for name in vars(torchs.FSDPModule) if not name.startswith("_")}
    assert theirs <= {*dir(FSDPModule)}
    for name in theirs:
        own, expected = (
            list(inspect.signature(getattr(cls, name)).parameters.values())
            for cls in (FSDPModule, torchs.FSDPModule)
        )
        assert [p.replace(annotation=0) for p in own] == [
            p.replace(annotation=0) for p in expected
        ], name
