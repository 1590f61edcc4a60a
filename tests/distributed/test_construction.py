"""What wrapping leaves of a module: names, values, marks; from which states it can start.

Ranks that construct different models, or refuse to, all raise one line with both values. Ranks that
start from other values are warned; on request those of the first go to all.
"""

import gc
import itertools
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import layerzero
from layerzero import BackwardPrefetch, MixedPrecision, OffloadPolicy, ReductionPolicy, ZeRO3
from layerzero.verify import same_plan
from layerzero.verify.start_values import device_digest, digest
from tests.harness.checks import assert_same_on_all_ranks, assert_same_parameters, error_in_time
from tests.harness.compare import (
    assert_same_values,
    assert_trains_alike,
    sharded,
    warnings_of,
    zero3,
)
from tests.harness.internals import engine_alone, root_state
from tests.harness.models import CASES, WIDTH, Block, Mlp, Parts
from tests.harness.ranks import of_all_ranks, on_ranks
from tests.harness.reference import (
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_gradients,
    full_parameters,
    mlp_batches,
    on_meta,
    seeded,
)


@on_ranks(3)
def test_names_and_values_are_the_original_ones() -> None:
    for name, case in CASES.items():
        model, plain = sharded(case), seeded(case.build)
        assert _names(model) == _names(plain), name
        assert list(model.state_dict()) == list(plain.state_dict()), name
        assert_same_values(model, plain, what=f"{name}: parameter")
        buffers, expected = dict(model.named_buffers()), dict(plain.named_buffers())
        assert_same_parameters(buffers, expected, what=f"{name}: buffer")
        ranges = zip(*of_all_ranks([p.layerzero.range for p in model.parameters()]), strict=True)
        pairs = zip(model.parameters(), plain.named_parameters(), ranges, strict=True)
        for own, (key, other), of_ranks in pairs:
            assert isinstance(own, nn.Parameter) and own.dim() == 1
            assert own.requires_grad == other.requires_grad
            assert own.dtype == other.dtype
            assert (own.layerzero.fqn, own.layerzero.shape) == (key, other.shape)
            parts = [(start, stop) for start, stop in of_ranks if start < stop]
            borders = [0, *(stop for _, stop in parts)]
            assert [*itertools.pairwise(borders)] == parts and borders[-1] == other.numel()
        sharded_params = dict(model.named_parameters())
        with model.summon_full_params():
            assert _names_by_parameter(model) == _names_by_parameter(plain), name
            full = dict(model.named_parameters())
            assert_same_parameters(full, dict(plain.named_parameters()), what=f"{name}: full")
            for key, parameter in full.items():
                assert isinstance(parameter, nn.Parameter), key
                assert parameter.requires_grad == plain.get_parameter(key).requires_grad, key
                assert model.get_parameter(key) is parameter, key
        after = dict(model.named_parameters())
        assert list(after) == list(sharded_params)
        assert all(after[key] is sharded_params[key] for key in sharded_params), name


def _names(model: nn.Module) -> dict[str, list[Any]]:
    return {
        "parameters": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": [name for name, _ in model.named_modules()],
        "children": [name for name, _ in model.named_children()],
        "of one parameter": _names_by_parameter(model),
    }


def _names_by_parameter(model: nn.Module) -> list[list[str]]:
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return list(found.values())


@on_ranks(2)
def test_ignored_modules_and_parameters_are_left_alone() -> None:
    model = seeded(Mlp)
    before = dict(model.named_parameters())
    options = {
        "ignored_modules": [model.blocks[1]],
        "ignored_parameters": [model.blocks[0].up.bias, model.head.weight],
    }
    wrapped = ZeRO3(model, auto_wrap_policy={Block}, **options)
    ignored = ("blocks.1.", "blocks.0.up.bias", "head.weight")
    assert list(dict(wrapped.named_parameters())) == list(before)
    for name, parameter in wrapped.named_parameters():
        assert (parameter is before[name]) == name.startswith(ignored), name
    # Sharded gradients are the mean over ranks, those of ignored parameters the rank's own.
    step = mlp_batches(1)[0]
    local, mean = seeded(Mlp), seeded(Mlp)
    for each in (wrapped, local):
        forward_backward(each, step[dist.get_rank()])
    backward_of_all_ranks(mean, step)
    expected = {
        name: (local if name.startswith(ignored) else mean).get_parameter(name).grad
        for name in before
    }
    assert_same_parameters(full_gradients(wrapped), expected, what="gradient of")


@on_ranks(2)
def test_a_module_without_parameters_can_be_wrapped() -> None:
    model = ZeRO3(nn.Sequential(nn.Tanh(), nn.ReLU()))
    batch = torch.randn(2, WIDTH, requires_grad=True)
    model(batch).sum().backward()
    assert batch.grad is not None and not [*model.parameters()]


@on_ranks(4)
def test_a_process_group_or_an_axis_of_a_mesh_may_be_part_of_the_world() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    index = dist.get_rank() // 2
    batches = batches_of(CASES["mlp"], 2, steps=2, seed=index)  # each pair has its own
    model = zero3(Mlp, Block, process_group=pairs[index])
    assert_trains_alike(model, seeded(Mlp), batches, group=pairs[index])
    with pytest.raises(ValueError, match=f"rank {dist.get_rank()} is not in the group"):
        ZeRO3(Mlp(), process_group=pairs[1 - index])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = zero3(Mlp, Block, process_group=mesh["inner"])
    assert_trains_alike(model, seeded(Mlp), batches, group=mesh["inner"].get_group())
    whole = init_device_mesh("cpu", (4,))
    batches = batches_of(CASES["mlp"], 4, steps=1)
    assert_trains_alike(zero3(Mlp, Block, process_group=whole), seeded(Mlp), batches)


@on_ranks(2)
def test_from_meta_only_one_unit_is_whole_at_a_time() -> None:
    depth, width = 6, 32
    with torch.device("meta"):
        module = nn.Sequential(*(Block(width, width) for _ in range(depth)), nn.Linear(width, 3))
    unit_nbytes = sum(p.numel() * 4 for p in module[0].parameters())
    root_nbytes = sum(p.numel() * 4 for p in module[-1].parameters())
    made: list[weakref.ref[nn.Parameter]] = []
    alive: list[int] = []

    def initialise(part: nn.Module) -> None:
        part.reset_parameters()
        made.extend(weakref.ref(parameter) for parameter in part.parameters(recurse=False))
        alive.append(sum(p.nbytes for reference in made if (p := reference()) is not None))

    gc.disable()  # what only the collector frees would count as well
    try:
        ZeRO3(module, auto_wrap_policy={Block}, param_init_fn=initialise)
    finally:
        gc.enable()
    assert len(alive) == 2 * depth + 1
    assert max(alive) <= unit_nbytes + root_nbytes


LIMIT_S = 3.0
"""Seconds in which every rank raises, whatever the timeout."""

Build = Callable[[], nn.Module]


def nothing(module: nn.Module) -> None:
    """A `param_init_fn`."""


class Other(Block):
    """A block with other code and the same parameters."""


class Named(Mlp):
    """The same modules under a root of another class."""


def tied() -> nn.Module:
    module = Mlp(2)
    module.blocks[1].up.weight = module.blocks[0].up.weight
    return module


def swapped() -> nn.Module:
    module = Mlp(2)
    module.blocks[0], module.head = module.head, module.blocks[0]
    return module


def changed(change: Callable[[nn.Module], Any]) -> Build:
    def build() -> nn.Module:
        module = Mlp(2)
        change(module)
        return module

    return build


def by_name(module: nn.Module, fqn: str) -> dict[str, Any] | bool:
    return {"reshard_after_forward": False} if fqn == "blocks.0" else isinstance(module, Block)


POLICY = {"auto_wrap_policy": {Block}}
ARGUMENTS: list[tuple[dict[str, Any], str, str]] = [
    # An argument of one rank; what the message says of it; and of the others.
    ({"zero3_size": 1}, "zero3_size=1", "zero3_size="),
    (
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, keep_float32=(Block,))},
        "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, keep_float32=(Block))",
        "mixed_precision=MixedPrecision()",
    ),
    ({"forward_prefetch": False}, "forward_prefetch=0", "forward_prefetch=1"),
    ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, "=BackwardPrefetch.", "BACKWARD_PRE"),
    ({"offload": OffloadPolicy(params=True)}, "offload=OffloadPolicy(params=True)", "Policy()"),
    ({"param_init_fn": nothing}, "param_init_fn=a function", "param_init_fn=None"),
    ({"accumulation": "sharded"}, "accumulation='sharded'", "accumulation='auto'"),
    ({"reduction": ReductionPolicy(separate_groups=True)}, "groups=True", "separate_groups=False"),
    ({"timeout": timedelta(hours=1)}, "seconds=3600", "timeout=None"),
    ({"auto_wrap_policy": {nn.Linear}}, " in ", " in "),
    ({"auto_wrap_policy": by_name}, "after_forward=False in blocks.0", "True in blocks.0"),
]
MODULES: list[tuple[Build, str, str]] = [
    (lambda: Mlp(3), "blocks.2.", "no other parameter"),
    (changed(lambda m: setattr(m, "head", nn.Linear(WIDTH, 4))), "'head.weight' [4, 5]", "[3, 5]"),
    (changed(lambda m: m.head.double()), "torch.float64", "torch.float32"),
    (changed(lambda m: m.blocks[1].requires_grad_(False)), "frozen in blocks.1", "trainable"),
    (tied, "tied to 'blocks.1.up.weight'", "'blocks.0.up.weight'"),
    (swapped, "'blocks.0.", "'blocks.0."),
    (changed(lambda m: m.blocks.__setitem__(0, Other())), "of class Other", "of class Block"),
    (changed(lambda m: m.add_module("act", nn.ReLU())), "'act' of class ReLU", "no other module"),
    (lambda: Named(2), "a Named as root", "a Mlp as root"),
    (changed(lambda m: m.register_buffer("table", torch.zeros(3))), "'table' [3]", "no other buf"),
]


def in_step(run: Callable[[], object], error: type[Exception] = ValueError) -> str:
    """The message with which `run` is refused, on every rank and soon after the last one calls."""
    dist.barrier()
    message = error_in_time(run, LIMIT_S, error)
    assert "\n" not in message
    return message


@on_ranks(2, timeout=200.0)
def test_every_difference_is_named_on_every_rank() -> None:
    is_odd = dist.get_rank() == 1

    def check(run: Callable[[], object], own: str, other: str) -> str:
        message = in_step(run)
        assert "differ between" in message and own in message and other in message, message
        assert "rank 1 has" in message and "where rank 0 has" in message
        return message

    for options, own, other in ARGUMENTS:
        given = POLICY | (options if is_odd else {})
        check(lambda given=given: ZeRO3(Mlp(2), **given), own, other)
    for build, own, other in MODULES:
        module = build() if is_odd else Mlp(2)
        check(lambda module=module: ZeRO3(module, **POLICY), own, other)
    larger = nn.Linear(2 + is_odd, 4)
    message = check(lambda: ZeRO3(larger, sync_module_states=True), "'weight' [4, 3]", "[4, 2]")
    assert "ZeRO3: parameters differ between ranks" in message
    assert "give every rank the same" in message
    for of, version in ((same_plan, same_plan.__version__), (torch, torch.__version__)):
        with mock.patch.object(of, "__version__", "9.9.9" if is_odd else version):
            check(lambda: ZeRO3(Mlp(2)), " 9.9.9", f" {version}")
    # Around nested wrappers, and in what is wrapped again.
    nested = Mlp(2)
    nested.blocks[0] = ZeRO3(nested.blocks[0])
    if is_odd:
        nested.head = nn.Linear(WIDTH, 4)
    check(lambda: ZeRO3(nested), "'head.weight' [4, 5]", "[3, 5]")
    model = ZeRO3(Mlp(2), **POLICY)
    if is_odd:
        model.module.blocks.append(Block())
    check(lambda: layerzero.rewrap(model), "blocks.2.", "no other parameter")
    # All ranks are still in step.
    model = ZeRO3(Mlp(2), **POLICY)
    model(torch.ones(2, WIDTH)).sum().backward()


def hooked() -> nn.Module:
    module = Mlp(2)
    module.head.weight.register_hook(lambda grad: grad)
    return module


def wide() -> nn.Module:
    module = Mlp(2).bfloat16()
    module.head.weight.grad_dtype = torch.float32
    return module


@on_ranks(2)
def test_what_one_rank_refuses_is_raised_on_every_rank() -> None:
    is_odd = dist.get_rank() == 1
    cases: list[tuple[Build, dict[str, Any], str, str]] = [
        (Mlp, {"outer": "zero2"}, "ValueError", "outer: expected"),
        (Mlp, {"sharding_strategy": 1}, "TypeError", "sharding_strategy"),
        (Mlp, {"device": "cuda:99"}, "", "parameters go to cuda:99"),
        (hooked, {}, "ValueError", "has hooks"),
        (wide, {}, "ValueError", "has grad_dtype torch.float32"),
        (lambda: [Mlp()], {}, "TypeError", "got list"),
        (lambda: nn.LazyLinear(3), {}, "ValueError", "has no shape yet"),
    ]
    for build, options, error, text in cases:
        module, given = (build(), options) if is_odd else (Mlp(), {})
        kinds: Any = (ValueError, TypeError) if is_odd else ValueError
        message = in_step(lambda module=module, given=given: ZeRO3(module, **given), kinds)
        assert text in message, message
        assert is_odd or ("rank 1 refused" in message and error in message), message
    # A meta module without initialisation there, and values here.
    module = Mlp(2)
    module.own = nn.Parameter(torch.empty(3, device="meta" if is_odd else "cpu"))
    message = in_step(lambda: ZeRO3(module))
    assert "on the meta device and no reset_parameters()" in message, message
    ZeRO3(Mlp(2))


@on_ranks(4)
def test_layered_groups_agree_and_what_may_differ_is_allowed() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    rank = dist.get_rank()
    message = in_step(lambda: ZeRO3(Mlp(2), mesh, deterministic=rank == 3))
    assert "rank 3 has deterministic=True, where rank 0 has deterministic=False" in message
    message = in_step(lambda: ZeRO3(Mlp(2), mesh, outer="replicate" if rank == 3 else "zero1"))
    assert "rank 3 has outer='replicate', where rank 0 has outer='zero1'" in message
    message = in_step(lambda: ZeRO3(Mlp(2 + (rank == 0)), mesh))
    assert "ranks 1, 2, 3 have" in message and "where rank 0 has" in message
    message = in_step(lambda: ZeRO3(Mlp(2), mesh, outer="zero2" if rank == 2 else "zero1"))
    assert "outer: expected" in message
    # What may differ: devices' memory, initialisers of ranks that get the first rank's values.
    module = on_meta(depth=2) if rank else Mlp(2)
    init = (lambda module: module.to_empty(device="cpu", recurse=False)) if rank else None
    ZeRO3(module, mesh, sync_module_states=True, param_init_fn=init)


def _changed(name: str, *ranks: int) -> nn.Module:
    """An Mlp with a buffer, where some ranks have one element of one tensor otherwise."""
    module = seeded(Mlp)
    module.blocks[1].register_buffer("order", torch.arange(6))
    if name and dist.get_rank() in ranks:
        tensor = dict(module.named_parameters()) | dict(module.named_buffers())
        tensor[name].data.view(-1)[-2:] = tensor[name].data.view(-1)[-2:].flip(0).clone()
    return module


@on_ranks(3)
def test_ranks_that_start_from_other_values_warn_on_the_first() -> None:
    rank = dist.get_rank()
    told = {"equal": warnings_of(_changed("", 0, 1, 2), auto_wrap_policy={Block})}
    torch.manual_seed(rank)
    told["seeds"] = warnings_of(Mlp(), auto_wrap_policy={Block})
    told["element"] = warnings_of(_changed("blocks.1.up.bias", 2), auto_wrap_policy={Block})
    told["first rank"] = warnings_of(_changed("head.weight", 0), zero3_size=1, outer="replicate")
    told["buffer"] = warnings_of(_changed("blocks.1.order", 1))
    torch.manual_seed(rank)
    told["synchronised"] = warnings_of(Mlp(), sync_module_states=True)
    torch.manual_seed(rank // 2)
    told["meta"] = warnings_of(on_meta(), auto_wrap_policy={Block})
    told["later"] = warnings_of(on_meta(), param_init_fn="later")
    first, *others = of_all_ranks(told)
    assert not any(any(each.values()) for each in others)
    start = {name: each[0] for name, each in first.items() if each}
    assert start.keys() == {"seeds", "element", "first rank", "buffer", "meta"}
    assert start["seeds"].startswith(
        "parameter 'blocks.0.up.weight' differs between ranks: on ranks 1, 2 its values are "
        "not those of the first rank of the group (15 of 15 parameters"
    )
    assert "pass sync_module_states=True" in start["seeds"]
    assert "'blocks.1.up.bias' differs between ranks: on rank 2 its" in start["element"]
    assert "1 of 16 parameters" in start["element"]
    assert "'head.weight' differs between ranks: on ranks 1, 2" in start["first rank"]
    assert start["buffer"].startswith("buffer 'blocks.1.order' differs between ranks: on rank 1")
    assert "'blocks.0.up.weight' differs between ranks: on rank 2" in start["meta"]


def of_dtensors(mesh: Any, value: float) -> nn.Module:
    whole, local = torch.arange(24.0).view(6, 4), torch.full((3,), value)
    return Parts(
        split=nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])),
        copied=nn.Parameter(distribute_tensor(whole, mesh, [Replicate()])),
        table=nn.Buffer(DTensor.from_local(local, mesh, [Replicate()], run_check=False)),
    )


@on_ranks(4)
def test_parts_of_dtensors_are_compared_and_synchronised_along_their_group() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    told = warnings_of(of_dtensors(mesh["tp"], 1.0), mesh["dp"])
    assert not told, "local parts are compared along their own data-parallel group"
    module = of_dtensors(mesh["tp"], float(dist.get_rank()))
    model = ZeRO3(module, mesh["dp"], sync_module_states=True)
    table = model.table.to_local()
    assert isinstance(model.table, DTensor)
    assert table.tolist() == [float(mesh["tp"].get_local_rank())] * 3, "of its first dp rank"
    # Two data-parallel groups, each with a first rank.
    module = of_dtensors(mesh["tp"], float(mesh["dp"].get_local_rank()))
    for rank, told in enumerate(of_all_ranks(warnings_of(module, mesh["dp"]))):
        assert [each[:14] for each in told] == ["buffer 'table'"] * (rank < 2)


@on_ranks(4)
def test_experts_are_compared_within_their_group() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    number = mesh["ep"].get_local_rank()

    def build(value: float) -> nn.Module:
        module = nn.Module()
        module.dense = nn.Parameter(torch.ones(4))
        module.experts = nn.ModuleDict({str(number): nn.Linear(4, 4)})
        for parameter in module.experts.parameters():
            nn.init.constant_(parameter, value)
        return module

    def choose(module: nn.Module, fqn: str) -> Any:
        return {"process_group": mesh["edp"]} if fqn == f"experts.{number}" else False

    assert not warnings_of(build(number), auto_wrap_policy=choose), (
        "compared with the same expert alone"
    )
    first, *others = of_all_ranks(warnings_of(build(dist.get_rank()), auto_wrap_policy=choose))
    assert not any(others)
    assert "parameter 'experts.0.weight' differs between ranks: on rank 2" in first[0]
    # Dense parameters are sent by rank 0, experts by the first rank that has them.
    model = ZeRO3(build(dist.get_rank()), auto_wrap_policy=choose, sync_module_states=True)
    values = full_parameters(model)
    assert values.pop("dense").eq(1).all()
    assert all(value.eq(number).all() for value in values.values())


def odd() -> nn.Module:
    """Values that not every backend sends: strided ones, bits, small floats and complex ones."""
    return Parts(
        turned=nn.Parameter(torch.randn(5, 3).t()),
        empty=nn.Parameter(torch.empty(0, 4)),
        wave=nn.Parameter(torch.randn(4, dtype=torch.complex64)),
        turned_too=nn.Buffer(torch.randn(4, 6)[:, ::2]),
        mask=nn.Buffer(torch.rand(7) > 0.5),
        small=nn.Buffer(torch.randn(7).to(torch.float8_e4m3fn)),
        short=nn.Buffer(torch.randint(99, (), dtype=torch.int16)),
        narrow=nn.Buffer(torch.randn(3).bfloat16()),
    )


@on_ranks(3)
def test_values_of_every_kind_go_from_the_first_rank_to_all_also_to_modules_on_meta() -> None:
    torch.manual_seed(dist.get_rank())
    model = ZeRO3(odd(), sync_module_states=True)
    torch.manual_seed(0)
    first = odd()
    for name, buffer in model.named_buffers():
        assert_same_on_all_ranks(buffer.contiguous().view(-1).view(torch.uint8), name)
        assert torch.equal(buffer.float(), dict(first.named_buffers())[name].float()), name
    for name, value in full_parameters(model).items():
        assert torch.equal(value, dict(first.named_parameters())[name]), name
    with torch.device("meta" if dist.get_rank() else "cpu"):
        module = _changed("blocks.1.order", 0)
    model = ZeRO3(module, auto_wrap_policy={Block}, sync_module_states=True)
    assert_same_values(model, seeded(Mlp))
    assert model.blocks[1].order.tolist() == [0, 1, 2, 3, 5, 4]


@pytest.mark.parametrize("take", [digest, lambda value: int(device_digest(value))])
def test_a_digest_sees_every_bit_and_its_place(take: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        seen = set()
        for index in (None, 0, 7, 299, 300):
            value = torch.zeros(301, dtype=dtype)
            if index is not None:
                value[index] = 1
            seen.add(take(value))
        assert len(seen) == 5, dtype
    swapped = torch.arange(301.0)
    before = take(swapped)
    swapped[[5, 9]] = swapped[[9, 5]]
    assert take(swapped) != before
    assert take(torch.zeros(301)) != take(-torch.zeros(301))


@on_ranks(2)
def test_the_engine_alone_trains_to_the_same_bits() -> None:
    """With no feature and an empty list of extensions; they change nothing of a plain step."""
    settings = (
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
        {"zero3_size": 1, "accumulation": "sharded"},
        {"outer": "replicate", "zero3_size": 1, "layout": "rows"},
        {"offload": OffloadPolicy(params=True)},
    )
    for name in ("mlp", "transformer", "tied_across_units", "repeated_module", "frozen_parts"):
        case = CASES[name]
        for given in ({}, *(settings if name == "mlp" else ())):
            modules = seeded(case.build), seeded(case.build)
            policy = set(case.units) or None
            root = engine_alone(modules[0], auto_wrap_policy=policy, **given)
            assert not root.extensions.of(object)
            whole = ZeRO3(modules[1], auto_wrap_policy=policy, **given)
            for module, own in zip(modules, (root, root_state(whole)), strict=True):
                optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
                for batches in batches_of(case, 2, 2):
                    with own.reducer.syncing(False):
                        forward_backward(module, batches[dist.get_rank()])
                    forward_backward(module, batches[dist.get_rank()])
                    optimizer.step()
                    optimizer.zero_grad()
            pairs = zip(modules[0].parameters(), modules[1].parameters(), strict=True)
            assert all(torch.equal(*pair) for pair in pairs), (name, given)
