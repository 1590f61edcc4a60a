"""A forward call is an object: several may wait for their backward, in any order. And uses that
broke once: each test is the program that showed it."""

import itertools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from layerzero import MixedPrecision, ZeRO3, units
from layerzero.optim import AdamW, WholeTensorOptimizer
from tests.harness.checks import HAS_FMA, assert_bitwise, assert_same_on_all_ranks, named
from tests.harness.compare import (
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    sharded,
    trained_alike,
    zero3,
)
from tests.harness.internals import inner_units
from tests.harness.models import CASES, WIDTH, Block, Mlp, Parts, loss_of
from tests.harness.ranks import on_ranks
from tests.harness.recording import observed, recorded_operations
from tests.harness.reference import (
    OPTIMIZERS,
    RunFn,
    after_an_evaluation,
    backward_of,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    in_turn,
    micro_batches_of,
    mlp_batches,
    on_meta,
    own_batch,
    seeded,
    train_rank,
)


def run_backward_with_freed_outputs(model: nn.Module, micro_batches: Sequence[Tensor]) -> Tensor:
    """As pipeline schedules do it: the output's memory is freed, then autograd's engine is run."""
    losses, outputs, gradients = [], [], []
    for batch in micro_batches:
        output = model(batch)
        unsharded = output.detach().requires_grad_()
        loss = loss_of(unsharded)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(unsharded.grad)
        output.data = torch.empty(1)
        outputs.append(output)
    for output, gradient in zip(outputs, gradients, strict=True):
        Variable._execution_engine.run_backward(
            tensors=(output,),
            grad_tensors=(gradient,),
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    return torch.stack(losses)


@on_ranks(2)
def test_micro_batches_of_a_pipeline_give_the_summed_gradient() -> None:
    for name, options in (
        ("repeated_module", {}),
        ("unused_parts", {"reshard_after_forward": False}),
        ("tied_in_unit", {}),
    ):
        case = CASES[name]
        batches = micro_batches_of(case, dist.get_world_size(), steps=2, count=3)
        with named(name):
            # Each backward is reduced on its own: sums over ranks come first.
            how = {"run": run_backward_with_freed_outputs, "reference_run": in_turn}
            model, reference = sharded(case, **options), seeded(case.build)
            assert_trains_alike(model, reference, batches, regrouped=True, **how)


def _moco(assigns: bool) -> nn.Module:
    """Its forward writes the weights of a second encoder, from those of the first alone: the one
    process beside runs it for the batch of each rank."""

    def run(own: Any, x: Tensor) -> Tensor:
        query = own.first(x)
        with torch.no_grad():
            for new, old in zip(own.first.parameters(), own.second.parameters(), strict=True):
                if assigns:
                    old.data = new.data * 0.5
                else:
                    old.data.copy_(new.data).mul_(0.5)
            key = own.second(x)
        return query * key

    first, second = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())
    return Parts(run, first=first, second=second.requires_grad_(False))


@pytest.mark.parametrize("assigns", [False, True])
@on_ranks(2)
def test_a_forward_may_write_the_weights_of_a_momentum_encoder(assigns: bool) -> None:
    for options in ({}, {"zero3_size": 1}):
        trained_alike(partial(_moco, assigns), Block, **options)


_BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _over_one_trunk() -> nn.ModuleList:
    """Three models over one trunk; two heads are no unit of their own."""
    trunk = nn.Sequential(Block(), Block())
    heads = (nn.Linear(WIDTH, 3), Block(), nn.Linear(WIDTH, 2))
    return nn.ModuleList(nn.Sequential(trunk, head) for head in heads)


def _trained(models: Sequence[nn.Module], wrapper: ZeRO3) -> dict[str, list[Tensor]]:
    """Each by an optimizer of its own: in turn, in one backward, and with one micro-batch kept."""
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in models]
    batches = [torch.randn(2, WIDTH) + dist.get_rank() for _ in range(4)]
    seen: dict[str, list[Tensor]] = {"losses": [], "norms": [], "weights": []}

    def backward(loss: Tensor) -> None:
        seen["losses"].append(loss.detach())
        loss.backward()

    def step(index: int) -> None:
        clip = torch.nn.utils.clip_grad_norm_
        seen["norms"].append(clip(models[index].parameters(), 0.1))
        optimizers[index].step()
        optimizers[index].zero_grad()

    for batch in batches[:2]:
        for index, model in enumerate(models):
            backward(loss_of(model(batch)))
            step(index)
    backward(sum(loss_of(model(batches[2])) for model in models))
    with wrapper.no_sync():
        backward(loss_of(models[0](batches[3])))
    with torch.no_grad():
        models[2](batches[3])
    backward(loss_of(models[1](batches[3])))
    for index in range(len(models)):
        step(index)
    seen["weights"] = [p.detach().clone() for model in models for p in model.parameters()]
    return seen


@on_ranks(2)
def test_models_over_one_trunk_train_as_parts_of_one_model() -> None:
    for wraps_trunk, options in ((True, {}), (False, {"mixed_precision": _BF16})):
        torch.manual_seed(0)
        parts = _over_one_trunk()
        if wraps_trunk:
            trunk = ZeRO3(parts[0][0], auto_wrap_policy={Block}, **options)
            for part in parts:
                part[0] = trunk
        models = [ZeRO3(part, auto_wrap_policy={Block}, **options) for part in parts]
        torch.manual_seed(0)
        whole = ZeRO3(_over_one_trunk(), auto_wrap_policy={Block, nn.Sequential}, **options)
        torch.manual_seed(dist.get_rank())
        ours = _trained(models, models[0])
        torch.manual_seed(dist.get_rank())
        for name, expected in _trained(list(whole.module), whole).items():
            for number, (a, b) in enumerate(zip(ours[name], expected, strict=True)):
                assert_bitwise(a, b, f"{name} {number}, {wraps_trunk=}")


@on_ranks(2)
def test_models_over_one_trunk_live_and_fail_apart() -> None:
    parts, x = _over_one_trunk(), torch.ones(2, WIDTH)
    first = ZeRO3(parts[0], auto_wrap_policy={Block})
    with pytest.raises(ValueError, match=r"same accumulation|same reduction.*expected"):
        ZeRO3(parts[1], auto_wrap_policy={Block}, accumulation="sharded")
    with pytest.raises(ValueError, match=r"shares '0.0' with .*same forward_prefetch"):
        ZeRO3(parts[1], auto_wrap_policy={Block}, forward_prefetch=False)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    first.step_in_backward(optimizer)
    with pytest.raises(NotImplementedError, match=r"units can .*step_in_backward"):
        ZeRO3(parts[1], auto_wrap_policy={Block})
    first.step_in_backward(None)
    before, expected = list(first.parameters()), first(x).detach()
    second = ZeRO3(parts[1], auto_wrap_policy={Block})
    assert all(map(operator.is_, first.parameters(), before)), "optimizers keep theirs"
    assert list(first.state_dict()) == [name for name, _ in parts[0].named_parameters()]
    with pytest.raises(RuntimeError, match="shape"):
        second(torch.ones(2, WIDTH + 1))
    for model in (first, second):
        loss_of(model(x)).backward()
    assert_bitwise(first(x).detach(), expected, "a forward beside another model")
    del first
    loss_of(second(x)).backward()
    third = ZeRO3(parts[2], auto_wrap_policy={Block})
    del second
    loss_of(third(x)).backward()
    with pytest.raises(RuntimeError, match="is wrapped already"):
        ZeRO3(parts[2])
    trunk = ZeRO3(nn.Sequential(Block(), Block()), auto_wrap_policy={Block})
    before = nn.Sequential(trunk, nn.Linear(WIDTH, 3))  # It lives on, and its wrapper does not.
    ZeRO3(before)(x)
    after = ZeRO3(nn.Sequential(trunk, Block()))
    loss_of(after(x)).backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks(2)
def test_a_whole_model_may_be_recomputed(use_reentrant: bool) -> None:
    """Parts of models are by random models; the reentrant one needs an input that requires grad."""

    def loss_of_recomputed(model: nn.Module, batch: Tensor) -> Tensor:
        batch = batch.clone().requires_grad_()
        return checkpoint(model, batch, use_reentrant=use_reentrant).square().sum()

    trained_alike(Mlp, Block, run=backward_of(loss_of_recomputed))


@on_ranks(2)
def test_a_graph_that_one_rank_still_holds_changes_no_order() -> None:
    model = zero3(Mlp, Block)
    kept = model(own_batch(9)).sum() if dist.get_rank() == 0 else model(own_batch(9)).sum().detach()
    orders = []
    for step in range(3):
        with recorded_operations(model) as operations:
            model(own_batch(step)).sum().backward()
        orders.append([(operation.verb, operation.unit) for operation in operations])
    assert kept.numel() == 1
    assert_same_on_all_ranks(orders)
    assert orders[1] == orders[2], "an old graph stands in the way of one backward at the most"


class ForceField(Mlp):
    """Differentiates its own energy inside its forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = super().forward(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy.sum() + force.square().sum()


def _penalty_alone(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss of slopes alone (WGAN-GP): no output of the model has a gradient in its backward."""
    x = batch.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = slope.square().sum()
    loss.backward()
    return loss.detach()


def _penalty_waits(model: nn.Module, batch: Tensor) -> Tensor:
    with model.no_sync() if isinstance(model, ZeRO3) else nullcontext():
        _penalty_alone(model, batch)
    return forward_backward(model, batch)


@on_ranks(2)
@pytest.mark.parametrize("run", [_penalty_alone, _penalty_waits])
def test_a_loss_of_gradients_alone_trains(run: RunFn) -> None:
    for wrapped in ([], [Block], [nn.Linear]):
        trained_alike(Mlp, *wrapped, run=run)


class Sloped(Block):
    """Adds its slope; called again, that ends at what its first call returned."""

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.clone().requires_grad_()
        y = super().forward(x)
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def _two_in_flight(model: nn.Module, batch: Tensor) -> Tensor:
    losses = [loss_of(model(batch)), loss_of(model(batch * 2))]
    for loss in losses:
        loss.backward()
    return torch.stack(losses).sum().detach()


@on_ranks(2)
def test_gradients_inside_a_forward_train_a_force_field() -> None:
    trained_alike(ForceField, Block, run=backward_of(lambda model, batch: model(batch)))
    for build in (
        lambda: nn.Sequential(*[Sloped()] * 2),
        lambda: nn.Sequential(Sloped(), Sloped()),
    ):
        trained_alike(build, Sloped, run=_two_in_flight, regrouped=True)


class Stage(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(3)))


@on_ranks(2)
def test_units_inside_units_inside_units_are_prefetched_too() -> None:
    model = zero3(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Stage(), Stage()), Stage, Block)
    ahead: dict[str, list[str]] = {}
    for unit in inner_units(model):

        def note(*_: object, unit=unit) -> None:
            ahead[unit.fqn] = [u.fqn for u in units(model) if u.state.name == "GATHERING"]

        unit.module.register_forward_pre_hook(note)
    with torch.no_grad():
        for _ in range(2):
            model(own_batch())
    assert (ahead["1"], ahead["1.2"], ahead["1.3"]) == (["1.1"], ["1.3"], ["2"])


@on_ranks(2)
def test_a_unit_that_stays_float32_gets_its_input_as_it_is() -> None:
    model = ZeRO3(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)),
        auto_wrap_policy={nn.LayerNorm},
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, keep_float32=(nn.LayerNorm,)),
    )
    seen = []
    norm = model.module[1]
    norm.register_forward_hook(lambda _, args, __: seen.append(args[0].dtype))
    norm(own_batch())
    assert seen == [torch.float32], "its input is not rounded on the way in"
    with pytest.raises(RuntimeError, match="normalized_shape"), torch.no_grad():
        norm(torch.ones(3, WIDTH + 1))
    for _ in range(2):  # A leftover of the failed call would be taken for this one's.
        assert model(own_batch()).dtype == torch.bfloat16


@on_ranks(2)
def test_a_rank_may_drop_the_model_as_soon_as_its_forward_returned() -> None:
    model = zero3(Block)
    # The peer has all it needs long before the first rank asks for its part.
    delay_s = 0.2 if dist.get_rank() == 0 else 0.0
    with observed(dist.ProcessGroup, "recv", lambda *_, **__: time.sleep(delay_s)):
        output = model(own_batch())
    assert torch.equal(output, seeded(Block)(own_batch()))


class OwnHook(Block):
    """Hooks its own output, and reads its weight in the hook."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient + 0.0 * self.up.weight.sum())
        return y


class EnablesGrad(Block):
    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Maps(Block):
    def forward(self, x: Mapping[str, Tensor]) -> Tensor:
        return super().forward(x["x"])


class ReadsNumbers(Block):
    """`numpy()` of a weight, which may outlive the forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.up.weight.detach().numpy()
        return super().forward(x) * float(self.seen[0, 0] == self.up.weight[0, 0])


def top(build: type[Block]) -> nn.Module:
    def run(own: Any, x: Tensor) -> Tensor:
        return own.second(own.first(MappingProxyType({"x": x}) if build is Maps else x))

    return Parts(run, first=build(), second=Block())


@on_ranks(2)
def test_blocks_do_what_torch_allows_with_hooks_modes_and_numbers() -> None:
    steps = mlp_batches()
    for build in (OwnHook, EnablesGrad, Maps, ReadsNumbers):
        for options in ({}, {"zero3_size": 1}):
            given = {"batches": steps, "run": after_an_evaluation, **options}
            trained_alike(partial(top, build), Block, **given)
    # Where the full buffer is a copy in another dtype that lives for a step.
    losses = []
    for build in (Block, ReadsNumbers):
        wide = MixedPrecision(param_dtype=torch.float64)
        model = zero3(partial(top, build), Block, zero3_size=1, mixed_precision=wide)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses += train_rank(model, optimizer, steps, dist.get_rank())
    assert losses[: len(steps)] == losses[len(steps) :]


@on_ranks(2)
def test_a_functional_call_with_other_tensors_names_what_works() -> None:
    model, x = zero3(Mlp, Block), own_batch()
    whole = {name: torch.randn(p.layerzero.shape) for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="functional_call takes a copy of the module"):
        functional_call(model, whole, x)
    expected = functional_call(on_meta(), whole, x)
    with model.summon_full_params(), torch.no_grad():
        assert_bitwise(functional_call(model, whole, x), expected.detach(), "summoned")


def _evaluated_elsewhere(model: nn.Module, batch: Tensor) -> Tensor:
    """With other weights, as those of an average, which are put back."""
    kept = [(parameter, parameter.data) for parameter in model.parameters()]
    for parameter, data in kept:
        parameter.data = 0.3 * data
    with torch.no_grad():
        output = model(batch)
    for parameter, data in kept:
        parameter.data = data
    return output


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_weights_that_are_swapped_amid_a_step_come_back(world_size: int) -> None:
    """Between steps random models do."""
    first, second, other = (step[0] for step in batches_of(CASES["mlp"], 1, steps=3))
    sgd, fused = OPTIMIZERS["sgd_momentum"], partial(torch.optim.AdamW, fused=True)
    cases: list[tuple[Any, Any, dict[str, object]]] = [
        (sgd, sgd, {"zero3_size": 1}),
        (sgd, sgd, {"zero3_size": 1, "outer": "replicate"}),
        (sgd, sgd, {"accumulation": "unsharded"}),
        *[(AdamW, fused, {})] * HAS_FMA,
    ]
    for build, plain_build, options in cases:
        models = zero3(Mlp, Block, **options), seeded(Mlp)
        optimizers = [
            make(m.parameters()) for make, m in zip((build, plain_build), models, strict=True)
        ]
        for step in range(3):
            outputs = []
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                with model.no_sync() if model is models[0] else nullcontext():
                    loss_of(model(first)).backward()
                outputs.append(_evaluated_elsewhere(model, other))
                loss = loss_of(model(second))
                outputs.append(_evaluated_elsewhere(model, other))
                loss.backward()
                optimizer.step()
            for own, expected in zip(outputs[:2], outputs[2:], strict=True):
                assert_bitwise(own, expected, f"{options}, output in step {step}")
            assert_same_values(*models)


@on_ranks(2)
def test_weights_assigned_amid_a_step_are_noticed_by_a_rank_without_any_of_them() -> None:
    """A unit that is full between micro-batches is gathered again by all ranks, or by none."""
    linear, batch = partial(nn.Linear, WIDTH, WIDTH, bias=False), torch.randn(2, WIDTH)
    models = [
        build(lambda: nn.Sequential(linear(), linear()), *options)
        for build, options in ((partial(zero3, layout="rows(32)"), [nn.Linear]), (seeded, []))
    ]
    outputs: list[list[Tensor]] = [[], []]
    assert {parameter.numel() for parameter in models[0].parameters()} <= {0, WIDTH * WIDTH}
    for _ in range(2):
        for model, found in zip(models, outputs, strict=True):
            with model.no_sync() if model is models[0] else nullcontext():
                loss_of(model(batch)).backward()
            for parameter in model.parameters():
                parameter.data = 0.9 * parameter.data
            found.append(model(batch))
            loss_of(found[-1]).backward()
    for own, expected in zip(*outputs, strict=True):
        assert_bitwise(own, expected, "output")


def _two_heads() -> nn.Module:
    """Both heads are parameters of one unit."""
    heads = {"actor": Block(), "critic": Block()}
    return Parts(lambda own, x: [each(x).square().mean() for each in own.children()], **heads)


def _steps_between_two_backwards(
    model: nn.Module, build: Callable[..., torch.optim.Optimizer], batch: Tensor
) -> None:
    actor, critic = build(model.actor.parameters()), build(model.critic.parameters())
    for _ in range(3):
        one, other = model(batch)
        one.backward()
        actor.step()
        actor.zero_grad()
        other.backward()
        critic.step()
        critic.zero_grad()


class _Uncounted(torch.optim.SGD):
    """Writes as a kernel that takes addresses does."""

    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad, alpha=0.1)


@on_ranks(2)
def test_a_unit_that_stays_unsharded_over_a_step_has_its_weights() -> None:
    # torch's fused kernels do not count their writes, nor do kernels of other libraries.
    for build in (torch.optim.AdamW, partial(torch.optim.AdamW, fused=True), _Uncounted):
        models = zero3(Mlp), seeded(Mlp)
        optimizers = [build(model.parameters(), lr=0.1) for model in models]
        for batches in batches_of(CASES["mlp"], 1, steps=3):
            losses = []
            for model, optimizer in zip(models, optimizers, strict=True):
                losses.append(model(batches[0]).square().mean())
                losses[-1].backward()
                if isinstance(model, ZeRO3):
                    model.unshard()
                optimizer.step()
                optimizer.zero_grad()
            assert_bitwise(*losses, f"loss with {build}")


@on_ranks(2)
def test_a_graph_goes_backward_after_other_weights_of_its_unit_were_written() -> None:
    """Of weights that were written, random models do: torch's error."""
    sgd, native = partial(torch.optim.SGD, lr=0.1), partial(AdamW, lr=0.1)
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    for build, plain_build in (
        (sgd, sgd),
        (native, partial(torch.optim.AdamW, lr=0.1, fused=True)),
        (partial(WholeTensorOptimizer, optimizer_class=torch.optim.SGD, lr=0.1), sgd),
    ):
        for options in ({}, {"zero3_size": 1}):
            ours, plain = zero3(_two_heads, **options), seeded(_two_heads)
            _steps_between_two_backwards(ours, build, batch)
            _steps_between_two_backwards(plain, plain_build, batch)
            if build is not native or HAS_FMA:
                assert_same_values(ours, plain)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_graph_from_before_a_step_never_uses_the_weights_after_it(world_size: int) -> None:
    """torch's error, or, where all units stayed full in memory of their own, right gradients."""
    layouts = ({}, {"zero3_size": 1}, {"zero3_size": 1, "outer": "replicate"})
    for given, stays in itertools.product(layouts, (False, True)):
        batches = mlp_batches(1)[0]
        model = zero3(Mlp, Block, reshard_after_forward=not stays, **given)
        loss = loss_of(model(batches[dist.get_rank()]))
        with torch.no_grad():
            torch._foreach_mul_([*model.parameters()], 2.0)
        if stays and world_size > 1 and "outer" not in given:
            loss.backward()
            backward_of_all_ranks(reference := seeded(Mlp), batches)
            assert_same_gradients(model, reference)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
