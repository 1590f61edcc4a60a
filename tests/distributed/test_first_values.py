"""Modules from the meta device get values: sharded, emptied and drawn, ranks hold what one process
would; and by a `param_init_fn` of either kind, a load, or a clear refusal."""

import copy
import functools
import gc
import itertools
import operator
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layerzero
from layerzero import MixedPrecision, OffloadPolicy, ZeRO3, checkpoint, fully_shard
from layerzero.optim import AdamW, WholeTensorOptimizer
from tests.harness.checks import assert_bitwise, assert_norm, assert_same_parameters
from tests.harness.compare import assert_same_values, assert_trains_alike
from tests.harness.models import CASES, WIDTH, Block, Mlp, Parts
from tests.harness.ranks import on_ranks
from tests.harness.reference import full_gradients, full_parameters, on_meta, seeded

SIZE = 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.up = nn.Linear(SIZE, 3 * SIZE)
        self.down = nn.Linear(3 * SIZE, SIZE, bias=False)
        self.scale = nn.Parameter(torch.empty(()))

    def init_weights(self) -> None:
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.up.weight, std=0.02)
        nn.init.zeros_(self.up.bias)
        nn.init.kaiming_uniform_(self.down.weight, mode="fan_out")
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu()) * self.scale


class Titan(nn.Module):
    """As models of torchtitan: `init_weights` of the whole draws every value, in its own order."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, SIZE, padding_idx=3)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(SIZE, 37)
        self.tied = nn.Linear(SIZE, 37)
        self.tied.weight = self.head.weight
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.to(dtype)

    def init_weights(self) -> None:
        self.table = torch.arange(4.0)
        self.embed.reset_parameters()  # Writes a row by its index.
        row = self.embed.weight[5]
        for block in self.blocks:
            block.init_weights()
        draw = nn.init.orthogonal_ if self.head.weight.dtype is torch.float32 else nn.init.normal_
        draw(self.head.weight)
        nn.init.zeros_(self.tied.bias)
        q, k = self.head.bias.data.tensor_split(2)
        q.normal_()
        k.copy_(torch.rand(k.shape))
        for name, parameter in self.named_parameters():
            if name.endswith("down.weight"):  # Again, after others.
                parameter.data.mul_(0.5)
        row.fill_(0.25)
        self.blocks[2].up.weight.copy_(self.blocks[0].up.weight)
        for parameter in reversed([*self.parameters()]):
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return (self.head(x) + self.tied(x)).float().logsumexp(-1).mean() + self.table.sum()


def _drawn(model: Any, seed: int = 5) -> Any:
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights()
    return model


def _by_hand(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _wrapped(model: nn.Module, **options: Any) -> nn.Module:
    return ZeRO3(model, auto_wrap_policy={Layer}, param_init_fn="later", **options)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "by hand": _by_hand,
    "wrapped": _wrapped,
    "fully_shard": fully_shard,
    "rows": functools.partial(_wrapped, layout="rows"),
    "layered": functools.partial(_wrapped, zero3_size=1),
    "offloaded": functools.partial(_by_hand, offload_policy=OffloadPolicy(params=True)),
}


def _emptied(shard: Callable[[nn.Module], nn.Module] = _by_hand, **arguments: Any) -> Any:
    return shard(on_meta(Titan, **arguments)).to_empty(device="cpu")


def _tokens() -> Tensor:
    return torch.arange(8).view(2, 4) + 5 * dist.get_rank()


@on_ranks(3)
def test_what_ranks_hold_is_what_one_process_draws() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        expected = _drawn(Titan(dtype))
        for way, shard in WAYS.items():
            model = _drawn(_emptied(shard, dtype=dtype).to("cpu", dtype))
            assert [p.shape for p in model.parameters()] == [
                p.shape for p in expected.parameters()
            ], "parameters are whole while values are drawn"
            assert all(isinstance(p, nn.Parameter) for p in model.parameters())
            assert_bitwise(model(_tokens()), expected(_tokens()), f"{way}, {dtype}")
            assert_same_parameters(full_parameters(model), full_parameters(expected))
            assert all(type(p) is nn.Parameter for p in model.parameters()), "sharded ones again"


@on_ranks(2)
def test_modules_are_emptied_one_after_the_other_and_drawn_in_between_or_later() -> None:
    def draw(model: nn.Module, empties: bool, later: bool = False) -> None:
        torch.manual_seed(5)
        parts = [p for p in model.modules() if callable(getattr(p, "reset_parameters", None))]
        for part in parts:
            if empties:
                part.to_empty(device="cpu", recurse=False)
            if not later:
                part.reset_parameters()
        for part in parts if later else ():
            part.reset_parameters()
        for block in model.blocks:
            nn.init.ones_(block.scale)

    expected = Titan()
    draw(expected, empties=False)
    expected.table = torch.arange(4.0)
    for (way, shard), later in itertools.product(WAYS.items(), (False, True)):
        module = on_meta(Titan)
        module.table = expected.table
        model = shard(module)
        draw(model, True, later)
        assert_bitwise(model(_tokens()), expected(_tokens()), f"{way}, {later}")


def adapted() -> nn.Module:
    """As torchtune's layers: a table is written, and each adapter inside is emptied and drawn."""
    return Parts(
        lambda own, x: torch.stack([each(own.base(x) + own.table) for each in own.adapters]),
        base=nn.Linear(SIZE, SIZE),
        adapters=nn.ModuleList(nn.Linear(SIZE, 1, bias=False) for _ in range(3)),
        table=nn.Buffer(torch.arange(float(SIZE)), persistent=False),
    )


@on_ranks(2)
def test_a_module_that_is_emptied_again_has_no_value() -> None:
    for find in (lambda model: model.adapters[1], lambda model: model.adapters):
        model: Any = fully_shard(on_meta(adapted)).to_empty(device="cpu")
        model.table = torch.arange(float(SIZE))
        for part in (model.base, *model.adapters):
            part.reset_parameters()
        drawn = full_parameters(model)
        model._apply(lambda tensor: torch.empty_like(tensor).copy_(tensor))
        assert_same_parameters(full_parameters(model), drawn)
        find(model).to_empty(device="cpu")
        assert model.adapters[1].weight.shape == (1, SIZE)
        with pytest.raises(RuntimeError, match=r"'adapters\..\.weight' has no value yet"):
            model(torch.zeros(2, SIZE))


@on_ranks(2)
def test_a_rank_holds_one_unit_and_a_parameter_at_most() -> None:
    module = on_meta(lambda: nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(20)))
    for each in module:
        fully_shard(each)
    model = fully_shard(nn.Sequential(*module)).to_empty(device="cpu")
    before, most = _held(), 0
    for part in model:
        nn.init.normal_(part.weight)
        most = max(most, _held() - before)
    assert 64 * 64 <= most <= 2 * 64 * 64


def _held() -> int:
    """Elements of all whole tensors that are alive."""
    found = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == (64, 64)]
    return sum(t.untyped_storage().nbytes() // 4 for t in found if not t.is_meta)


def _uses(folder: Path) -> dict[str, Callable[[Any], object]]:
    """What may come first after the values; each is to see the sharded parameters."""
    return {
        "forward": lambda model: model(_tokens()),
        "state_dict": lambda model: model.state_dict(),
        "state_dict of a part": lambda model: model.blocks[1].state_dict(),
        "full state dict": lambda model: checkpoint.get_model_state_dict(model, full=True),
        "save": lambda model: checkpoint.save(f"{folder}/ours", model, step=1),
        "dcp": lambda model: dcp.save(model.state_dict(), checkpoint_id=f"{folder}/torchs"),
        "norm": lambda model: layerzero.global_norm(model),
        "signature": lambda model: model.step_signature(),
        "summon": lambda model: full_parameters(model),
        "unshard": lambda model: (model.unshard(), model.reshard()),
    }


@on_ranks(2)
def test_the_first_use_sees_shards(tmp_path: Path) -> None:
    expected = _drawn(Titan())
    wanted = full_parameters(expected)
    for (name, use), shard in zip(_uses(tmp_path).items(), cycle((_by_hand, _wrapped))):
        model = _drawn(_emptied(shard))
        use(model)
        what = f"{name}, {shard.__name__}"
        assert_same_parameters(full_parameters(model), wanted, what=what)
        assert_bitwise(model(_tokens()), expected(_tokens()), what)
    # Loads, where nothing was drawn, or is thrown away.
    whole = {k: v.clone() for k, v in expected.state_dict().items()}
    for draws in (False, True):
        for load in (
            lambda model: checkpoint.load(f"{tmp_path}/ours", model),
            lambda model: model.load_state_dict(whole),
            lambda model: model.load_state_dict(whole, assign=True),
        ):
            model = _emptied()
            if draws:
                _drawn(model, seed=11)
            model.table = torch.arange(4.0)
            load(model)
            assert_bitwise(model(_tokens()), expected(_tokens()), "after a load")


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(_tokens()).backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_optimizers_hooks_flags_and_attributes_reach_the_shards() -> None:
    builds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "torch's": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "native": lambda p: AdamW(p, lr=1e-2),
        "whole": lambda p: WholeTensorOptimizer(p, torch.optim.Adafactor, lr=1e-2),
    }
    for name, build in builds.items():
        for comes_first in (True, False):
            model = _drawn(_emptied())
            model.head.bias.requires_grad_(False)
            model.head.weight.marked = True
            called: list[object] = []
            model.embed.weight.register_post_accumulate_grad_hook(called.append)
            model.embed.weight.register_hook(lambda grad: grad * 0)
            if not comes_first:
                model(_tokens())
            optimizer = build([p for p in model.parameters() if p.requires_grad])
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            assert own == {id(p) for p in model.parameters() if p.requires_grad}, name
            before = full_parameters(model)
            _step(model, optimizer)
            after = full_parameters(model)
            for key, value in before.items():
                is_same = torch.equal(value, after[key])
                assert is_same == (key == "head.bias") or key == "embed.weight", f"{name}: {key}"
            assert called == [model.embed.weight]
            assert model.head.weight.marked is True
            assert not model.head.bias.requires_grad


@on_ranks(2)
def test_torchs_tools_load_a_part_and_the_rest_is_drawn() -> None:
    plain = _drawn(Titan())
    for block in plain.blocks:
        block.norm.reset_parameters()
    whole = full_parameters(plain)
    part = {k: v for k, v in whole.items() if "norm" not in k}
    for options in ({"broadcast_from_rank0": True}, {}):
        model = _emptied()
        given = dict(part) if dist.get_rank() == 0 or not options else {}
        torchs = StateDictOptions(full_state_dict=True, strict=False, **options)
        set_model_state_dict(model, given, options=torchs)
        model.table = torch.arange(4.0)
        with pytest.raises(RuntimeError, match=r"blocks\.0\.norm\.weight' has no value yet"):
            model(_tokens())
        for block in model.blocks:
            block.norm.reset_parameters()
        model(_tokens())
        assert_same_parameters(full_parameters(model), whole, what=f"{options}")


def _split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


@on_ranks(4)
def test_tensor_parallel_parameters_are_dtensors_while_values_are_drawn() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected = _drawn(Titan())
    model = _split(on_meta(Titan), mesh).to_empty(device="cpu")
    up = model.blocks[1].up.weight
    assert isinstance(up, DTensor) and isinstance(up, nn.Parameter)
    assert up.shape == (3 * SIZE, SIZE)
    values = full_parameters(expected)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = values[name]
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
        model.blocks[2].up.bias.mul_(2)
        expected.blocks[2].up.bias.mul_(2)
    model.table = torch.arange(4.0)
    model(_tokens() % 37)
    for name, parameter in model.named_parameters():
        full = parameter.layerzero.full_tensor()
        full = full.full_tensor() if isinstance(full, DTensor) else full
        assert_bitwise(full, dict(expected.named_parameters())[name].detach(), name)
    assert not isinstance(model.blocks[1].up.weight, DTensor)
    with pytest.raises(RuntimeError, match=r"'blocks.1.up.weight' was taken before"):
        up.data.mul_(2)


@on_ranks(2)
def test_a_gradient_given_to_a_whole_parameter_is_the_shards() -> None:
    model = _drawn(_emptied())
    for parameter in model.parameters():  # Shards, after the first.
        parameter.grad = parameter.detach() * 2
    doubled = {name: value * 2 for name, value in full_parameters(_drawn(Titan())).items()}
    assert_same_parameters(full_gradients(model), doubled, what="gradient of")
    assert_norm(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9), doubled.values())


@on_ranks(2)
def test_whole_parameters_that_were_kept_are_of_no_use_afterwards() -> None:
    model = _drawn(_emptied())
    kept = [*model.parameters()]
    kept[0].grad = None
    assert kept[0].grad is None
    model(_tokens()).backward()
    message = "'embed.weight' was taken before its model was used.*read it from its module"
    for use in (
        lambda: torch.nn.utils.clip_grad_norm_(kept, 1.0),
        lambda: kept[0].data.normal_(),
        lambda: kept[0].sum(),
        lambda: setattr(kept[0], "grad", None),
        lambda: kept[0].requires_grad_(False),
    ):
        with pytest.raises(RuntimeError, match=message):
            use()


@on_ranks(2)
def test_what_was_not_drawn_or_was_replaced_is_an_error() -> None:
    model = _emptied()
    with torch.no_grad():
        model.head.weight.normal_()
    with pytest.raises(RuntimeError, match=r"parameter '\S+' has no value yet"):
        model(_tokens())
    model = _drawn(_emptied())
    model.head.weight = nn.Parameter(torch.ones(37, SIZE))
    model.tied.weight = nn.Parameter(torch.ones(37, SIZE))
    model(_tokens())  # Other values of the same shape are taken over.
    assert_bitwise(full_parameters(model)["head.weight"].detach(), torch.ones(37, SIZE))
    model = _drawn(_emptied())
    model.head.weight = nn.Parameter(torch.ones(3, SIZE))
    with pytest.raises(RuntimeError, match=r"'head.weight' was replaced or removed after to_empty"):
        model(_tokens())
    model = _drawn(_emptied())
    model.embed.weight = model.head.weight  # Tied too late.
    with pytest.raises(RuntimeError, match=r"'embed.weight' was replaced.*tie.*before sharding"):
        model(_tokens())


@on_ranks(2)
def test_a_model_with_values_is_emptied_and_drawn_again() -> None:
    expected = _drawn(Titan())
    model = _drawn(_emptied(), seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer)
    _drawn(model.to_empty(device="cpu"))
    assert_bitwise(model(_tokens()), expected(_tokens()), "drawn again")
    model.to_empty(device="cpu")
    model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="has no value yet"):
        model(_tokens())
    # Layer by block, as where a pipeline stage draws its own.
    model.table = torch.arange(4.0)
    _drawn(model.to_empty(device="cpu"), seed=2)
    _drawn(model.blocks[1].to_empty(device="cpu"), seed=3)
    block = _drawn(Layer(), seed=3)
    found = full_parameters(model)
    for name, value in full_parameters(block).items():
        assert_bitwise(found[f"blocks.1.{name}"], value, name)


class Table(nn.Module):
    """Parameters of its own around a child, and buffers, one of which no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.child = Block()
        self.register_buffer("offset", torch.empty(WIDTH))
        self.register_buffer("angles", torch.empty(WIDTH), persistent=False)
        self.register_buffer("steps", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight)
        nn.init.uniform_(self.offset)
        nn.init.ones_(self.angles)
        with torch.no_grad():
            self.steps.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x @ self.weight) * self.angles + self.offset + self.steps


def tables() -> Any:
    def run(own: Any, x: Tensor) -> Tensor:
        y = own.second(own.first(x))
        return own.head(y) + own.same(y)

    heads = {"head": nn.Linear(WIDTH, 3), "same": nn.Linear(WIDTH, 3)}
    heads["same"].weight = heads["head"].weight
    return Parts(run, first=Table(), second=Table(), **heads)


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _writes(module: nn.Module) -> None:
    module.reset_parameters()


def _emptying(recurse: bool, always: bool) -> Callable[[nn.Module], None]:
    """Empties a module, or all inside it too, and resets it: always, or if it finds it on meta."""

    def init(module: nn.Module) -> None:
        if always or any(t.is_meta for t in (module.parameters() if recurse else _own(module))):
            module.to_empty(device="cpu", recurse=recurse)
            module.reset_parameters()

    return init


def _replaces(module: nn.Module) -> None:
    """Draws before it looks; what it drew in vain must not count."""
    drawn = {name: torch.rand(p.shape) for name, p in module.named_parameters(recurse=False)}
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.is_meta:
            setattr(module, name, nn.Parameter(drawn[name]))
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_meta:
            module._buffers[name] = torch.ones(buffer.shape, dtype=buffer.dtype)


def _asserts_meta(module: nn.Module) -> None:
    assert all(tensor.is_meta for tensor in _own(module)), "written for FSDP"
    _emptying(recurse=False, always=True)(module)


def _fill(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in _own(module):
            tensor.fill_(0.25)


def _reset_in_order(module: nn.Module) -> None:
    """What an ordinary model's modules are reset to, in their order."""
    torch.manual_seed(3)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


@on_ranks(2)
def test_functions_of_either_kind_initialise_with_the_same_random_numbers() -> None:
    plain = tables()
    _reset_in_order(plain)
    drawn = torch.rand(3)
    ways = itertools.product((False, True), repeat=2)
    kinds = (None, _writes, *(_emptying(*way) for way in ways))
    settings: list[Any] = [None, {Table}, {Table, Block, nn.Linear}]
    for number, kind in enumerate(kinds):
        module, calls = on_meta(tables), []

        def init(part: nn.Module, kind: Any = kind, calls: list[nn.Module] = calls) -> None:
            calls.append(part)
            kind(part)

        with_own = [part for part in module.modules() if _own(part)]
        torch.manual_seed(3)
        given = None if kind is None else init
        model = ZeRO3(module, auto_wrap_policy=settings[number % 3], param_init_fn=given)
        assert [*dict.fromkeys(calls)] == ([] if kind is None else with_own)
        assert kind is not _writes or calls == with_own
        assert_bitwise(torch.rand(3), drawn, "the generator afterwards")
        assert_same_values(model, plain)
        buffers = dict(model.named_buffers())
        assert_same_parameters(buffers, dict(plain.named_buffers()), what="buffer")
        assert model.head.weight is model.same.weight, "still tied"
    assert_trains_alike(model, plain)

    torch.manual_seed(3)
    expected = {"weight": torch.rand(3, WIDTH), "bias": torch.rand(3)}
    torch.manual_seed(3)
    model = ZeRO3(on_meta(lambda: nn.Linear(WIDTH, 3)), param_init_fn=_replaces)
    assert_same_parameters(full_parameters(model), expected)
    ZeRO3(on_meta(), auto_wrap_policy={Block}, param_init_fn=_asserts_meta)
    for case in (CASES["odd_shapes"], CASES["no_parameters"]):
        model = ZeRO3(on_meta(case.build), auto_wrap_policy={*case.units}, param_init_fn=_fill)
        for name, value in [*full_parameters(model).items(), *model.named_buffers()]:
            assert value.device.type == "cpu" and bool((value == 0.25).all()), name


@on_ranks(2)
def test_what_has_values_inside_a_module_that_is_emptied_keeps_them() -> None:
    for always in (False, True):
        for wraps in (False, True):
            model = seeded(tables)
            model.first.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))
            model.second = on_meta(Table)
            inside = copy.deepcopy(model.first.child)
            if wraps:
                model.first.child = ZeRO3(model.first.child)
            init = _emptying(recurse=True, always=always)
            wrapped = ZeRO3(model, auto_wrap_policy={Table}, param_init_fn=init)
            for name, value in inside.named_parameters():
                found = full_parameters(wrapped)[f"first.child.{name}"]
                assert_bitwise(found, value.detach(), f"{always}, {wraps}: {name}")
            assert all(bool(value.isfinite().all()) for value in full_parameters(wrapped).values())


class _Forgets(nn.Linear):
    """Its reset leaves a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)
        self.register_buffer("scale", torch.empty(3))


def _nothing(module: nn.Module) -> None:
    pass


def _half(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.view(-1)[1:].fill_(0.5)


def _raises(module: nn.Module) -> None:
    raise KeyError("a table of values")


def _on_first_rank(module: nn.Module) -> None:
    if dist.get_rank() == 0:
        raise OSError("no such file")
    _writes(module)


_UNWRITTEN = r"left 'weight', 'bias' without a value.*param_init_fn=\"later\""


@on_ranks(2)
def test_what_nothing_initialised_is_refused_on_every_rank() -> None:
    def refuses(error: type[Exception], pattern: str, build: Any, **options: Any) -> None:
        with pytest.raises(error, match=pattern):
            ZeRO3(on_meta(build), **options)

    empties = operator.methodcaller("to_empty", device="cpu", recurse=False)
    for init in (_nothing, empties, _half):
        for units in (None, {Block}):
            pattern = rf"^stem \(Linear\): param_init_fn {_UNWRITTEN}"
            refuses(ValueError, pattern, Mlp, param_init_fn=init, auto_wrap_policy=units)
    refuses(
        ValueError, r"root module \(_Forgets\): its reset_parameters\(\) left 'scale'", _Forgets
    )
    refuses(KeyError, "a table of values", Mlp, param_init_fn=_raises)
    error, pattern = OSError, "no such file"
    if dist.get_rank() > 0:
        error, pattern = ValueError, f"rank 0 could not initialise the model: OSError: {pattern}"
    refuses(error, pattern, Mlp, param_init_fn=_on_first_rank)
    # Where values come from the first rank, that one alone sees that there are none.
    pattern = rf"stem \(Linear\): param_init_fn {_UNWRITTEN}"
    if dist.get_rank() > 0:
        pattern = f"rank 0 could not initialise the model: ValueError: {pattern}"
    refuses(ValueError, pattern, Mlp, param_init_fn=_nothing, sync_module_states=True)
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(3, device="meta"))
    refuses(ValueError, "no reset_parameters", lambda: module, sync_module_states=True)
    ZeRO3(Mlp())  # and ranks are still in step


@on_ranks(2)
def test_values_that_a_load_brings_are_declared_and_missed(tmp_path: Path) -> None:
    source = ZeRO3(seeded(tables), auto_wrap_policy={Table})
    checkpoint.save(f"{tmp_path}/ours", source)
    dcp.save(source.state_dict(), checkpoint_id=f"{tmp_path}/torchs")
    whole = {name: value.clone() for name, value in seeded(tables).state_dict().items()}
    x = torch.ones(2, WIDTH)
    expected = source(x)

    def by_hand(model: ZeRO3) -> None:
        with torch.no_grad(), model.summon_full_params():
            for name, parameter in model.named_parameters():
                parameter.copy_(whole[name])
        for name, buffer in model.named_buffers():
            buffer.copy_(dict(source.named_buffers())[name])

    def by_torch(model: ZeRO3) -> None:
        state = model.state_dict()
        dcp.load(state, checkpoint_id=f"{tmp_path}/torchs")
        model.load_state_dict(state)

    loads: tuple[Callable[[ZeRO3], object], ...] = (
        lambda model: checkpoint.load(f"{tmp_path}/ours", model),
        lambda model: model.load_state_dict(whole),
        lambda model: checkpoint.set_model_state_dict(model, whole),
        by_torch,
        by_hand,
    )
    for bring in loads:
        model = ZeRO3(on_meta(tables), auto_wrap_policy={Table}, param_init_fn="later")
        with pytest.raises(RuntimeError, match=r"parameter '\S+' has no value yet.*load"):
            model(x)
        bring(model)
        if bring is not by_hand:
            with pytest.raises(
                RuntimeError,
                match=r"'first.angles', which checkpoints omit, has no.*omit it, write its values",
            ):
                model(x)
            for part in (model.first, model.second):
                part.angles.fill_(1)
        assert_bitwise(model(x), expected, "output")
        assert not model._root_state.has_forward_checks
    # A buffer that is cast is missed as well.
    low = MixedPrecision(buffer_dtype=torch.bfloat16)
    model = ZeRO3(on_meta(tables), param_init_fn="later", mixed_precision=low)
    model.load_state_dict(whole)
    with pytest.raises(RuntimeError, match=r"'first.angles', which checkpoints omit, has no"):
        model(x)
    # One shard of one parameter, which one rank has, is missing; also where NaNs have few bits.
    for dtype in (torch.float32, torch.bfloat16):
        plain, x = seeded(Mlp).to(dtype), x.to(dtype)
        module = on_meta().to(dtype)
        model = ZeRO3(module, auto_wrap_policy={Block}, param_init_fn="later")
        state = plain.state_dict()
        some = {name: value for name, value in state.items() if name != "blocks.2.down.bias"}
        model.load_state_dict(some, strict=False)
        outer = ZeRO3(nn.Sequential(model))
        with pytest.raises(RuntimeError, match=r"'0.blocks.2.down.bias' has no value yet"):
            outer(x)
        outer.module[0].load_state_dict(state)
        assert_bitwise(outer(x), plain(x), "output")
