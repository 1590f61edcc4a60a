"""A forward call is an object: several may wait for their backward, in any order."""

import functools
import operator
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from layerzero import MixedPrecision, ZeRO3
from tests.harness.checks import assert_bitwise, named
from tests.harness.compare import assert_trains_alike, sharded, trained_alike
from tests.harness.models import CASES, WIDTH, Block, Mlp, loss_of
from tests.harness.ranks import on_ranks
from tests.harness.reference import backward_of, in_turn, micro_batches_of, seeded


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


class _Moco(nn.Module):
    """Its forward writes the weights of a second encoder, from those of the first alone: the one
    process beside runs it for the batch of each rank."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.own = nn.Sequential(Block(), Block())
        self.momentum = nn.Sequential(Block(), Block()).requires_grad_(False)
        self.assigns = assigns

    def forward(self, x: Tensor) -> Tensor:
        query = self.own(x)
        with torch.no_grad():
            pairs = zip(self.own.parameters(), self.momentum.parameters(), strict=True)
            for new, old in pairs:
                if self.assigns:
                    old.data = new.data * 0.5
                else:
                    old.data.copy_(new.data).mul_(0.5)
            key = self.momentum(x)
        return query * key


@pytest.mark.parametrize("assigns", [False, True])
@on_ranks(2)
def test_a_forward_may_write_the_weights_of_a_momentum_encoder(assigns: bool) -> None:
    for options in ({}, {"zero3_size": 1}):
        trained_alike(functools.partial(_Moco, assigns), Block, **options)


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
