"""Bad input is refused before the first collective: what, where, expected, what to do. A choice
that has no effect is warned of once, and a log says what was sharded, and how, on one rank at INFO,
and of each turn of a unit at DEBUG."""

import contextlib
import functools
import gc
import logging
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

import layerzero
from layerzero import MixedPrecision, ShardingPlan, ZeRO3, shard_with_plan, units
from layerzero.checkpoint import ParameterShard
from layerzero.guards import argument_warnings
from tests.harness.checks import assert_same_on_all_ranks
from tests.harness.compare import assert_same_values, assert_trains_alike, warnings_of, zero3
from tests.harness.internals import Extension, root_state
from tests.harness.models import WIDTH, Block, Mlp, Parts, TiedAcrossUnits, loss_of
from tests.harness.ranks import of_all_ranks, on_ranks
from tests.harness.recording import logged
from tests.harness.reference import backward_of_all_ranks, forward_backward, mlp_batches, seeded


def refuses(error: type[Exception], pattern: str, module: nn.Module | None = None, **options):
    with pytest.raises(error, match=pattern):
        ZeRO3(Mlp() if module is None else module, **options)


class _Elsewhere(nn.Parameter):
    """A parameter that says it is on an accelerator: there is none here."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


@on_ranks(2)
def test_a_module_on_two_devices_is_refused() -> None:
    module = Mlp()
    module.head.weight = _Elsewhere(torch.zeros(3, WIDTH))
    refuses(
        ValueError,
        rf"rank {dist.get_rank()}: parameters need one device, got "
        r"cpu \('stem\.weight'\) and cuda:0 \('head\.weight'\); move the module first",
        module,
        auto_wrap_policy={Block},
    )
    assert isinstance(module.stem.weight, nn.Parameter)
    assert module.stem.weight.shape == (WIDTH, WIDTH), "nothing was changed before the refusal"


class _Trained(nn.Parameter):
    """torch refuses an integer parameter that requires grad; a subclass may still claim it."""

    @property
    def requires_grad(self) -> bool:
        return True


@on_ranks(2)
def test_an_integer_parameter_that_requires_grad_is_refused() -> None:
    module = Mlp()
    module.codes = _Trained(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    refuses(
        ValueError,
        rf"rank {dist.get_rank()}\): parameter 'codes' has dtype torch.int64 and requires grad; "
        r"expected a floating-point dtype",
        module,
    )


MATRIX = torch.arange(64.0).view(8, 8)
SHARED: dict[str, tuple[Tensor, Tensor]] = {
    "the same": (MATRIX, MATRIX),
    "a part": (MATRIX, MATRIX[2:3, 4:6]),
    "columns": (MATRIX[:, :5], MATRIX[:, 4:]),
    "one element": (MATRIX[0, :1].expand(8), MATRIX[:, 0]),
}
APART: dict[str, tuple[Tensor, ...]] = {
    "rows": tuple(MATRIX),
    "no elements": (MATRIX[:0], MATRIX[:0], MATRIX),
    "no memory": (torch.empty(3, device="meta"), torch.empty(3, device="meta")),
}


def _with(*tensors: Tensor) -> nn.Module:
    """An Mlp with parameters over the memory of `tensors`; all but the first are frozen."""
    module = Mlp()
    for index, tensor in enumerate(tensors):
        setattr(module, f"over_{index}", nn.Parameter(tensor, requires_grad=not index))
    return module


@on_ranks(2)
def test_two_parameters_over_one_memory_are_refused() -> None:
    for tensors in SHARED.values():
        for ignored in ((), ("over_0",), ("over_1",)):
            module = _with(*tensors)
            before = dict(module.named_parameters())
            refuses(
                ValueError,
                r"'over_[01]' and 'over_[01]' are two Parameters over the same memory.*tied",
                module,
                ignored_parameters=[before[name] for name in ignored],
            )
            assert dict(module.named_parameters()).items() == before.items(), "nothing was changed"
        module = _with(*tensors)
        ZeRO3(module, ignored_parameters=[module.over_0.requires_grad_(False), module.over_1])
    for tensors in APART.values():
        ZeRO3(_with(*tensors), param_init_fn="later")
    ZeRO3(nn.LSTM(4, 4, 2))
    late = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    late[1].weight.data = late[0].weight.data
    is_shared = dist.get_rank() == 0
    said = "" if is_shared else "rank 0 refused the module or an argument of ZeRO3: ValueError: "
    refuses(ValueError, f"{said}parameters '0.weight' and '1.weight'", late if is_shared else Mlp())


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale


COMPILERS = [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 8))]


@on_ranks(2)
def test_a_scripted_module_is_refused_if_it_has_parameters_to_shard() -> None:
    for to_script in COMPILERS:
        part = to_script(nn.Linear(8, 8))
        where = r"parameter '1\.weight' is in a scripted or traced module.*ignored_modules"
        refuses(ValueError, where, nn.Sequential(nn.Linear(8, 8), part))
        frozen = to_script(nn.Linear(8, 8).requires_grad_(False))
        module = nn.Sequential(nn.Linear(8, 8), to_script(_Scaled()), frozen)
        model = ZeRO3(module, auto_wrap_policy={nn.Linear}, ignored_modules=[frozen])
        model(torch.randn(2, 8)).sum().backward()


def test_torch_distributed_must_be_initialised() -> None:
    assert not dist.is_initialized()
    refuses(RuntimeError, "init_process_group")


@on_ranks(2)
def test_data_of_another_shape_or_dtype_is_refused_and_of_the_same_taken_over() -> None:
    torch.manual_seed(0)
    model = ZeRO3(Mlp(), auto_wrap_policy={Block})
    parameter = next(p for n, p in model.named_parameters() if n == "blocks.1.up.weight")
    x = torch.randn(2, WIDTH)
    numel = parameter.numel()
    parameter.data = torch.zeros(numel + 1)
    with pytest.raises(ValueError, match=r"blocks\.1 \(rank \d\).*'blocks.1.up.weight'.*expected"):
        model(x)
    parameter.data = torch.zeros(numel)
    model(x)
    with model.summon_full_params():
        whole = dict(model.named_parameters())["blocks.1.up.weight"]
        assert not whole.any(), "a replaced tensor of the right shape is taken over"


@on_ranks(2)
def test_an_optimizer_that_trained_before_wrapping_is_refused() -> None:
    module = Mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loss_of(module(torch.ones(2, WIDTH))).backward()
    optimizer.step()
    model = ZeRO3(module)
    with pytest.raises(RuntimeError, match=r"built before wrapping and has state.*stem\.weight"):
        optimizer.step()
    del optimizer
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = Mlp()
        kept = list(module.parameters())
        model = ZeRO3(module)
        torch.optim.SGD(model.parameters(), lr=0.1)
        assert kept


@on_ranks(2)
def test_an_optimizer_built_before_wrapping_trains_the_wrapped_model() -> None:
    models: list[nn.Module] = [seeded(TiedAcrossUnits) for _ in range(2)]
    optimizers = []
    for each in models:
        halves = ([*each.parameters()][k::2] for k in (0, 1))
        groups = [{"params": half, "lr": lr} for half, lr in zip(halves, (0.1, 0.05), strict=True)]
        optimizers.append(torch.optim.SGD(groups, momentum=0.9))
    models[0] = ZeRO3(models[0], auto_wrap_policy={Block})
    for step in mlp_batches():
        forward_backward(models[0], step[dist.get_rank()])
        backward_of_all_ranks(models[1], step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(*models)
    own = {p for group in optimizers[0].param_groups for p in group["params"]}
    assert own == {*models[0].parameters()}
    state = next(iter(optimizers[0].state_dict()["state"].values()))
    assert isinstance(state["momentum_buffer"], ParameterShard)


def _keeps_its_own(how: str) -> nn.Module:
    """A parameter that the forward reads from a list, as DARTS does, or from a closure."""
    scale = nn.Parameter(torch.ones(WIDTH))
    read = {"list": lambda own: own.kept[0], "closure": lambda _: scale}[how]
    run = lambda own, x: own.layer(x) * read(own)  # noqa: E731
    return Parts(run, layer=nn.Linear(WIDTH, WIDTH), scale=scale, kept=[scale])


@on_ranks(2)
def test_a_gradient_for_a_parameter_of_before_wrapping_is_refused() -> None:
    for how in ("list", "closure"):
        model = ZeRO3(_keeps_its_own(how), auto_wrap_policy={nn.Linear})
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        for _ in range(2):  # Each time, and nothing is left behind.
            with pytest.raises(RuntimeError, match=r"gradient of 'scale' as it was before wrap"):
                loss_of(model(torch.ones(2, WIDTH))).backward()
            assert all(parameter.grad is None for parameter in model.parameters())


@on_ranks(2)
def test_calls_at_the_wrong_time_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a ZeRO3 module, got Mlp"):
        units(Mlp())
    model = ZeRO3(Mlp())
    with pytest.raises(ValueError, match="has no method 'generate'"):
        layerzero.register_forward_method(model, "generate")
    with pytest.raises(ValueError, match="Mlp is not a unit"):
        layerzero.register_forward_method(Mlp(), "forward")
    with model.summon_full_params():
        with pytest.raises(RuntimeError, match="the gradients would not be reduced"):
            model(torch.randn(2, WIDTH))
        with torch.no_grad():
            model(torch.randn(2, WIDTH))
    model.module.register_forward_pre_hook(lambda *_: model.reduce_gradients())
    with pytest.raises(RuntimeError, match="inside forward or backward"):
        model(torch.randn(2, WIDTH))


class Blok(nn.Module):
    pass


@on_ranks(2)
def test_a_choice_without_effect_warns_once_on_the_first_rank() -> None:
    told = {
        "class": warnings_of(Mlp(), auto_wrap_policy={Blok}),
        "again": warnings_of(Mlp(), auto_wrap_policy={Blok}),
        "one of two": warnings_of(Mlp(), auto_wrap_policy={Block, nn.Conv2d}),
        "torch's": warnings_of(Mlp(), auto_wrap_policy=ModuleWrapPolicy({nn.Conv1d})),
        "function": warnings_of(Mlp(), auto_wrap_policy=lambda module, fqn: fqn == "blocks.17"),
        "size": warnings_of(Mlp(), auto_wrap_policy=size_based_auto_wrap_policy),
        "float32": warnings_of(
            Mlp(),
            auto_wrap_policy={Block},
            mixed_precision=MixedPrecision(
                param_dtype=torch.bfloat16, keep_float32=[nn.Linear, Blok]
            ),
        ),
        "batch norm by default": warnings_of(
            Mlp(),
            auto_wrap_policy={Block},
            mixed_precision=fsdp.MixedPrecision(param_dtype=torch.bfloat16),
        ),
        "itself": warnings_of(Block(), auto_wrap_policy={Block}),
    }
    missing = functools.partial(argument_warnings.missing_kernels, torch.device("xpu"))
    with mock.patch.object(argument_warnings, "missing_kernels", lambda _: missing()):
        told["kernels"] = warnings_of(Mlp(), auto_wrap_policy={Block})
        told["kernels again"] = warnings_of(Mlp(), auto_wrap_policy={Block})
    model = Mlp()
    told["trained"] = warnings_of(model, ignored_modules=[model.blocks[1]])
    model = Mlp()
    model.blocks.requires_grad_(False)
    told["frozen"] = warnings_of(model, ignored_modules=model.blocks)
    first, second = of_all_ranks(told)
    assert not any(second.values()), second
    assert "auto_wrap_policy: no module of the model is a Blok" in first["class"][0]
    assert "auto_wrap_policy: no module of the model is a Conv2d" in first["one of two"][0]
    assert "Conv1d" in first["torch's"][0]
    assert "selected no module inside the Mlp" in first["function"][0]
    assert "selected no module inside the Mlp" in first["size"][0]
    assert "keep_float32: no module of the model is a Blok" in first["float32"][0]
    assert "4 ignored parameters require grad, such as 'blocks.1.up.weight'" in first["trained"][0]
    assert "no kernels of layerzero for device type 'xpu'" in first["kernels"][0]
    silent = ("again", "kernels again", "batch norm by default", "itself", "frozen")
    assert {name: len(each) for name, each in first.items()} == {
        name: int(name not in silent) for name in first
    }


@on_ranks(2)
def test_torchs_arguments_mean_what_they_mean_there() -> None:
    """A unit inside does not cast what comes in: as in FSDP1 `cast_forward_inputs` says so."""
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    blocks = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    for casts in (False, True):
        model = zero3(
            lambda: Parts(_widen, block=Block()),
            auto_wrap_policy=blocks,
            backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_POST,
            mixed_precision=fsdp.MixedPrecision(**half, cast_forward_inputs=casts),
        )
        with nullcontext() if casts else pytest.raises(RuntimeError, match="dtype"):
            model(torch.ones(2, WIDTH)).sum().backward()


def _widen(own: nn.Module, x: Tensor) -> Tensor:
    assert x.dtype == torch.bfloat16, "the root casts its inputs"
    return own.block(x.float())


@on_ranks(2)
def test_a_list_that_nobody_can_call_is_no_unit() -> None:
    model = Mlp()
    for refused, policy in (
        (model, {nn.ModuleList}),
        (model, lambda module, fqn: fqn == "blocks"),
        (model.blocks, None),
        (nn.ModuleDict({"a": Block()}), None),
        (nn.ParameterList([torch.zeros(3)]), None),
        (nn.Sequential(nn.ParameterDict({"a": torch.zeros(3)})), {nn.ParameterDict}),
    ):
        with pytest.raises(
            ValueError, match=r"a (Module|Parameter)(List|Dict) has no forward.*make"
        ):
            ZeRO3(refused, auto_wrap_policy=policy)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = ZeRO3(block)
    # A list all of whose members are units owns nothing, and they may be called by themselves.
    blocks = ZeRO3(model.blocks)
    blocks.module[0](torch.ones(1, WIDTH)).sum().backward()

    class Called(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            return functools.reduce(lambda y, block: block(y), self, x)

    listed = zero3(lambda: nn.Sequential(Called(Block() for _ in range(2))), Called)
    plain = seeded(lambda: nn.Sequential(Called(Block() for _ in range(2))))
    assert_trains_alike(listed, plain, mlp_batches())


def _model() -> nn.Module:
    head = nn.Linear(WIDTH, 3, bias=False).requires_grad_(False)
    layers = nn.Sequential(*(Block() for _ in range(14)))
    return Parts(layers=layers, norm=nn.LayerNorm(WIDTH), head=head)


@on_ranks(2)
def test_the_log_tells_what_was_made() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_float32=(nn.LayerNorm,))
    plan = ShardingPlan(
        apply_modules={"layers.{*}": {}, "norm": {"reshard_after_forward": False}},
        param_dtype="bfloat16",
        num_to_forward_prefetch=2,
    )
    with logged("layerzero") as texts:
        model = ZeRO3(_model(), auto_wrap_policy={Block}, mixed_precision=precision)
        model(torch.ones(2, WIDTH)).sum().backward()
        model = shard_with_plan(_model(), plan)
    with logged("layerzero") as alone:
        assert "1 unit of Linear" in repr(ZeRO3(nn.Linear(2, 2)))
    assert all("1 unit of Linear on cpu" in line for line in alone)
    with logged("layerzero", logging.DEBUG) as turns:
        # The first forward records the order, along which the second prefetches.
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
    for action in ("prefetch", "unshard", "wait_for_unshard", "reshard", "reduce"):
        assert f"LayerZeRO3.{action}(layers.3)" in turns
    assert_same_on_all_ranks(turns, "turns")
    if dist.get_rank() > 0:
        assert texts == [], "one rank speaks"
        return
    text, of_plan = texts
    for part in (
        "15 units of Parts on cpu",
        "units: the root unit, layers.0, layers.1",
        "layers.6 and 7 more",
        "group of 2, gloo",
        "MixedPrecision(param_dtype=torch.bfloat16, keep_float32=(LayerNorm))",
    ):
        assert part in text, (part, text)
    assert "16 units of Parts" in of_plan


def _mean(_: object, gradient: Tensor, chunk: Tensor) -> None:
    dist.all_reduce(gradient)
    chunk.copy_(gradient.chunk(2)[dist.get_rank()] / 2)


@on_ranks(2)
def test_a_right_program_is_silent_with_all_guards_and_every_extension() -> None:
    """And they change no bit of what it trains to."""
    programs: list[dict[str, Any]] = [
        {},
        {"arena": True, "verify": "always", "on_nonfinite": "skip"},
        {"memory_budget": "1GB", "verify": "sampled", "on_nonfinite": "raise"},
        {"arena": True, "on_nonfinite": "skip"},
        {"optional_mean": "participants"},
    ]
    names: set[str] = set()
    weights: list[list[Tensor]] = []
    with warnings.catch_warnings(), logged("layerzero", logging.WARNING) as records:
        warnings.simplefilter("error")
        for number, given in enumerate(programs):
            module = seeded(Mlp)
            optional = [module.blocks[1]] if given else []
            model = ZeRO3(module, auto_wrap_policy={Block}, optional_modules=optional, **given)
            if number == 3:
                model.register_comm_hook(None, _mean)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            extensions, steps_itself = root_state(model).extensions, number == 4
            model.step_in_backward(optimizer if steps_itself else None)
            with contextlib.ExitStack() as around:
                if given:
                    around.enter_context(layerzero.ledger(model))
                if given and not steps_itself:
                    around.enter_context(layerzero.join(model, optimizer))
                for step, batches in enumerate(mlp_batches(9)):
                    if step == 8:  # The second rank has no batch left.
                        weights.append([each.detach().clone() for each in model.parameters()])
                        if given and not steps_itself and dist.get_rank():
                            break
                    names |= {type(each).__name__ for each in extensions.of(Extension)}
                    forward_backward(model, batches[dist.get_rank()])
                    names |= {type(each).__name__ for each in extensions.of(Extension)}
                    if not steps_itself:
                        model.clip_grad_norm_(1e9)
                        optimizer.step()
                    optimizer.zero_grad()
    assert not records
    for own in weights[1:]:
        assert all(torch.equal(*pair) for pair in zip(own, weights[0], strict=True))
    package = Path(layerzero.__file__).parent
    texts = (path.read_text() for path in package.rglob("*.py"))
    every = {name for text in texts for name in re.findall(r"class (\w+)\(.*\bExtension\)", text)}
    met = set().union(*of_all_ranks(names))
    until_built = {"_Always", "SamePlan", "StartValues", "OptionalModules", "Experts"}
    of_others = {"Recording", "_Moments"}  # Of devices with graphs, of a memory plan.
    assert every - met == until_built | of_others
