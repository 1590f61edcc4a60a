"""A forward call is an object: several may wait for their backward, in any order."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from layerzero import ZeRO3
from tests.harness.checks import assert_bitwise
from tests.harness.compare import assert_same_gradients, assert_trains_alike, sharded, zero3
from tests.harness.models import CASES, WIDTH, Block, Case, RepeatedModule, loss_of
from tests.harness.ranks import run_ranks
from tests.harness.reference import (
    RunFn,
    Terms,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    seeded,
)

# What each pattern of calls does with the micro-batches of one step. The gradients of all of them
# add up, so every pattern has the same result up to the order of the sum.
Pattern = Callable[[nn.Module, Sequence[Tensor]], list[Tensor]]


def _in_turn(model: nn.Module, micro_batches: Sequence[Tensor]) -> list[Tensor]:
    return [forward_backward(model, batch) for batch in micro_batches]


def _forwards_then_backwards(model: nn.Module, micro_batches: Sequence[Tensor]) -> list[Tensor]:
    losses = [loss_of(model(batch)) for batch in micro_batches]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses]


def _last_forward_first(model: nn.Module, micro_batches: Sequence[Tensor]) -> list[Tensor]:
    losses = [loss_of(model(batch)) for batch in micro_batches]
    for loss in reversed(losses):
        loss.backward()
    return [loss.detach() for loss in losses]


def _one_forward_one_backward(model: nn.Module, micro_batches: Sequence[Tensor]) -> list[Tensor]:
    """A pipeline stage that runs two forwards ahead."""
    ahead = 2
    losses = [loss_of(model(batch)) for batch in micro_batches[:ahead]]
    for index in range(len(micro_batches)):
        losses[index].backward()
        if index + ahead < len(micro_batches):
            losses.append(loss_of(model(micro_batches[index + ahead])))
    return [loss.detach() for loss in losses]


def _one_backward_of_the_sum(model: nn.Module, micro_batches: Sequence[Tensor]) -> list[Tensor]:
    losses = [loss_of(model(batch)) for batch in micro_batches]
    torch.stack(losses).sum().backward()
    return [loss.detach() for loss in losses]


def _custom_backward(model: nn.Module, micro_batches: Sequence[Tensor]) -> list[Tensor]:
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
    return losses


PATTERNS: dict[str, Pattern] = {
    "in turn": _in_turn,
    "forwards, then backwards": _forwards_then_backwards,
    "last forward first": _last_forward_first,
    "one forward, one backward": _one_forward_one_backward,
    "one backward of the sum": _one_backward_of_the_sum,
    "run_backward with freed outputs": _custom_backward,
}


def _run(pattern: Pattern) -> RunFn:
    def run(model: nn.Module, micro_batches: Sequence[Tensor]) -> Tensor:
        return torch.stack(pattern(model, micro_batches))

    return run


def _micro_batches(case: Case, steps: int, count: int, seed: int = 0) -> list[list[list[Tensor]]]:
    """[step][rank][micro-batch]"""
    each = batches_of(case, dist.get_world_size() * count, steps, seed)
    return [[step[i : i + count] for i in range(0, len(step), count)] for step in each]


def _assert_pattern_trains_alike(name: str, model: ZeRO3, plain: nn.Module, batches: list) -> None:
    """Each backward is reduced on its own: sums over ranks first, if there are several."""
    run, is_one = _run(PATTERNS[name]), PATTERNS[name] is _one_backward_of_the_sum
    in_turn = run if is_one else _run(_in_turn)
    assert_trains_alike(model, plain, batches, run=run, reference_run=in_turn, regrouped=not is_one)


def _pattern(name: str, options: dict) -> None:
    for case_name in ("mlp", "repeated_module", "unused_parts", "tied_in_unit"):
        case = CASES[case_name]
        try:
            _assert_pattern_trains_alike(
                name,
                sharded(case, **options),
                seeded(case.build),
                _micro_batches(case, steps=2, count=4),
            )
        except AssertionError as error:
            raise AssertionError(f"{case_name}: {error}") from error


# Kept units are gathered once, whatever comes then: with the order furthest from the usual one.
_KEPT = "last forward first"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, {}, id=name) for name in PATTERNS),
        *(
            pytest.param(
                *(name, {"reshard_after_forward": False}),
                id=f"{name}, kept",
                marks=[pytest.mark.slow] * (name != _KEPT),
            )
            for name in PATTERNS
        ),
    ],
)
def test_micro_batches_in_any_pattern_give_the_summed_gradient(name: str, options: dict) -> None:
    run_ranks(2, _pattern, name, options)


def _pattern_without_sync(name: str) -> None:
    case = CASES["mlp"]
    model, plain, terms = sharded(case), seeded(case.build), Terms()
    step = _micro_batches(case, steps=1, count=4)[0]
    own = step[dist.get_rank()]
    with model.no_sync():
        PATTERNS[name](model, own[:3])
    PATTERNS[name](model, own[3:])
    backward_of_all_ranks(plain, step, _run(_in_turn), terms=terms)
    assert_same_gradients(model, plain, terms)
    batches = _micro_batches(case, steps=2, count=3, seed=1)
    _assert_pattern_trains_alike(name, model, plain, batches)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_may_run_under_no_sync(name: str) -> None:
    run_ranks(2, _pattern_without_sync, name)


def _patterns_change_between_steps() -> None:
    case = CASES["mlp"]
    model, plain = sharded(case), seeded(case.build)
    for seed, name in enumerate([*PATTERNS, *reversed(PATTERNS)]):
        batches = _micro_batches(case, steps=1, count=3, seed=seed)
        _assert_pattern_trains_alike(name, model, plain, batches)


def test_the_pattern_may_change_between_steps() -> None:
    run_ranks(2, _patterns_change_between_steps)


def _backward_twice(model: nn.Module, batch: Tensor) -> Tensor:
    loss = loss_of(model(batch))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def _retain_graph() -> None:
    for name in ("mlp", "repeated_module", "transformer"):
        case = CASES[name]
        batches = batches_of(case, dist.get_world_size(), steps=3)
        # Doubling is exact, in whichever order it happens.
        assert_trains_alike(sharded(case), seeded(case.build), batches, run=_backward_twice)


def test_backward_may_run_twice_with_retain_graph() -> None:
    run_ranks(2, _retain_graph)


def _backward_of_two_losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Two losses of one forward, the second not of all of it."""
    output = model(batch)
    first, second = loss_of(output), output[0].sum()
    first.backward(retain_graph=True)
    second.backward()
    return torch.stack([first.detach(), second.detach()])


def _two_losses() -> None:
    case = CASES["mlp"]
    batches = batches_of(case, dist.get_world_size(), steps=3)
    assert_trains_alike(
        sharded(case), seeded(case.build), batches, run=_backward_of_two_losses, regrouped=True
    )


def test_two_losses_of_one_forward_may_go_back_in_turn() -> None:
    run_ranks(2, _two_losses)


def _other_forward_between(model: nn.Module, batch: Tensor) -> Tensor:
    """A forward without gradients between a forward and its backward."""
    loss = loss_of(model(batch))
    with torch.no_grad():
        other = model(batch * 2)
    loss.backward()
    return torch.stack([loss.detach(), other.square().sum()])


def _forward_between() -> None:
    case = CASES["mlp"]
    batches = batches_of(case, dist.get_world_size(), steps=3)
    assert_trains_alike(sharded(case), seeded(case.build), batches, run=_other_forward_between)


def test_a_forward_without_gradients_may_run_before_the_backward() -> None:
    run_ranks(2, _forward_between)


def _called_as_often_as_the_batch_says() -> None:
    model, plain = sharded(CASES["repeated_module"]), seeded(RepeatedModule)
    for times in (1, 4, 2, 0, 3):
        model.module.times = plain.times = times
        batches = batches_of(CASES["repeated_module"], dist.get_world_size(), steps=1, seed=times)
        assert_trains_alike(model, plain, batches)


def test_a_unit_may_be_called_another_number_of_times_each_step() -> None:
    run_ranks(2, _called_as_often_as_the_batch_says)


def _two_models() -> None:
    """No state is shared between models of one process."""
    first_case, second_case = CASES["mlp"], CASES["unused_parts"]
    first, second = sharded(first_case), sharded(second_case)
    plain = seeded(first_case.build), seeded(second_case.build)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for step in batches_of(first_case, world_size, steps=3):
        losses = [loss_of(first(step[rank])), loss_of(second(step[rank]))]
        losses[0].backward()
        losses[1].backward()
        for own, model, reference in zip(losses, (first, second), plain, strict=True):
            expected = backward_of_all_ranks(reference, step)[rank]
            assert_bitwise(own.detach(), expected, "loss")
            assert_same_gradients(model, reference)
            model.zero_grad()
            reference.zero_grad()
    # One feeds the other, with one backward through both.
    case = first_case
    batch = batches_of(case, 1, steps=1)[0][0]
    chained, reference_chained = sharded(second_case), seeded(second_case.build)
    loss_of(chained(second(batch))).backward()
    loss_of(reference_chained(plain[1](batch))).backward()
    assert_same_gradients(chained, reference_chained)
    assert_same_gradients(second, plain[1])


def test_two_models_in_one_process_do_not_meet() -> None:
    run_ranks(2, _two_models)


class _ActorCritic(nn.Module):
    """Two heads on one trunk; the program calls the parts, never the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(Block(), Block())
        self.actor, self.critic = nn.Linear(WIDTH, 3), Block()

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("called by parts")


def _together(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model.actor(model.trunk(x))) + loss_of(model.critic(model.trunk(x)))
    loss.backward()
    return loss.detach()


def _in_turn_over_one_trunk(model: nn.Module, x: Tensor) -> Tensor:
    losses = []
    for head in (model.actor, model.critic):
        losses.append(loss_of(head(model.trunk(x))))
        losses[-1].backward()
    return torch.stack(losses).detach().sum()


def _two_heads() -> None:
    steps = batches_of(CASES["mlp"], dist.get_world_size(), steps=3)
    for run in (_together, _in_turn_over_one_trunk):
        model = zero3(_ActorCritic, Block, nn.Linear)
        # In turn, each backward reduces: sums over ranks come before those over backwards.
        regrouped = run is _in_turn_over_one_trunk
        assert_trains_alike(model, seeded(_ActorCritic), steps, run=run, regrouped=regrouped)


def test_an_actor_and_a_critic_share_a_trunk_in_one_model() -> None:
    run_ranks(2, _two_heads)


def _shared_by_two_models() -> None:
    trunk = ZeRO3(Block())
    first = ZeRO3(nn.Sequential(trunk, nn.Linear(WIDTH, 1)))
    for again in (nn.Sequential(trunk, Block()), nn.Sequential(trunk.module, Block())):
        with pytest.raises(RuntimeError, match="a module cannot be in two wrapped models"):
            ZeRO3(again)
    loss_of(first(torch.ones(2, WIDTH))).backward()
    del first
    ZeRO3(nn.Sequential(trunk, Block()))(torch.ones(2, WIDTH))


def test_two_models_over_one_wrapped_part_are_refused() -> None:
    run_ranks(2, _shared_by_two_models)
