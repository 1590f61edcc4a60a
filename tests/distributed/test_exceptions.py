"""After an exception in forward or backward the next step equals the one after a clean start; a
pass that failed changes nothing, and can be run again."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from layerzero import BackwardPrefetch, MixedPrecision, ReductionPolicy, ZeRO3, units
from layerzero.optim import AdamW
from tests.harness.checks import named
from tests.harness.fault_at import FaultAt, differences, snapshot
from tests.harness.internals import root_state
from tests.harness.models import WIDTH, Block
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.recording import full_nbytes, gradient_nbytes


class Fragile(nn.Module):
    """Raises what it is told to, where it is told to."""

    def __init__(self, recompute: bool | None) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.recompute = recompute
        self.fail: tuple[str, int, type[BaseException]] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            self._maybe_raise("forward", index)
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute)
            if x.requires_grad:
                x.register_hook(lambda _, index=index: self._maybe_raise("backward", index))
        return x

    def _maybe_raise(self, where: str, index: int) -> None:
        if self.fail is not None and self.fail[:2] == (where, index):
            raise self.fail[2](f"told to, in {where} at {index}")


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch(number)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def start(recompute: bool | None) -> tuple[ZeRO3, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ZeRO3(Fragile(recompute), auto_wrap_policy={Block})
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def fail(
    model: ZeRO3, number: int, where: str, index: int, error: type[BaseException] = ValueError
) -> None:
    """A pass that raises `error` there."""
    model.module.fail = (where, index, error)
    with pytest.raises(error, match="told to"):
        model(batch(number)).square().sum().backward()
    model.module.fail = None


def assert_same_gradients(model: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None and torch.equal(mine.grad, theirs.grad)


def _fails(where: str, errors: Sequence[type[BaseException]], recompute: bool | None) -> None:
    clean, clean_optimizer = start(recompute)
    model, optimizer = start(recompute)
    number = 0
    for index, error in enumerate(errors):
        for _ in range(2):
            expected = step_of(clean, clean_optimizer, number)
            assert torch.equal(step_of(model, optimizer, number), expected)
            number += 1
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        fail(model, number, where, index, error)
        after = [p.grad for p in model.parameters()]
        for old, new in zip(before, after, strict=True):
            assert old is None or torch.equal(old, new), "a failed pass changes no gradient"
    step_of(clean, clean_optimizer, number)
    step_of(model, optimizer, number)
    for mine, theirs in zip(model.parameters(), clean.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert_same_gradients(model, clean)
    assert set(full_nbytes(model).values()) == {0}
    assert set(gradient_nbytes(model).values()) == {0}
    assert {unit.state.name for unit in units(model)} == {"SHARDED"}


@on_ranks(2)
def test_the_next_step_equals_a_clean_start() -> None:
    for where in ("forward", "backward"):
        for recompute in (None, False, True):  # Not at all; with hooks; reentrant.
            errors = [ValueError, KeyboardInterrupt, KeyboardInterrupt]
            with named(where, f"{recompute=}"):
                _fails(where, errors, recompute)


@on_ranks(2)
def test_an_exception_caught_inside_the_model_is_the_models_business() -> None:
    class Forgiving(nn.Module):
        """Catches the exception of one of its units and goes on without it."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                x = self.first(x.new_zeros(1, WIDTH + 1))
            except RuntimeError:
                x = self.second(x)
            return self.head(x)

    torch.manual_seed(0)
    plain = Forgiving()
    torch.manual_seed(0)
    model = ZeRO3(Forgiving(), auto_wrap_policy={Block})
    for number in range(3):
        x = batch(number)
        assert torch.equal(model(x), plain(x))
        model(x).sum().backward()
    assert model.second.up.weight.grad is not None


@on_ranks(2)
def test_zero_grad_gives_a_failed_step_up() -> None:
    """`zero_grad` after a failed micro-batch drops the others, whoever it is called on."""
    for gives_up in ("model", "optimizer", "flat"):
        model, optimizer = start(None)
        if gives_up == "flat":
            del optimizer
            optimizer = AdamW(model.parameters(), lr=0.01)
        clean, _ = start(None)
        with model.no_sync():
            model(batch(0)).sum().backward()
        fail(model, 1, "backward", 1)
        (model if gives_up == "model" else optimizer).zero_grad()
        model(batch(5)).sum().backward()
        clean(batch(5)).sum().backward()
        with named(gives_up):
            assert_same_gradients(model, clean)


@on_ranks(2)
def test_hooks_of_a_failed_pass_leave_no_gradient() -> None:
    model, _ = start(None)
    model(batch(0)).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    parameters = [*model.parameters()]
    hooks = [parameters[1].register_post_accumulate_grad_hook(lambda _: None)]
    hooks += [parameters[3].register_hook(lambda _: exec("raise ValueError('in a hook')"))]
    with pytest.raises(ValueError, match="in a hook"):
        model(batch(1)).sum().backward()
    for parameter, grad in zip(parameters, before, strict=True):
        assert torch.equal(parameter.grad, grad)
    for hook in hooks:
        hook.remove()
    clean, _ = start(None)
    for number in range(2):
        clean(batch(number)).sum().backward()
    model(batch(1)).sum().backward()
    assert_same_gradients(model, clean)


@on_ranks(2)
def test_an_error_of_a_step_in_backward_says_what_has_stepped() -> None:
    model, optimizer = start(None)
    model.step_in_backward(optimizer)
    model(batch(0)).sum().backward()
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fail(model, 1, "backward", 0)
    assert all(map(torch.equal, before, model.parameters())), "nothing has stepped"
    steps = []

    def fail_in_third(*_: object) -> None:
        steps.append(None)
        if len(steps) == 3:
            raise ValueError("told to, in the third step")

    hook = optimizer.register_step_pre_hook(fail_in_third)
    with pytest.raises(ValueError, match="told to") as caught:
        model(batch(1)).sum().backward()
    hook.remove()
    if hasattr(caught.value, "__notes__"):
        assert "had stepped by then, which cannot be undone" in caught.value.__notes__[0]
    assert not all(map(torch.equal, before, model.parameters()))


@on_ranks(2)
def test_another_backward_may_follow_a_failed_one() -> None:
    """After a failed backward another graph's backward may come first, without a forward."""
    model, _ = start(None)
    good = model(batch(0)).square().sum()
    bad = model(batch(1)).square().sum()
    model.module.fail = ("backward", 2, ValueError)
    with pytest.raises(ValueError, match="told to"):
        bad.backward()
    model.module.fail = None
    good.backward()
    clean, _ = start(None)
    clean(batch(0)).square().sum().backward()
    assert_same_gradients(model, clean)


class Net(nn.Module):
    """Blocks, the last of which is recomputed, a tied pair of layers, and the loss: outside of the
    model it would be in no pass, and an exception there unknown to the engine."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.stem.weight
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](self.stem(x)))
        x = self.head(checkpoint(self.blocks[2], x, use_reentrant=self._reentrant))
        return x.float().square().sum()


Settings = dict[str, Any]
_BFLOAT = MixedPrecision(param_dtype=torch.bfloat16)
SETTINGS: list[Settings] = [
    {"accumulation": "unsharded"},
    {"accumulation": "sharded"},
    {"accumulation": "unsharded", "mixed_precision": _BFLOAT},
    {"accumulation": "sharded", "mixed_precision": _BFLOAT, "deterministic": True},
    {"zero3_size": 1, "accumulation": "unsharded"},
    {"zero3_size": 1, "outer": "replicate", "accumulation": "sharded"},
    {"outer": "shard", "reshard_after_forward": False, "accumulation": "unsharded"},
    {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "accumulation": "unsharded"},
    {"reduction": ReductionPolicy(in_flight="1MB"), "accumulation": "unsharded"},
    {"optional_modules": 1, "accumulation": "unsharded"},
]


def build(settings: Settings, reentrant: bool = False) -> tuple[ZeRO3, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net, arguments = Net(reentrant), dict(settings)
    if arguments.pop("optional_modules", None):
        arguments["optional_modules"] = [net.blocks[0]]
    model = ZeRO3(net, auto_wrap_policy={Block}, **arguments)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def micro_batch(
    model: ZeRO3, number: int, syncs: bool, after_forward: Callable[[], object] = lambda: None
) -> None:
    with contextlib.nullcontext() if syncs else model.no_sync():
        loss = model(batch(number))
        after_forward()
        loss.backward()


def step_in_parts(
    model: ZeRO3, optimizer: torch.optim.Optimizer, number: int, run: Callable[..., Any]
) -> None:
    """Three micro-batches, the last of which reduces, and a step."""
    for part in range(3):
        run(model, 3 * number + part, part == 2)
    optimizer.step()
    optimizer.zero_grad()


def _sweep(settings: Settings, reentrant: bool, starts: tuple[int, ...], stride: int) -> int:
    """Fail once in each step, at a later operation each time, and run again what failed."""
    clean, clean_optimizer = build(settings, reentrant)
    model, optimizer = build(settings, reentrant)
    number, failures = 0, 0
    for which, start in enumerate(starts):
        at, reached = start, True
        while reached:
            reached = False
            calls = 0

            def run(
                model: ZeRO3, number: int, syncs: bool, which: int = which, at: int = at
            ) -> None:
                nonlocal reached, calls, failures
                calls += 1
                if calls - 1 == which:
                    root_state(model).backward.clear_abandoned()
                    before = snapshot(model, optimizer)
                    forwards: list[int] = []
                    try:
                        with FaultAt(at) as fault:
                            after_forward = partial(_append_count, forwards, fault)
                            micro_batch(model, number, syncs, after_forward)
                    except torch.OutOfMemoryError:
                        reached = True
                        failures += 1
                    _assert_alike(reached)
                    if not reached:
                        return
                    root_state(model).backward.clear_abandoned()
                    wrong = differences(before, snapshot(model, optimizer))
                    if forwards == [at - 1]:  # Between the two: no pass of the model's failed.
                        wrong = [each for each in wrong if not isinstance(before[each], dict)]
                    assert not wrong, f"operation {at} of micro-batch {which} changed {wrong}"
                micro_batch(model, number, syncs)

            step_in_parts(clean, clean_optimizer, number, micro_batch)
            step_in_parts(model, optimizer, number, run)
            for mine, theirs in zip(model.parameters(), clean.parameters(), strict=True):
                assert torch.equal(mine, theirs), f"after operation {at} of micro-batch {which}"
            number += 1
            at += stride
    return failures


def _append_count(counts: list[int], mode: FaultAt) -> None:
    counts.append(mode.count)


def _assert_alike(reached: bool) -> None:
    """A rank that is alone in a failure, or without one, would wait for the others in vain."""
    of_ranks: list[bool] = [reached] * dist.get_world_size()
    dist.all_gather_object(of_ranks, reached)
    assert all(each == reached for each in of_ranks), f"reached on ranks: {of_ranks}"


def _sweep_all(settings: list[Settings], reentrant: bool, stride: int) -> int:
    failures = 0
    for place, each in enumerate(settings):
        starts = tuple(1 + (place * 7 + which * 3) % stride for which in range(3))
        with named(each):
            failures += _sweep(each, reentrant, starts, stride)
    return failures


@on_ranks(2, timeout=90)
def test_a_pass_that_runs_out_of_memory_changes_nothing() -> None:
    assert _sweep_all([SETTINGS[0], SETTINGS[5]], False, 211) > 4
    # In the first pass of a model the engine also looks for writes into full parameters.
    for place in (31, 40, 49):
        assert _sweep(SETTINGS[4], False, (place,), 1000) == 1


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_may_run_out_of_memory_at_any_operation(
    ranks: KeptRanks, reentrant: bool, pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.getoption("--seeds"):
        half = SETTINGS[2 + reentrant :: 2]
        (failures, _) = ranks(2, _sweep_all, half, reentrant, 149, timeout=120)
        assert failures > 2 * len(half)
        return
    for place in range(len(SETTINGS)):
        settings = SETTINGS[place : place + 1]
        (failures, _) = ranks(2, _sweep_all, settings, reentrant, 3, timeout=1800)
        assert failures > 50
