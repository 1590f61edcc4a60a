"""What plain torch allows and sharding would drop in silence is refused, or told once."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import layerzero
from layerzero import MixedPrecision, MixedPrecisionPolicy, ZeRO3, notices
from tests.harness.checks import assert_same_parameters, recorded_warnings
from tests.harness.compare import trained_alike, zero3
from tests.harness.models import WIDTH, Block, Mlp, Parts, Transformer
from tests.harness.ranks import on_ranks
from tests.harness.reference import after_an_evaluation, full_gradients, on_meta, own_batch, seeded


class Writes(nn.Module):
    """Changes a parameter in its forward, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(4, WIDTH, max_norm=0.1 if how == "max_norm" else None)
        self.codes = nn.Parameter(torch.zeros(2, WIDTH), requires_grad=how == "replaced")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            with torch.no_grad():
                self.linear.weight.clamp_(-0.01, 0.01)
        elif self.how == "data":
            self.codes.data.copy_(x[:2].detach())
        elif self.how == "other data":  # MoCo; a clamp may leave all values as they are at first.
            self.codes.data = self.codes.data.clamp(max=1.0)
        elif self.how == "replaced":
            self.codes = nn.Parameter(self.codes * 0.5 + 1)
        row = self.table(torch.tensor([1]))
        return self.linear(x) + self.codes.mean() + row


def _writes(how: str, name: str, verb: str) -> None:
    model = zero3(lambda: Writes(how))
    before = [sharded_param.detach().clone() for sharded_param in model.parameters()]
    with pytest.raises(RuntimeError, match=rf"the forward {verb}.*{name!r}.*summon_full_params"):
        model(own_batch())
    assert all(map(torch.equal, before, model.parameters()))
    model.module.how = "nothing"
    model.module.table.max_norm = None
    model(own_batch()).sum().backward()  # the error left the model as it was
    assert model.module.linear.weight.grad is not None


def _acts_later() -> None:
    """A clamp that leaves all values as they are in the first forwards, of BLIP's temperature."""
    model = zero3(lambda: Writes("in place"))
    with model.summon_full_params(), torch.no_grad():
        model.module.linear.weight.clamp_(-0.01, 0.01)
    for _ in range(2):
        model(own_batch()).sum().backward()
    with torch.no_grad():
        model.linear.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"wrote into.*'linear\.weight'"):
        model(own_batch())


@on_ranks(2)
def test_a_forward_that_changes_its_parameters_is_refused() -> None:
    _writes("in place", "linear.weight", "wrote into")
    _writes("max_norm", "table.weight", "wrote into")
    _writes("data", "codes", "wrote into")
    _writes("other data", "codes", "wrote into")
    _writes("replaced", "codes", "replaced")
    _acts_later()


def _replaces(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    own.block.up.weight = nn.Parameter(torch.zeros_like(own.block.up.weight))
    return own.block(x)


@on_ranks(2)
def test_a_forward_that_replaces_a_parameter_of_a_unit_that_it_calls_is_refused() -> None:
    model = zero3(lambda: Parts(_replaces, block=Block()), Block)
    before = [*model.parameters()]
    for use in (model, torch.no_grad()(model)):
        with pytest.raises(RuntimeError, match=r"the forward replaced 'block.up.weight'"):
            use(own_batch())
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    model.block.up.weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"unshard: .* replaced block.up.weight"):
        model.unshard()


class _AddsHalf(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 0.5


class _Parametrizes(Block):
    """As peft does for fused experts: `set_` of the weight to itself is no write."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self.up, "weight", _AddsHalf())
        try:
            return super().forward(x)
        finally:
            parametrize.remove_parametrizations(self.up, "weight", leave_parametrized=False)


class _Flattens(Block):
    """As `rnn.flatten_parameters()` does with cuDNN: weights are `set_` into one buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.set_(parameter.detach().clone())
        return super().forward(x)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_parameters_that_a_forward_sets_elsewhere_follow_the_weights(world_size: int) -> None:
    trained_alike(lambda: nn.Sequential(_Flattens(), Block()), Block)


@on_ranks(2)
def test_a_parametrization_that_comes_and_goes_in_a_forward_writes_nothing() -> None:
    def build() -> nn.Module:
        return nn.Sequential(_Parametrizes(), Block())

    trained_alike(build, Block, run=after_an_evaluation)


@on_ranks(1)
def test_on_one_rank_parameters_are_whole_and_may_be_changed() -> None:
    model = zero3(lambda: Writes("in place"))
    model(own_batch())
    assert model.module.linear.weight.abs().max() <= 0.01


@on_ranks(2)
def test_gradients_that_came_another_way_are_refused_at_the_next_forward() -> None:
    model = zero3(Mlp, Block)
    kept: list[torch.Tensor] = []
    hook = model.module.stem.register_forward_hook(lambda *each: kept.append(each[2]))
    model(own_batch())
    kept[0].sum().backward()
    with pytest.raises(RuntimeError, match=r"gradients of 'stem\.weight'.*return that"):
        model(own_batch())
    hook.remove()
    model(own_batch()).sum().backward()
    expected = zero3(Mlp, Block)
    expected(own_batch()).sum().backward()
    found = full_gradients(model)
    assert_same_parameters(found, full_gradients(expected), what="not what was dropped: gradient")


def _of_eighths() -> nn.Linear:
    """Sums of its weights are exact."""
    linear = nn.Linear(8, 8)
    linear.load_state_dict({k: (8 * v).round() / 8 for k, v in linear.state_dict().items()})
    return linear


def _penalty(of: Callable[[Any], Tensor]) -> tuple[list[str], bool]:
    model, plain = zero3(_of_eighths), seeded(_of_eighths)  # each rank has a part of the weight
    with recorded_warnings() as told:
        for each, number in itertools.product((model, plain), range(3)):
            penalty = sum(of(p) for p in each.parameters())
            with model.no_sync() if number < 2 else contextlib.nullcontext():
                (each(torch.ones(3, 8)).sum() + 0.5 * penalty).backward()
    gradients = full_gradients(model)
    is_right = all(torch.equal(gradients[name], p.grad) for name, p in plain.named_parameters())
    return told, is_right


@on_ranks(2)
def test_a_penalty_on_shards_that_is_wrong_warns_on_the_first_rank() -> None:
    """That of a norm is wrong, an L2 penalty is right, in each micro-batch; any of the whole is."""
    told, is_right = _penalty(lambda p: p.norm())
    assert not is_right and len(told) == int(dist.get_rank() == 0)
    for text in told:
        assert "was used outside the forward of its unit" in text and "wrong for norms" in text
    assert _penalty(lambda p: p.square().sum())[1]
    assert _penalty(lambda p: getattr(p, "full_tensor", lambda: p)().sum().square())[1]


@on_ranks(2)
def test_gradients_of_shards_with_hooks_warn_of_nothing() -> None:
    model = zero3(Mlp, Block)
    for sharded_param in model.parameters():
        sharded_param.register_hook(lambda gradient: gradient * 2)
    with recorded_warnings() as told:
        model(own_batch()).sum().backward()
    assert not told


def _initialised(through_data: bool, options: dict[str, object]) -> list[str]:
    """Warnings of the first two steps of a model that is initialised after it was wrapped. Each
    rank has more of each weight than torch draws one by one."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(24, 24, bias=place > 0) for place in range(3)))

    model, x = zero3(build, nn.Linear, **options), torch.ones(3, 24)
    torch.manual_seed(1)
    with mock.patch.object(notices, "_issued", set()), recorded_warnings() as told:
        for module in model.module:
            nn.init.normal_(module.weight.data if through_data else module.weight)
        with torch.no_grad():
            model(x)  # An evaluation before does not count as the first forward.
        for _ in range(2):
            model(x).sum().backward()
    return told


@on_ranks(2)
def test_equal_numbers_drawn_for_unequal_parts_warn_once() -> None:
    """In all modes that split the weights."""
    low = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
    alone, replicas = ({"zero3_size": 1, "outer": outer} for outer in ("shard", "replicate"))
    for options in ({}, low, alone, replicas):
        for through_data in (False, True):
            told = _initialised(through_data, options)
            warns = options is not replicas and dist.get_rank() == 0
            assert len(told) == warns, (through_data, options, told)
            for text in told:
                assert "begin with the same numbers" in text and "summon_full_params" in text


def regular() -> nn.Module:
    """Values that a program has on purpose: copies, equal rows, and rows that rise."""
    expert = torch.randn(24, 24)
    eight_bits = expert.to(torch.float8_e4m3fn)  # In which torch draws nothing.
    return Parts(
        lambda own, x: x @ (own.fused.mean(0) + sum(own.experts) + own.steps + own.ramp),
        fused=nn.Parameter(expert.repeat(8, 1, 1)),
        experts=nn.ParameterList(expert.clone() for _ in range(5)),
        steps=nn.Parameter(torch.arange(24.0).repeat(24, 1)),
        ramp=nn.Parameter(torch.linspace(0, 1, 576).view(24, 24)),
        frozen=nn.Parameter(eight_bits, requires_grad=False),
    )


def _drawn_into_shards(
    how: str, is_reversed: bool = False, dtype: torch.dtype | None = None
) -> list[str]:
    """Warnings of the first training forward: meta device, shard, values, without `to_empty`."""
    build = regular if how == "regular" else lambda: Transformer(tied=False)
    full = seeded(build).state_dict()
    model = on_meta(build)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*getattr(model, "layers", ()), model):
        layerzero.fully_shard(module, mp_policy=policy)
    torch.manual_seed(1 + (dist.get_rank() if how == "other seeds" else 0))
    modules = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding, nn.RMSNorm))]
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
        if how == "loaded":  # What another run has drawn, there too with one seed on all ranks.
            for value in full.values():
                value.normal_(generator=torch.Generator().manual_seed(1))
            model.load_state_dict(full)
        elif how == "regular":
            for name, shard in model.state_dict().items():
                shard.copy_(full[name])
        elif how == "full":
            with model.summon_full_params():
                for module in modules:
                    module.reset_parameters()
        else:
            for module in reversed(modules) if is_reversed else modules:
                if isinstance(module, nn.Linear) and how.endswith("_"):
                    getattr(nn.init, how)(module.weight)
                else:
                    module.reset_parameters()
    x = torch.ones(3, 24, dtype=torch.float32 if how == "regular" else torch.int64)
    with mock.patch.object(notices, "_issued", set()), recorded_warnings() as told:
        model(x).sum().backward()
    return told


@on_ranks(3)
def test_equal_numbers_are_noticed_whatever_is_drawn_in_which_order() -> None:
    """Scales that differ with shapes, numbers that are drawn again, and two kinds of them."""
    draws = ("reset", "xavier_uniform_", "kaiming_normal_", "trunc_normal_")
    cases: list[tuple[Any, ...]] = [(how, flag) for how in draws for flag in (False, True)]
    cases += [(how, True, torch.bfloat16) for how in draws]
    for case in (*cases, *((how,) for how in ("other seeds", "full", "loaded", "regular"))):
        told = _drawn_into_shards(*case)
        assert len(told) == (case[0] in draws and dist.get_rank() == 0), (case, told)
        assert all("begin with the same numbers" in text for text in told)


@on_ranks(2)
def test_engines_that_would_mix_up_shards_are_refused() -> None:
    model = zero3(Mlp, Block)
    sharded_params = list(model.parameters())
    with pytest.raises(TypeError, match=r"ZeroRedundancyOptimizer was given.*torch\.optim\.AdamW"):
        ZeroRedundancyOptimizer(sharded_params, torch.optim.SGD, lr=0.1)
    # Of equal sizes on both ranks, or torch finds out itself.
    inside = nn.Sequential(ZeRO3(nn.Linear(8, 8, bias=False)), nn.Linear(8, 1))
    around = DistributedDataParallel(inside)
    with pytest.raises(RuntimeError, match="remove DistributedDataParallel"):
        around(torch.ones(3, 8))
    for sharded in (inside[0], layerzero.fully_shard(nn.Linear(8, 8, bias=False))):
        with pytest.raises(RuntimeError, match="DistributedDataParallel is not needed"):
            DistributedDataParallel(sharded)  # as fabric.setup does
    inside = nn.Sequential(ZeRO3(nn.Linear(8, 8, bias=False)), nn.Linear(8, 1))
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(inside, ["0.weight"])
    around = DistributedDataParallel(inside)
    around(torch.ones(3, 8)).sum().backward()
    assert inside[0].weight.grad is not None and inside[1].weight.grad is not None
    with pytest.raises(ValueError, match=r"1 is a DistributedDataParallel.*put its \.module in"):
        ZeRO3(nn.Sequential(nn.Linear(8, 8), DistributedDataParallel(nn.Linear(8, 1))))
    with pytest.raises(NotImplementedError, match=r"torch\.func transforms"):
        torch.func.vmap(model)(own_batch())


@on_ranks(2)
def test_the_scaler_of_torch_warns_once() -> None:
    for kind in (torch.amp.GradScaler, layerzero.GradScaler):
        model = zero3(Mlp, Block)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = kind("cpu")
        with recorded_warnings() as told:
            for _ in range(2):
                scaler.scale(model(own_batch()).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        assert len(told) == (kind is torch.amp.GradScaler and dist.get_rank() == 0), told
        assert all("use layerzero.GradScaler" in text for text in told)
