"""Modules from the meta device get values, by functions of either kind, or a clear refusal."""

import copy
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from layerzero import MixedPrecision, ZeRO3
from layerzero.checkpoint import load, save, set_model_state_dict
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.compare import assert_same_values, assert_trains_alike
from tests.harness.models import CASES, WIDTH, Block, Mlp
from tests.harness.ranks import on_ranks
from tests.harness.reference import full_parameters, on_meta, seeded


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


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Table(), Table()
        self.head = nn.Linear(WIDTH, 3)
        self.same = nn.Linear(WIDTH, 3)
        self.same.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        return self.head(y) + self.same(y)


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _writes(module: nn.Module) -> None:
    module.reset_parameters()


def _if_on_meta(module: nn.Module) -> None:
    if any(tensor.is_meta for tensor in _own(module)):
        _always_empties(module)


def _always_empties(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    module.reset_parameters()


def _empties_all_inside(module: nn.Module) -> None:
    module.to_empty(device="cpu")
    module.reset_parameters()


def _empties_all_on_meta(module: nn.Module) -> None:
    if any(parameter.is_meta for parameter in module.parameters()):
        _empties_all_inside(module)


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
    _always_empties(module)


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
    plain = Tables()
    _reset_in_order(plain)
    drawn = torch.rand(3)
    kinds = (None, _writes, _if_on_meta, _always_empties, _empties_all_inside, _empties_all_on_meta)
    settings: list[Any] = [None, {Table}, {Table, Block, nn.Linear}]
    for number, kind in enumerate(kinds):
        module, calls = on_meta(Tables), []

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
    for init in (_empties_all_inside, _empties_all_on_meta):
        for wraps in (False, True):
            model = seeded(Tables)
            model.first.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))
            model.second = on_meta(Table)
            inside = copy.deepcopy(model.first.child)
            if wraps:
                model.first.child = ZeRO3(model.first.child)
            wrapped = ZeRO3(model, auto_wrap_policy={Table}, param_init_fn=init)
            for name, value in inside.named_parameters():
                found = full_parameters(wrapped)[f"first.child.{name}"]
                assert_bitwise(found, value.detach(), f"{init.__name__}, {wraps}: {name}")
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
    source = ZeRO3(seeded(Tables), auto_wrap_policy={Table})
    save(f"{tmp_path}/ours", source)
    dcp.save(source.state_dict(), checkpoint_id=f"{tmp_path}/torchs")
    whole = {name: value.clone() for name, value in seeded(Tables).state_dict().items()}
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
        lambda model: load(f"{tmp_path}/ours", model),
        lambda model: model.load_state_dict(whole),
        lambda model: set_model_state_dict(model, whole),
        by_torch,
        by_hand,
    )
    for bring in loads:
        model = ZeRO3(on_meta(Tables), auto_wrap_policy={Table}, param_init_fn="later")
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
    model = ZeRO3(on_meta(Tables), param_init_fn="later", mixed_precision=low)
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
