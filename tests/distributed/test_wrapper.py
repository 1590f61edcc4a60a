"""A wrapper shows the module it wraps: what is set, called or indexed is the module's."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import operator
import pickle
import types
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import MixedPrecision, ZeRO3, optim, register_forward_method
from layerzero.module_tree.awaited_values import check_first_forward
from tests.harness.checks import assert_bitwise
from tests.harness.compare import assert_same_gradients, assert_trains_alike, zero3
from tests.harness.internals import move_shards, root_state
from tests.harness.models import CASES, WIDTH, Block, Mlp, Transformer, TransformerBlock
from tests.harness.ranks import on_ranks
from tests.harness.reference import batches_of, seeded


class Configured(nn.Module):
    """Computes as the attributes on it say, and has a property that can be set."""

    flag = False

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.loss_function: Callable[[Tensor], Tensor] = torch.tanh
        self._factor = 1.0

    @property
    def factor(self) -> float:
        return self._factor

    @factor.setter
    def factor(self, value: float) -> None:
        self._factor = 2 * value

    def forward(self, x: Tensor) -> Tensor:
        x = self.loss_function(self.linear(self.block(x))) * self._factor
        return -x if self.flag else x

    def generate(self, x: Tensor) -> Tensor:
        return self(x) + 1


@on_ranks(2)
def test_attributes_set_on_the_wrapper_are_the_modules() -> None:
    model, plain = zero3(Configured, Block), seeded(Configured)
    assert isinstance(model, ZeRO3) and isinstance(model.module, Configured)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert list(inspect.signature(type(model).forward).parameters) == ["self", "x"]
    with pytest.raises(AttributeError):
        _ = model.no_such_thing
    x = torch.randn(3, WIDTH)
    for each in (model, plain):
        each.flag = True
        each.factor = 3.0
        each.loss_function = torch.sin
        each.generation_config = {"length": 5}
        each.offset = torch.ones(())  # a tensor, and no buffer
    assert model.module.flag and model.module.generation_config is model.generation_config
    assert model.factor == plain.factor == 6.0
    assert_bitwise(model(x), plain(x), "attributes that forward reads")
    assert_bitwise(model.generate(x), plain.generate(x), "a method that calls the module")
    assert {"generation_config", "loss_function", "no_sync", "factor"} <= set(dir(model))
    for each in (model, plain):
        del each.flag, each.generation_config
        assert not hasattr(each, "generation_config") and each.flag is False
    model.register_buffer("seen", torch.zeros(1))
    assert model.module.seen is model.seen and "seen" in model.module.state_dict()
    assert model.get_submodule("block.up") is model.module.block.up


class Stubborn(nn.Module):
    """Keeps a part of itself from training; counts what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.told: list[str] = []

    def train(self, mode: bool = True) -> Stubborn:
        super().train(mode)
        self.norm.eval()
        self.told.append(f"train({mode})")
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.told.append("zero_grad")

    def get_extra_state(self) -> int:
        return len(self.told)

    def set_extra_state(self, state: int) -> None:
        self.told.append(f"extra {state}")


@on_ranks(2)
def test_overridden_methods_of_the_root_are_called() -> None:
    model = zero3(Stubborn, nn.Linear)
    assert model.train() is model and model.eval() is model and model.train() is model
    assert not model.norm.training and model.linear.training and model.training
    model.zero_grad()
    model.load_state_dict(model.state_dict())
    expected = ["train(True)", "train(False)", "train(True)", "zero_grad", "extra 4"]
    assert model.told == expected
    nn.Sequential(model).eval()  # from around it
    assert model.told == [*expected, "train(False)"] and not model.linear.training
    seen: list[bool] = []
    linear = nn.Linear(2, 2)
    linear.train = lambda mode=True: seen.append(mode)
    ZeRO3(linear).eval()
    assert seen == [False]
    visited: list[nn.Module] = []
    assert model.apply(visited.append) is model
    assert visited[-1] is model.module and len(visited) == 3


def _patch(model: nn.Module, where: str) -> None:
    """The new forward uses parameters itself, and the forward before."""
    inner = getattr(model, "module", model)
    if where == "class":
        # Not on `Configured`: other tests use it.
        inner.__class__ = type("Patched", (Configured,), {"forward": Configured.forward})
        type(inner).forward = lambda self, x: Configured.forward(self, x) * self.linear.weight.sum()
        return
    patched: Any = {"wrapper": model, "module": inner, "unit": model.block}[where]
    linear, before = (patched.up if where == "unit" else patched.linear), patched.forward
    patched.forward = lambda x: before(x) * linear.weight.sum()


@on_ranks(2)
def test_a_patched_forward_runs_inside_the_unit() -> None:
    x = torch.randn(3, WIDTH)
    for where in ("wrapper", "module", "unit", "class"):
        model, plain = zero3(Configured, Block), seeded(Configured)
        for each in (model, plain):
            _patch(each, where)
        assert_bitwise(model(x), plain(x), f"a patched forward of the {where}")
        assert_bitwise(model.generate(x), plain.generate(x), f"by a method, patched on {where}")
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    model, plain = zero3(Configured, Block), seeded(Configured)
    before = model.forward
    model.forward = types.MethodType(lambda self, x: self.linear(x) + before(x), model)
    assert_bitwise(model(x), plain.linear(x) + plain(x), "a method as the forward")
    once = model.forward
    model.forward = lambda x: 2 * once(x)
    assert_bitwise(model(x), 2 * (plain.linear(x) + plain(x)), "patched twice")
    model.forward = before
    assert_bitwise(model(x), plain(x), "the forward put back")
    model.forward = lambda x: x
    assert model(x) is x
    del model.forward
    assert_bitwise(model(x), plain(x), "the patch deleted")


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
        register_forward_method(model, name)
    assert torch.equal(model.generate(tokens, 4), plain.generate(tokens, 4))
    assert torch.equal(model.generate(tokens, count=2), plain.generate(tokens, count=2))
    with torch.inference_mode():
        assert_bitwise(model.logits(tokens).clone(), plain.logits(tokens).clone(), "logits")
    for name in ("encode", "logits"):
        for each in (model, plain):
            getattr(each, name)(tokens).square().sum().backward()
        assert_same_gradients(model, plain)
        for each in (model, plain):
            each.zero_grad()
    batches = batches_of(CASES["transformer"], dist.get_world_size(), steps=2)
    assert_trains_alike(model, plain, batches)


class Engine(ZeRO3):
    """What a user derives."""

    limit: int = 7

    def __init__(self, module: nn.Module, tag: str, **options: Any) -> None:
        super().__init__(module, **options)
        self.tag = tag
        self.limit += 1

    @property
    def twice(self) -> str:
        return 2 * self.tag

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@on_ranks(2)
def test_a_subclass_keeps_what_it_is() -> None:
    x = torch.randn(3, WIDTH)
    engine, plain = Engine(seeded(Mlp), "a", auto_wrap_policy={Block}), seeded(Mlp)
    assert isinstance(engine, Engine) and isinstance(engine, ZeRO3)
    assert type(engine).__name__ == "Engine" and type(engine).forward is Engine.forward
    assert (engine.tag, engine.twice, engine.limit) == ("a", "aa", 8)
    assert not hasattr(engine.module, "limit")
    assert_bitwise(engine(x), plain(x) * 2, "forward of the subclass")
    listed = Engine(nn.Sequential(Block(), nn.Tanh()), "b")
    assert isinstance(listed, Engine) and len(listed) == 2 and listed.twice == "bb"


@on_ranks(2)
def test_a_wrapped_container_is_indexed_as_one() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2))

    x = torch.randn(3, WIDTH)
    model, plain = zero3(build, Block), seeded(build)
    assert len(model) == 3 and list(model) == list(model.module) and bool(model)
    assert model[-1] is model.module[2] and model[1] in model
    assert_bitwise(model[0:2](x), plain[0:2](x), "a slice")
    assert_bitwise(model[2](x), plain[2](x), "an item of the root unit")
    named = ZeRO3(nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH)}), auto_wrap_policy={nn.Linear})
    assert "a" in named and named["a"] is named.module["a"] and list(named.keys()) == ["a"]
    assert named["a"](x).shape == x.shape
    with pytest.raises(TypeError):
        len(zero3(Mlp))


@on_ranks(2)
def test_copies_are_refused_with_what_to_do() -> None:
    model = zero3(Mlp, Block)
    parts = {
        "the wrapper": model,
        "the module": model.module,
        "a unit": model.blocks[0],
        "a module in a unit": model.blocks[0].up,
        "a module around": nn.Sequential(model),
    }
    ways: list[Callable[[nn.Module], object]] = [
        copy.deepcopy,
        pickle.dumps,
        lambda module: torch.save(module, io.BytesIO()),
    ]
    for part, module in parts.items():
        for do in ways:
            with pytest.raises(
                RuntimeError, match=r"cannot be copied or pickled.*checkpoint\.save"
            ):
                do(module)
        if part != "a module around":
            with pytest.raises(NotImplementedError, match="copy the module before wrapping it"):
                copy.copy(module)
    with pytest.raises(NotImplementedError, match="average weights copy sharded parameters"):
        torch.optim.swa_utils.AveragedModel(model)
    sharded_params = copy.deepcopy([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(sharded_params, model.parameters(), strict=True))


@on_ranks(2)
def test_a_conversion_after_wrapping_changes_nothing_or_is_refused() -> None:
    x = torch.randn(3, WIDTH)
    refused: list[Callable[[nn.Module], object]] = [
        lambda model: model.half(),
        lambda model: model.to(torch.float64),
        lambda model: model.blocks[0].up.double(),
        lambda model: model.to("meta", torch.float16),
        lambda model: nn.Sequential(model).bfloat16(),
    ]
    harmless: list[Callable[[nn.Module], object]] = [
        lambda model: model.float(),
        lambda model: model.to("cpu", torch.float32),
        lambda model: model.cpu(),
        lambda model: model.blocks[1].to(torch.float32),
        lambda model: model.type(torch.float32),
    ]
    for swap in (False, True):
        with mock.patch.object(torch.__future__, "_swap_module_params_on_conversion", swap):
            model, plain = zero3(Mlp, Block), seeded(Mlp)
            sharded_params = list(model.parameters())
            for convert in refused:
                with pytest.raises(RuntimeError, match=r"sharded as torch.float32 and"):
                    convert(model)
            with model.summon_full_params(), pytest.raises(RuntimeError, match="cannot become"):
                model.half()
            for convert in harmless:
                convert(model)
            assert all(a is b for a, b in zip(sharded_params, model.parameters(), strict=True))
            assert all(hasattr(sharded_param, "layerzero") for sharded_param in sharded_params)
            assert_bitwise(model(x), plain(x), f"after conversions, swap={swap}")
            assert_trains_alike(model, plain, batches_of(CASES["mlp"], 2, steps=1))


@on_ranks(1)
def test_hooks_registered_on_the_wrapper_run() -> None:
    x = torch.randn(3, WIDTH, requires_grad=True)
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    for each in (model, plain):
        each.calls = []
        each.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        each.register_forward_hook(lambda m, args, output: output + 1)
        each.register_full_backward_hook(
            lambda m, gradients, outputs, each=each: each.calls.append(gradients[0].sum())
        )
    for each in (model, plain):
        each(x).square().sum().backward()
    assert_bitwise(model(x), plain(x), "hooks on the wrapper")
    assert_bitwise(model.calls[0], plain.calls[0], "a backward hook on the wrapper")


@on_ranks(2)
def test_a_forward_of_the_root_moves_its_inputs_to_the_device() -> None:
    model, seen = zero3(Configured, Block), []

    def forward(batch: dict[str, Tensor]) -> Tensor:
        """Its own block gets a tensor of another device."""
        seen.append(tuple(each.device.type for each in batch.values()))
        return model.block(torch.ones(3, WIDTH))

    model.module.forward = forward
    root = root_state(model)
    assert not root.moves_inputs, "a CPU's inputs are there"
    expected = model.block(torch.ones(3, WIDTH))
    # A device that computes nothing stands for a GPU: what is moved there has no values.
    root.moves_inputs, root.device = True, torch.device("meta")
    batch = {"tokens": torch.ones(3), "there": torch.ones(3, device="meta")}
    assert torch.equal(model(batch), expected), "inner calls move nothing"
    assert batch["tokens"].device.type == "cpu"
    root.moves_inputs = False
    model(batch)
    assert seen == [("meta", "meta"), ("cpu", "meta")]


SHARDS: list[dict[str, Any]] = [
    {},
    {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    {"zero3_size": 1},
    {"zero3_size": 1, "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    {"layout": "rows", "outer": "replicate", "zero3_size": 1},
]
OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    torch.optim.AdamW,
    partial(optim.AdamW, state="8bit"),
    lambda parameters: optim.WholeTensorOptimizer(parameters, torch.optim.SGD, momentum=0.9),
]


def _elsewhere(optimizer: torch.optim.Optimizer) -> None:
    """What programs do that give the memory of a device back for a while."""
    for state in optimizer.state.values():
        state.update({k: v.clone() for k, v in state.items() if isinstance(v, Tensor)})
    if isinstance(optimizer, optim.AdamW):
        optimizer.state = optimizer.state


@on_ranks(2)
def test_shards_and_states_may_move_between_steps() -> None:
    batches = batches_of(CASES["mlp"], 2, steps=4)
    for arguments, optimizer_class in itertools.product(SHARDS, OPTIMIZERS):
        seen: list[list[Tensor]] = []
        for moves in (False, True):
            model = zero3(Mlp, Block, **arguments)
            optimizer = optimizer_class(model.parameters())
            before = [*model.parameters()]
            for batch in batches:
                model(batch[dist.get_rank()]).square().mean().backward()
                if moves:
                    addresses, grads = [p.data_ptr() for p in before], [p.grad for p in before]
                    move_shards(model, torch.clone)
                    for p, address, grad in zip(before, addresses, grads, strict=True):
                        assert p.data_ptr() != address or not p.numel()
                        assert p.grad is not grad or grad is None
                    _elsewhere(optimizer)
                optimizer.step()
                optimizer.zero_grad()
            assert all(map(operator.is_, before, model.parameters()))
            seen.append([p.detach().clone() for p in before])
        for moved, stayed in zip(*seen, strict=True):
            assert_bitwise(moved, stayed, f"{arguments}, {optimizer_class}")


class _ToAnotherDevice:
    """A conversion that says so, when it is asked what becomes of a tensor without elements; then
    it moves tensors, but there is one device here."""

    def __init__(self) -> None:
        self.moved: list[int] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        self.moved += [tensor.numel()] if tensor.numel() else []
        return tensor.clone() if self.moved else tensor.to("meta")


@on_ranks(2)
def test_whole_units_move_to_another_device_between_steps() -> None:
    model, plain, x = zero3(Mlp, Block), seeded(Mlp), torch.randn(3, WIDTH)
    before = [*model.parameters()]
    with pytest.raises(RuntimeError, match="cannot move to another device, because some of them"):
        model.blocks[0].up._apply(_ToAnotherDevice())
    with model.no_sync():
        model(x).sum().backward()
    with pytest.raises(RuntimeError, match="another device, because gradients of no_sync wait"):
        model._apply(_ToAnotherDevice())
    model(x).sum().backward()
    model.zero_grad()
    handle = model.blocks[0].register_forward_hook(lambda *_: model._apply(_ToAnotherDevice()))
    with pytest.raises(RuntimeError, match="another device, because a pass or summon_full"):
        model(x)
    handle.remove()
    model.unshard()
    for module in (model, model.blocks[1]):
        module._apply(convert := _ToAnotherDevice())
        whole = [
            h.layout.shard_numel for u in root_state(model).units_inside(module) for h in u.handles
        ]
        assert {*convert.moved}.issuperset(whole)
        assert_bitwise(model(x), plain(x), "after a move")
    assert all(map(operator.is_, before, model.parameters()))
    units = root_state(model).units
    with pytest.raises(
        RuntimeError, match=r"moved to cpu.* wrapped for meta: call model.to\('meta"
    ):
        check_first_forward(units, torch.device("meta"))
