"""Shard on the meta device, `to_empty`, draw values: what ranks hold is what one process would."""

import functools
import gc
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
from layerzero import OffloadPolicy, ZeRO3, checkpoint, fully_shard
from layerzero.optim import AdamW, WholeTensorOptimizer
from tests.harness.checks import assert_bitwise, assert_norm, assert_same_parameters
from tests.harness.ranks import on_ranks
from tests.harness.reference import full_gradients, full_parameters, on_meta

WIDTH = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
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
        self.embed = nn.Embedding(37, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 37)
        self.tied = nn.Linear(WIDTH, 37)
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
    return ZeRO3(model, auto_wrap_policy={Block}, param_init_fn="later", **options)


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
def test_modules_are_emptied_and_drawn_one_after_the_other() -> None:
    def draw(model: nn.Module, empties: bool) -> None:
        torch.manual_seed(5)
        for part in model.modules():
            if callable(getattr(part, "reset_parameters", None)):
                if empties:
                    part.to_empty(device="cpu", recurse=False)
                part.reset_parameters()
        for block in model.blocks:
            nn.init.ones_(block.scale)

    expected = Titan()
    draw(expected, empties=False)
    for way, shard in WAYS.items():
        module = on_meta(Titan)
        module.table = torch.arange(4.0)
        expected.table = module.table
        model = shard(module)
        draw(model, empties=True)
        assert_bitwise(model(_tokens()), expected(_tokens()), way)


class Adapted(nn.Module):
    """As torchtune's layers: a table is written, and each adapter inside is emptied and drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, 1, bias=False) for _ in range(3))
        self.register_buffer("table", torch.arange(float(WIDTH)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x) + self.table
        return torch.stack([adapter(y) for adapter in self.adapters])


@on_ranks(2)
def test_modules_of_one_unit_that_are_emptied_in_turn_keep_what_was_drawn() -> None:
    expected = Adapted()
    torch.manual_seed(5)
    expected.base.reset_parameters()
    for adapter in expected.adapters:
        adapter.reset_parameters()
    for draws_late in (False, True):
        for shard in (fully_shard, lambda module: ZeRO3(module, param_init_fn="later")):
            model: Any = shard(on_meta(Adapted))
            torch.manual_seed(5)
            model.base.to_empty(device="cpu")
            model.base.reset_parameters()
            model.table = torch.arange(float(WIDTH))
            for adapter in model.adapters:
                adapter.to_empty(device="cpu")
                if not draws_late:
                    adapter.reset_parameters()
            for adapter in model.adapters if draws_late else ():
                adapter.reset_parameters()
            batch = torch.arange(24.0).view(2, WIDTH)
            assert_bitwise(model(batch), expected(batch), f"draws late: {draws_late}")


@on_ranks(2)
def test_a_module_that_is_emptied_again_has_no_value() -> None:
    for find in (lambda model: model.adapters[1], lambda model: model.adapters):
        model: Any = fully_shard(on_meta(Adapted)).to_empty(device="cpu")
        model.table = torch.arange(float(WIDTH))
        for part in (model.base, *model.adapters):
            part.reset_parameters()
        drawn = full_parameters(model)
        model._apply(lambda tensor: torch.empty_like(tensor).copy_(tensor))
        assert_same_parameters(full_parameters(model), drawn)
        find(model).to_empty(device="cpu")
        assert model.adapters[1].weight.shape == (1, WIDTH)
        with pytest.raises(RuntimeError, match=r"'adapters\..\.weight' has no value yet"):
            model(torch.zeros(2, WIDTH))


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
    assert up.shape == (3 * WIDTH, WIDTH)
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
    model.head.weight = nn.Parameter(torch.ones(37, WIDTH))
    model.tied.weight = nn.Parameter(torch.ones(37, WIDTH))
    model(_tokens())  # Other values of the same shape are taken over.
    assert_bitwise(full_parameters(model)["head.weight"].detach(), torch.ones(37, WIDTH))
    model = _drawn(_emptied())
    model.head.weight = nn.Parameter(torch.ones(3, WIDTH))
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
    # Block by block, as where a pipeline stage draws its own.
    model.table = torch.arange(4.0)
    _drawn(model.to_empty(device="cpu"), seed=2)
    _drawn(model.blocks[1].to_empty(device="cpu"), seed=3)
    block = _drawn(Block(), seed=3)
    found = full_parameters(model)
    for name, value in full_parameters(block).items():
        assert_bitwise(found[f"blocks.1.{name}"], value, name)
