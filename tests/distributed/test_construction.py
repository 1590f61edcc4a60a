"""What wrapping leaves of a module: names, values, marks; from which states it can start."""

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import layerzero
from layerzero import ZeRO3
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.compare import assert_same_values, assert_trains_alike, sharded, zero3
from tests.harness.models import (
    CASES,
    WIDTH,
    Block,
    Mlp,
    NoParameters,
    OddShapes,
    Transformer,
    TransformerBlock,
)
from tests.harness.ranks import run_ranks
from tests.harness.reference import (
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_gradients,
    full_parameters,
    seeded,
)

# Names and values ---------------------------------------------------------------------------------


def _names_and_values() -> None:
    for name, case in CASES.items():
        model, plain = sharded(case), seeded(case.build)
        assert _names(model) == _names(plain), name
        assert list(model.state_dict()) == list(plain.state_dict()), name
        assert_same_values(model, plain, what=f"{name}: parameter")
        buffers, expected = dict(model.named_buffers()), dict(plain.named_buffers())
        assert_same_parameters(buffers, expected, what=f"{name}: buffer")
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(own, nn.Parameter) and own.dim() == 1
            assert own.requires_grad == other.requires_grad
            assert own.dtype == other.dtype


def _names(model: nn.Module) -> dict[str, list[str]]:
    return {
        "parameters": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": [name for name, _ in model.named_modules()],
        "children": [name for name, _ in model.named_children()],
    }


@pytest.mark.parametrize("world_size", [1, 3])
def test_names_and_values_are_the_original_ones(world_size: int) -> None:
    run_ranks(world_size, _names_and_values)


def _nested_by_hand() -> None:
    def build() -> nn.Module:
        model = Transformer()
        for index in range(len(model.layers)):
            model.layers[index] = ZeRO3(model.layers[index])
        return model

    model, plain = zero3(build), seeded(Transformer)
    assert _names(model) == _names(plain)
    units = {unit.fqn: unit.num_parameters for unit in layerzero.units(model)}
    by_policy = layerzero.units(zero3(Transformer, TransformerBlock))
    assert units == {unit.fqn: unit.num_parameters for unit in by_policy}
    for name, parameter in model.named_parameters():
        assert parameter.layerzero.fqn == name
    batches = batches_of(CASES["transformer"], dist.get_world_size(), steps=3)
    assert_trains_alike(model, plain, batches)


def test_nested_wrapping_by_hand_is_wrapping_by_policy() -> None:
    run_ranks(2, _nested_by_hand)


def _marks() -> list[tuple[str, tuple[int, ...], tuple[int, int], int]]:
    model = zero3(OddShapes, nn.Sequential)
    return [
        (
            parameter.layerzero.fqn,
            tuple(parameter.layerzero.shape),
            parameter.layerzero.range,
            parameter.numel(),
        )
        for parameter in model.parameters()
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_ranges_of_all_ranks_tile_each_parameter(world_size: int) -> None:
    marks = run_ranks(world_size, _marks)
    for index, (name, parameter) in enumerate(OddShapes().named_parameters()):
        end = 0
        for rank in range(world_size):
            fqn, shape, (start, stop), numel = marks[rank][index]
            assert (fqn, shape) == (name, tuple(parameter.shape))
            assert stop - start == numel
            if numel:
                assert start == end, f"{name}: rank {rank} has [{start}, {stop}) after {end}"
                end = stop
        assert end == parameter.numel(), name


def _shards_are_parts_of_the_value() -> None:
    model, plain = zero3(OddShapes, nn.Sequential), seeded(OddShapes)
    for own, full in zip(model.parameters(), plain.parameters(), strict=True):
        start, stop = own.layerzero.range
        assert_bitwise(own.detach(), full.detach().reshape(-1)[start:stop], own.layerzero.fqn)


def test_a_shard_is_its_range_of_the_flattened_original() -> None:
    run_ranks(3, _shards_are_parts_of_the_value)


def _balanced() -> list[int]:
    model = zero3(Transformer, TransformerBlock)
    return [sum(parameter.numel() for parameter in model.parameters())]


def test_every_rank_has_its_share() -> None:
    sizes = [size for (size,) in run_ranks(4, _balanced)]
    total = sum(parameter.numel() for parameter in Transformer().parameters())
    assert sum(sizes) == total
    # Alignment of each start to 64 bytes may add 15 elements a parameter, and padding a few more.
    slack = 16 * len(list(Transformer().parameters())) / 4 + 64
    assert max(sizes) <= total / 4 + slack


class _Documented(nn.Module):
    """Has a signature, a method, a property and an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.note = "mine"

    @property
    def twice(self) -> int:
        return 2 * WIDTH

    def times_two(self, x: int) -> int:
        return 2 * x

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.layer(x) * scale


def _behaves_like_the_module() -> None:
    model = zero3(_Documented)
    plain = seeded(_Documented)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert list(inspect.signature(type(model).forward).parameters) == ["self", "x", "scale"]
    assert isinstance(model, ZeRO3) and isinstance(model.module, _Documented)
    assert (model.note, model.twice, model.times_two(4)) == ("mine", 2 * WIDTH, 8)
    with pytest.raises(AttributeError):
        _ = model.no_such_thing
    model.eval()
    assert not model.training and not model.module.training and not model.layer.training
    model.train()
    assert model.module.training and model.layer.training


def test_the_wrapper_behaves_like_what_it_wraps() -> None:
    run_ranks(2, _behaves_like_the_module)


def _attributes_of_parameters() -> None:
    def build() -> nn.Module:
        model = Mlp()
        model.blocks[0].up.weight.tensor_model_parallel = True
        model.blocks[0].up.weight.partition_dim = 1
        model.head.weight.shared = True
        return model

    model = zero3(build, Block)
    parameters = dict(model.named_parameters())
    assert parameters["blocks.0.up.weight"].tensor_model_parallel is True
    assert parameters["blocks.0.up.weight"].partition_dim == 1
    assert parameters["head.weight"].shared is True
    assert not hasattr(parameters["blocks.1.up.weight"], "tensor_model_parallel")
    with model.summon_full_params():
        assert dict(model.named_parameters())["head.weight"].shared is True


def test_attributes_of_a_parameter_are_on_its_shard() -> None:
    run_ranks(2, _attributes_of_parameters)


# Where values come from ---------------------------------------------------------------------------


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _reset_parameters() -> None:
    model = _on_meta(Mlp)
    torch.manual_seed(5)
    wrapped = ZeRO3(model, auto_wrap_policy={Block})
    plain = _on_meta(Mlp).to_empty(device="cpu")
    torch.manual_seed(5)
    for module in plain.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    assert_same_values(wrapped, plain)
    assert_trains_alike(wrapped, plain, batches_of(CASES["mlp"], dist.get_world_size(), steps=2))


def test_a_meta_model_is_initialised_by_its_reset_parameters() -> None:
    run_ranks(2, _reset_parameters)


def _fill(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tensor.fill_(0.25)


def _to_empty_and_fill(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    _fill(module)


def _param_init_fn() -> None:
    for init in (_fill, _to_empty_and_fill):
        for case_name in ("odd_shapes", "no_parameters", "transformer", "tied_across_units"):
            case = CASES[case_name]
            calls: list[nn.Module] = []

            def init_and_note(
                module: nn.Module,
                init: Callable[[nn.Module], None] = init,
                calls: list[nn.Module] = calls,
            ) -> None:
                calls.append(module)
                init(module)

            model = _on_meta(case.build)
            with_own = [
                module
                for module in model.modules()
                if [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            ]
            wrapped = ZeRO3(model, auto_wrap_policy=set(case.units), param_init_fn=init_and_note)
            tied = case_name in ("transformer", "tied_across_units")
            if not tied:  # a tied weight is there already when its second module comes
                assert calls == with_own, case_name
            for name, value in full_parameters(wrapped).items():
                assert value.device.type == "cpu" and bool((value == 0.25).all()), name
            for name, buffer in wrapped.named_buffers():
                assert buffer.device.type == "cpu" and bool((buffer == 0.25).all()), name
            assert _names(wrapped) == _names(case.build()), case_name


def test_param_init_fn_is_called_with_each_module_that_has_meta_tensors() -> None:
    run_ranks(2, _param_init_fn)


def _nothing_to_initialise_with() -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        ZeRO3(_on_meta(OddShapes))
    return str(error.value)


def test_a_meta_module_that_cannot_initialise_itself_is_refused_with_its_name() -> None:
    for message in run_ranks(2, _nothing_to_initialise_with):
        assert "param_init_fn" in message
        assert "OddShapes" in message or "blocks.0" in message


def _partly_on_meta() -> None:
    model = seeded(Mlp)
    model.blocks[1] = _on_meta(Block)
    expected = {name: parameter.detach().clone() for name, parameter in _real(model)}
    wrapped = ZeRO3(model, auto_wrap_policy={Block})
    full = full_parameters(wrapped)
    for name, value in expected.items():
        assert_bitwise(full[name], value, name)
    assert all(torch.isfinite(value).all() for value in full.values())


def _real(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [each for each in model.named_parameters() if not each[1].is_meta]


def test_only_what_is_on_meta_is_initialised() -> None:
    run_ranks(2, _partly_on_meta)


def _synchronised(meta_elsewhere: bool) -> None:
    for name in ("mlp", "transformer", "no_parameters", "mixed_dtypes"):
        case = CASES[name]
        if meta_elsewhere and dist.get_rank() > 0:
            model = _on_meta(case.build)
        else:
            torch.manual_seed(dist.get_rank())
            model = case.build()
            for buffer in model.buffers():
                buffer.add_(dist.get_rank())
        wrapped = ZeRO3(model, auto_wrap_policy=set(case.units), sync_module_states=True)
        plain = seeded(case.build, seed=0)
        assert_same_values(wrapped, plain)
        buffers = dict(wrapped.named_buffers())
        assert_same_parameters(buffers, dict(plain.named_buffers()), what=f"{name}: buffer")


@pytest.mark.parametrize("meta_elsewhere", [False, True], ids=["other values", "meta elsewhere"])
def test_sync_module_states_starts_every_rank_from_rank_0(meta_elsewhere: bool) -> None:
    run_ranks(3, _synchronised, meta_elsewhere)


# What is left alone -------------------------------------------------------------------------------


def _ignored_modules() -> None:
    model, plain = seeded(Mlp), seeded(Mlp)
    wrapped = ZeRO3(model, auto_wrap_policy={Block}, ignored_modules=[model.blocks[1], model.head])
    ignored = ("blocks.1.", "head.")
    assert [name for name, _ in wrapped.named_parameters()] == [
        n for n, _ in Mlp().named_parameters()
    ]
    for name, parameter in wrapped.named_parameters():
        if name.startswith(ignored):
            assert parameter.shape == dict(plain.named_parameters())[name].shape
            assert not hasattr(parameter, "layerzero")
        else:
            assert parameter.dim() == 1
    _compare_ignored(wrapped, plain, lambda name: name.startswith(ignored))


def _compare_ignored(model: nn.Module, plain: nn.Module, ignored: Callable[[str], bool]) -> None:
    """Sharded gradients are the mean over ranks, those of ignored parameters the rank's own."""
    step = batches_of(CASES["mlp"], dist.get_world_size(), steps=1)[0]
    forward_backward(model, step[dist.get_rank()])
    own = {name: parameter.grad for name, parameter in model.named_parameters() if ignored(name)}
    sharded_gradients = {n: g for n, g in full_gradients(model).items() if not ignored(n)}
    forward_backward(plain, step[dist.get_rank()])
    local = {name: value for name, value in full_gradients(plain).items() if ignored(name)}
    assert local
    assert_same_parameters(own, local, what="own gradient of")
    plain.zero_grad()
    backward_of_all_ranks(plain, step)
    mean = {name: value for name, value in full_gradients(plain).items() if not ignored(name)}
    assert_same_parameters(sharded_gradients, mean, what="gradient of")


def _ignored_parameters() -> None:
    model, plain = seeded(Mlp), seeded(Mlp)
    chosen = {"blocks.0.up.bias", "head.weight"}
    parameters = [parameter for name, parameter in model.named_parameters() if name in chosen]
    wrapped = ZeRO3(model, auto_wrap_policy={Block}, ignored_parameters=parameters)
    after = dict(wrapped.named_parameters())
    assert [after[name] for name in after if name in chosen] == parameters
    _compare_ignored(wrapped, plain, lambda name: name in chosen)


def test_ignored_modules_are_left_alone() -> None:
    run_ranks(2, _ignored_modules)


def test_ignored_parameters_are_left_alone() -> None:
    run_ranks(2, _ignored_parameters)


class _WithTable(nn.Module):
    """An integer parameter: it can be sharded, though not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, self.table])


def _integers() -> None:
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=2)
    assert_trains_alike(zero3(_WithTable), seeded(_WithTable), batches)


def test_frozen_integer_parameters_are_ordinary() -> None:
    run_ranks(2, _integers)


def _no_parameters_at_all() -> None:
    model = ZeRO3(nn.Sequential(nn.Tanh(), nn.ReLU()))
    batch = torch.randn(2, WIDTH, requires_grad=True)
    model(batch).sum().backward()
    assert batch.grad is not None
    assert list(model.parameters()) == []
    wrapped = zero3(NoParameters, Block, nn.Sequential)
    assert {unit.fqn for unit in layerzero.units(wrapped)} >= {"block"}


def test_a_module_without_parameters_can_be_wrapped() -> None:
    run_ranks(2, _no_parameters_at_all)


# Groups -------------------------------------------------------------------------------------------


def _in_pairs() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    index = dist.get_rank() // 2
    batches = batches_of(CASES["mlp"], 2, steps=3, seed=index)  # each pair has its own
    model = zero3(Mlp, Block, process_group=pairs[index])
    assert_trains_alike(model, seeded(Mlp), batches, group=pairs[index])
    with pytest.raises(ValueError, match=r"rank|group"):
        ZeRO3(Mlp(), process_group=pairs[1 - index])


def test_a_process_group_may_be_part_of_the_world() -> None:
    run_ranks(4, _in_pairs)


def _mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    index = dist.get_rank() // 2
    batches = batches_of(CASES["mlp"], 2, steps=3, seed=index)
    model = zero3(Mlp, Block, process_group=mesh["inner"])
    assert_trains_alike(model, seeded(Mlp), batches, group=mesh["inner"].get_group())
    whole = init_device_mesh("cpu", (4,))
    batches = batches_of(CASES["mlp"], 4, steps=2)
    assert_trains_alike(zero3(Mlp, Block, process_group=whole), seeded(Mlp), batches)


def test_a_one_dimensional_mesh_is_a_group() -> None:
    run_ranks(4, _mesh)


# Refusals -----------------------------------------------------------------------------------------


class _Bad:
    """A wrong argument and what the error has to say."""

    def __init__(self, error: type[Exception], match: str, **options: Any) -> None:
        self.error, self.match, self.options = error, match, options


_BAD_ARGUMENTS = {
    "gradient_reduction": _Bad(ValueError, "gradient_reduction.*max", gradient_reduction="max"),
    "forward_prefetch": _Bad(ValueError, "forward_prefetch.*-1", forward_prefetch=-1),
    "backward_prefetch": _Bad(TypeError, "backward_prefetch", backward_prefetch="pre"),
    "limit in words": _Bad(ValueError, "12 parsecs", limit_all_gathers="12 parsecs"),
    "limit of nothing": _Bad(ValueError, "limit_all_gathers.*0", limit_all_gathers=0),
    "policy of names": _Bad(TypeError, "auto_wrap_policy.*Block", auto_wrap_policy={"Block"}),
    "outer": _Bad(ValueError, "outer.*zero2", outer="zero2"),
    "zero3_size": _Bad(ValueError, "zero3_size.*3", zero3_size=3),
    "accumulation": _Bad(ValueError, "accumulation.*later", accumulation="later"),
    "process_group": _Bad(TypeError, "process_group", process_group="world"),
}


def _refuses_and_stays_usable(name: str) -> None:
    bad = _BAD_ARGUMENTS[name]
    model = seeded(Mlp)
    with pytest.raises(bad.error, match=bad.match):
        ZeRO3(model, **bad.options)
    # Nothing was changed: the module can be wrapped still.
    wrapped = ZeRO3(model, auto_wrap_policy={Block})
    assert_trains_alike(wrapped, seeded(Mlp), batches_of(CASES["mlp"], 2, steps=1))


@pytest.mark.parametrize("name", _BAD_ARGUMENTS)
def test_a_bad_argument_is_refused_before_anything_is_changed(name: str) -> None:
    run_ranks(2, _refuses_and_stays_usable, name)


def _refuses_other_things() -> None:
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got list"):
        ZeRO3([Mlp()])  # type: ignore[arg-type]
    wrapped = zero3(Mlp, Block)
    for module in (wrapped, wrapped.module, wrapped.blocks[0]):
        with pytest.raises(RuntimeError, match="wrapped already"):
            ZeRO3(module)
    assert_trains_alike(wrapped, seeded(Mlp), batches_of(CASES["mlp"], 2, steps=1))


def test_wrapping_twice_and_what_is_no_module_are_refused() -> None:
    run_ranks(2, _refuses_other_things)


def _replaced_data() -> None:
    model = zero3(Mlp, Block)
    parameter = model.blocks[0].up.weight
    kept = parameter.data
    parameter.data = torch.zeros(parameter.numel() + 3)
    with pytest.raises((ValueError, RuntimeError), match=r"blocks\.0\.up\.weight"):
        model(torch.zeros(1, WIDTH))
    parameter.data = kept
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=2)
    assert_trains_alike(model, seeded(Mlp), batches)


def test_data_of_another_shape_after_wrapping_is_refused_with_the_name() -> None:
    run_ranks(2, _replaced_data)


def _kept_data() -> None:
    """Values assigned through `.data` in the shard's shape are the parameter's from then on."""
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=2)
    assert_trains_alike(model, plain, batches)


def test_data_of_the_same_shape_may_be_assigned_after_wrapping() -> None:
    run_ranks(2, _kept_data)


def test_without_torch_distributed_the_error_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ZeRO3(Mlp())


def _peak_from_meta() -> None:
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


def test_from_meta_only_one_unit_is_whole_at_a_time() -> None:
    run_ranks(2, _peak_from_meta)
