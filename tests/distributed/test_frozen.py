"""Frozen parameters cost nothing, and what is frozen may change between steps."""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from layerzero import ZeRO3
from layerzero.checkpoint import get_model_state_dict
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.compare import (
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    sharded,
    zero3,
)
from tests.harness.models import CASES, WIDTH, Block, FrozenParts, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.reference import (
    OPTIMIZERS,
    Terms,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_parameters,
    seeded,
)
from tests.harness.traffic import SentBytes


def _frozen_have_no_gradient_and_no_state() -> None:
    model = sharded(CASES["frozen_parts"])
    plain = seeded(FrozenParts)
    before = full_parameters(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable)
    for step in batches_of(CASES["frozen_parts"], dist.get_world_size(), steps=2):
        forward_backward(model, step[dist.get_rank()])
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (not parameter.requires_grad), name
        optimizer.step()
    frozen = {name for name, parameter in plain.named_parameters() if not parameter.requires_grad}
    assert frozen == {n for n, parameter in model.named_parameters() if not parameter.requires_grad}
    after = full_parameters(model)
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (name in frozen), name


def test_a_frozen_parameter_gets_no_gradient_and_does_not_change() -> None:
    run_ranks(2, _frozen_have_no_gradient_and_no_state)


def _bytes_of_a_step(frozen: str, before_wrapping: bool) -> int:
    model: nn.Module = seeded(_Wide)
    if before_wrapping:
        _freeze(model, frozen)
    model = ZeRO3(model, auto_wrap_policy={Block})
    _freeze(model, frozen)
    batch = torch.randn(2, _Wide.WIDTH)
    forward_backward(model, batch)  # the order is recorded
    forward_backward(model, batch)
    sent = SentBytes()
    with sent:
        forward_backward(model, batch)
    return sent.nbytes


def _freeze(model: nn.Module, prefix: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefix))


class _Wide(nn.Module):
    WIDTH = 64

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(self.WIDTH, 64) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def _compare_bytes(before_wrapping: bool) -> None:
    block = sum(4 * parameter.numel() for parameter in Block(_Wide.WIDTH, 64).parameters())
    world_size = dist.get_world_size()
    everything = _bytes_of_a_step("nothing", before_wrapping)
    assert everything >= block, "nothing was counted"
    # A rank sends what others own; an implementation may hand over its own part too.
    least = 0.98 * block * (world_size - 1) / world_size
    saved = everything - _bytes_of_a_step("blocks.1", before_wrapping)
    assert least <= saved <= 1.02 * block, f"{saved} bytes saved, of {block} of gradients"
    # Nothing before the first block needs a gradient: frozen, it is not even gathered again.
    saved = everything - _bytes_of_a_step("blocks.0", before_wrapping)
    assert least <= saved <= 2 * 1.02 * block, f"{saved} bytes saved, of {block} of gradients"
    if before_wrapping:
        # Part of a unit; later it depends on which rank owns the part.
        saved = everything - _bytes_of_a_step("blocks.1.up", before_wrapping)
        assert least / 2 <= saved, f"{saved} bytes saved, of {block / 2} of gradients"


@pytest.mark.parametrize("before_wrapping", [True, False], ids=["before wrapping", "later"])
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_no_gradient_bytes_travel_for_what_is_frozen(
    world_size: int, before_wrapping: bool
) -> None:
    run_ranks(world_size, _compare_bytes, before_wrapping)


def _change_between_steps(optimizer: str) -> None:
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    schedule = [
        lambda name: True,
        lambda name: not name.startswith("blocks.1"),
        lambda name: name.startswith("head"),
        lambda name: name.endswith("bias"),
        lambda name: not name.startswith("stem"),
        lambda name: "up" in name or "blocks.2" in name,
        lambda name: True,
    ]
    optimizers = [OPTIMIZERS[optimizer](each.parameters()) for each in (model, plain)]
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=len(schedule))
    for phase, step in zip(schedule, batches, strict=True):
        for each in (model, plain):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(phase(name))
        _step_alike(model, plain, optimizers, step)


def _step_alike(
    model: nn.Module, plain: nn.Module, optimizers: list[torch.optim.Optimizer], step: list[Tensor]
) -> None:
    """As `assert_trains_alike`, with optimizers that live on."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = forward_backward(model, step[dist.get_rank()])
    expected = backward_of_all_ranks(plain, step)
    assert_bitwise(loss, expected[dist.get_rank()], "loss")
    assert_same_gradients(model, plain)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_values(model, plain)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_may_be_frozen_and_unfrozen_between_steps(optimizer: str) -> None:
    run_ranks(2, _change_between_steps, optimizer)


def _frozen_from_the_start_and_trained_later() -> None:
    model, plain = sharded(CASES["frozen_parts"]), seeded(FrozenParts)
    batches = batches_of(CASES["frozen_parts"], dist.get_world_size(), steps=4)
    assert_trains_alike(model, plain, batches[:2])
    for each in (model, plain):
        each.requires_grad_(True)
    assert_trains_alike(model, plain, batches[2:])


def test_what_was_frozen_at_construction_can_be_trained_later() -> None:
    run_ranks(2, _frozen_from_the_start_and_trained_later)


def _all_frozen() -> None:
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    for each in (model, plain):
        each.requires_grad_(False)
    out = model(batch)
    assert not out.requires_grad
    assert_bitwise(out, plain(batch), "output")
    inputs = [batch.clone().requires_grad_() for _ in range(2)]
    for each, x in zip((model, plain), inputs, strict=True):
        each(x).square().sum().backward()
    assert inputs[0].grad is not None and inputs[1].grad is not None
    assert_bitwise(inputs[0].grad, inputs[1].grad, "gradient of the input")
    assert all(parameter.grad is None for parameter in model.parameters())
    for each in (model, plain):
        each.requires_grad_(True)
    assert_trains_alike(model, plain, batches_of(CASES["mlp"], dist.get_world_size(), steps=2))


def test_a_wholly_frozen_model_passes_gradients_to_its_input() -> None:
    run_ranks(2, _all_frozen)


def _old_gradients_survive_freezing() -> None:
    """As in plain torch, freezing does not touch a `.grad` that is there."""
    model = zero3(Mlp, Block)
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    forward_backward(model, batch)
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.blocks[1].requires_grad_(False)
    kept = {
        name: None if before[name] is None else before[name].clone()
        for name, _ in model.blocks[1].named_parameters(prefix="blocks.1")
    }
    forward_backward(model, batch)
    own = dict(model.named_parameters())
    assert_same_parameters({name: own[name].grad for name in kept}, kept, what="gradient of")


def test_freezing_leaves_a_gradient_that_is_there_alone() -> None:
    run_ranks(2, _old_gradients_survive_freezing)


def _frozen_before_backward() -> None:
    """As GANs do: the discriminator's forward is over, and its parameters are not to learn."""
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    hooked: list[Tensor] = []
    model.blocks[0].up.weight.register_post_accumulate_grad_hook(hooked.append)
    for each in (model, plain):
        loss = each(batch).square().mean()
        for block in each.blocks:
            block.requires_grad_(False)
        loss.backward()
        for block in each.blocks:
            block.requires_grad_(True)
    had_gradients = {name for name, p in plain.named_parameters() if p.grad is not None}
    assert had_gradients and not any(name.startswith("blocks") for name in had_gradients)
    assert {n for n, p in model.named_parameters() if p.grad is not None} == had_gradients
    assert not hooked
    forward_backward(model, batch)
    assert all(p.grad is not None for p in model.parameters()) and hooked


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_frozen_between_forward_and_backward_gets_no_gradient(world_size: int) -> None:
    run_ranks(world_size, _frozen_before_backward)


def _frozen_amid_accumulation() -> None:
    """The earlier micro-batches have added their gradients already, and those count."""
    for accumulation in ("sharded", "unsharded"):
        for last_in_no_sync in (False, True):
            model = zero3(Mlp, Block, accumulation=accumulation)
            plain = seeded(Mlp)
            batches = [step[0] for step in batches_of(CASES["mlp"], 1, steps=3)]
            for each in (model, plain):
                for number, batch in enumerate(batches):
                    freezes = number == (1 if last_in_no_sync else 2)
                    wait = number < 2 and each is model
                    with model.no_sync() if wait else contextlib.nullcontext():
                        loss = each(batch).square().mean()
                        each.blocks[1].requires_grad_(not freezes)
                        loss.backward()
                        each.blocks[1].requires_grad_(True)
            assert_same_gradients(model, plain)


@pytest.mark.parametrize("world_size", [1, 2])
def test_freezing_amid_an_accumulation_keeps_what_was_added_before(world_size: int) -> None:
    run_ranks(world_size, _frozen_amid_accumulation)


def _other_pass_between(model: nn.Module, batch: Tensor, *, frozen: str) -> Tensor:
    """As DPO with adapters and GANs do: parameters are frozen for a forward without gradients
    between a forward and its backward."""
    parameters = [p for name, p in model.named_parameters() if name.startswith(frozen)]
    output = model(batch)
    for parameter in parameters:
        parameter.requires_grad_(False)
    with torch.no_grad():
        other = model(batch)
    for parameter in parameters:
        parameter.requires_grad_(True)
    loss = (output - other.cos()).square().mean()
    loss.backward()
    return loss.detach()


class _Checkpointed(Mlp):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if self.how == "plain" or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return self.head(x)


def _frozen_in_between() -> None:
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=3)
    for how in ("plain", "reentrant", "nonreentrant"):
        for frozen in ("", "blocks.0", "blocks.1.up.weight"):
            model = zero3(lambda how=how: _Checkpointed(how), Block)
            run = partial(_other_pass_between, frozen=frozen)
            assert_trains_alike(model, seeded(lambda how=how: _Checkpointed(how)), batches, run=run)


def test_a_forward_with_other_flags_may_run_before_the_backward() -> None:
    run_ranks(2, _frozen_in_between)


class _FreezesItself(Mlp):
    """Freezes a block inside a forward, where it is unsharded, and thaws it in the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(self._switch)

    @staticmethod
    def _switch(block: nn.Module, *_: object) -> None:
        block.requires_grad_(not block.up.weight.requires_grad)


def _two_forwards(model: nn.Module, batch: Tensor) -> Tensor:
    losses = [model(batch).square().mean() for _ in range(2)]
    torch.stack(losses).sum().backward()
    return losses[0].detach()


def _freezes_itself() -> None:
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=3)
    model = zero3(_FreezesItself, Block)
    assert_trains_alike(model, seeded(_FreezesItself), batches, run=_two_forwards)


def test_a_forward_may_freeze_its_own_parameters() -> None:
    run_ranks(2, _freezes_itself)


def _flags_change_amid_accumulation(zero3_size: int | None) -> None:
    """Each micro-batch trains other parameters, in one unit and over units."""
    sets = [("",), ("blocks.0", "head"), ("blocks.1.up",), ("blocks.0.down", "stem", "blocks.1")]
    for accumulation in ("sharded", "unsharded"):
        model = zero3(Mlp, Block, accumulation=accumulation, zero3_size=zero3_size)
        plain, terms = seeded(Mlp), Terms()
        for step in range(2):
            for each in (model, plain):
                each.zero_grad()
            micro = batches_of(CASES["mlp"], dist.get_world_size(), steps=4, seed=step)
            for number, (prefixes, batch) in enumerate(zip(sets, micro, strict=True)):
                for each in (model, plain):
                    for name, parameter in each.named_parameters():
                        parameter.requires_grad_(name.startswith(prefixes))
                last = number == len(sets) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    forward_backward(model, batch[dist.get_rank()])
                backward_of_all_ranks(plain, batch, terms=terms)
            assert_same_gradients(model, plain, terms, f"{accumulation}, step {step}: gradient of")


@pytest.mark.parametrize(("world_size", "zero3_size"), [(1, None), (2, None), (4, 2)])
def test_each_micro_batch_may_train_other_parameters(
    world_size: int, zero3_size: int | None
) -> None:
    run_ranks(world_size, _flags_change_amid_accumulation, zero3_size)


class _Float8(nn.Module):
    """A scale that is stored in eight bits beside what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        scale = torch.linspace(0.5, 2.0, WIDTH).to(torch.float8_e4m3fn)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale.float()


def _float8() -> None:
    model, plain = ZeRO3(seeded(_Float8)), seeded(_Float8)
    batches = [[torch.randn(3, WIDTH) for _ in range(2)] for _ in range(2)]
    assert_trains_alike(model, plain, batches)
    forward_backward(model, batches[0][dist.get_rank()])
    assert model.clip_grad_norm_(1.0).dtype == torch.float32
    state = get_model_state_dict(model, full=True)
    assert state["scale"].dtype == torch.float8_e4m3fn
    assert torch.equal(state["scale"].float(), plain.scale.float())


def test_a_frozen_float8_parameter_stands_beside_trained_ones() -> None:
    run_ranks(2, _float8)
