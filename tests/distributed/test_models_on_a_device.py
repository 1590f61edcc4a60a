"""On a device: several models at once, which may share its streams, and models that are deleted."""

import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from layerzero import BackwardPrefetch, MixedPrecision, OffloadPolicy, ZeRO3
from layerzero.comm.pending import Pending
from layerzero.step.context import RuntimeContext
from layerzero.step.reducer import GradientReducer
from layerzero.watch.watchdog import Watchdog
from tests.harness.fake_ranks import as_fake_ranks
from tests.harness.internals import root_state
from tests.harness.models import WIDTH
from tests.harness.simulated_device import SimulatedDevice, simulated_device
from tests.harness.simulated_streams import COMES_NEVER
from tests.harness.stream_uses import MOMENTUM, train, wrapped


def _batch() -> Tensor:
    return torch.randn(3, WIDTH)


def _step(*models: ZeRO3) -> None:
    for model in models:
        MOMENTUM(model.parameters(), lr=0.01).step()
        model.zero_grad()


def one_loss(one: ZeRO3, other: ZeRO3) -> None:
    for _ in range(3):
        batch = _batch()
        (one(batch) * other(batch)).sum().backward()
        _step(one, other)


def one_feeds_the_other(one: ZeRO3, other: ZeRO3) -> None:
    for _ in range(3):
        other(pad(one(_batch()), (0, 2))).sum().backward()
        _step(one, other)


def one_inside_the_other(one: ZeRO3, other: ZeRO3) -> None:
    """Not as a submodule: it has a root of its own."""
    block = one.module.blocks[1]
    forward = block.forward
    block.forward = lambda x: forward(x) + pad(other(x), (0, 2))
    one_loss(one, other)


def adversaries(generator: ZeRO3, critic: ZeRO3) -> None:
    for is_frozen in (False, True):
        for _ in range(2):
            fake = pad(generator(_batch()), (0, 2))
            (critic(_batch()).sum() - critic(fake.detach()).sum()).backward()
            _step(critic)
            critic.requires_grad_(not is_frozen)
            critic(fake).sum().backward()
            critic.requires_grad_(True)
            critic.zero_grad()
            _step(generator)


def a_teacher(student: ZeRO3, teacher: ZeRO3) -> None:
    for _ in range(3):
        batch = _batch()
        with torch.no_grad():
            wanted = teacher(batch)
        (student(batch) - wanted).square().sum().backward()
        _step(student)


def one_accumulates(one: ZeRO3, other: ZeRO3) -> None:
    for _ in range(2):
        with one.no_sync():
            one(_batch()).sum().backward()
            train(other, 1)
        one(_batch()).sum().backward()
        _step(one)


PAIRS = [
    *(one_loss, one_feeds_the_other, one_inside_the_other, adversaries, a_teacher),
    one_accumulates,
]
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}),
    ({"zero3_size": 2}, {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
    ({"offload": OffloadPolicy(params=True, grads=True)}, {}),
]
DEVICES: list[dict[str, Any]] = [
    {},
    # The second model has the streams of the first; in other parts; and all are one.
    {"num_streams": 4},
    {"num_streams": 3},
    {"num_streams": 1, "on_current_stream": True},
]


@pytest.mark.slow
@as_fake_ranks((0, 3), 4, timeout=120)
def test_accesses_of_two_models_are_ordered() -> None:
    """On the first rank in all ways to share streams, each use in half of them; on the last in
    layers."""
    ways = [(SETTINGS[1], DEVICES[1]), (SETTINGS[2], DEVICES[2])]
    if dist.get_rank() == 0:
        ways += [(SETTINGS[0], each) for each in DEVICES]
    for place, ((arguments, others), device_arguments) in enumerate(ways):
        for use in PAIRS if place < 2 else PAIRS[place % 2 :: 2]:
            with simulated_device(**device_arguments) as device:
                use(wrapped(**arguments), wrapped(**others))
            assert device.findings == [], (use.__name__, arguments, device_arguments)


def _found_without(num_streams: int | None) -> SimulatedDevice:
    """One of two models does not wait before it frees."""
    before_free = RuntimeContext.before_free
    with simulated_device(num_streams=num_streams) as device:
        careless, careful = wrapped(), wrapped()

        def sometimes(context: RuntimeContext) -> None:
            if context is not root_state(careless).context:
                before_free(context)

        with mock.patch.object(RuntimeContext, "before_free", sometimes):
            one_loss(careful, careless)
    return device


@as_fake_ranks((0, 1), 2)
def test_memory_that_one_model_frees_too_early_is_missed_by_the_other() -> None:
    """Where they share a stream they share its pool: then the other model's gather writes it."""
    found = []
    for num_streams in (None, 4):
        device = _found_without(num_streams)
        early = {free.home for free in device.early_frees if free.memory == "full buffer"}
        uses = {race.use.stream for race in device.races if race.before_free}
        found.append((early, uses))
    apart, shared = found
    assert apart[0] == {"unshard"} and shared[0] == {"unshard"}
    assert len(shared[1]) >= len(apart[1]) == 1


def _in_backward(model: ZeRO3) -> None:
    reduce = GradientReducer.reduce

    def failing(*args: Any) -> None:
        reduce(*args)
        raise ValueError

    with mock.patch.object(GradientReducer, "reduce", failing), suppress(ValueError):
        model(_batch()).sum().backward()


def _without_sync(model: ZeRO3) -> None:
    with model.no_sync():
        model(_batch()).sum().backward()


LAST_USES: list[Callable[[ZeRO3], object]] = [
    lambda model: train(model, 2),
    lambda model: model(_batch()).detach(),
    lambda model: model(_batch()),  # Its graph lives longer than the model.
    lambda model: model.unshard(async_op=True),
    _in_backward,
    _without_sync,
]


@as_fake_ranks((0, 3), 4)
def test_a_model_may_be_deleted_while_the_device_works_for_it() -> None:
    """Of all last uses of a default model, and of half of them in each other setting."""
    settings = ({}, {"reshard_after_forward": False}, *(each for pair in SETTINGS for each in pair))
    for place, arguments in enumerate(settings):
        for use in LAST_USES[place % 2 :: 2] if place else LAST_USES:
            with simulated_device() as device:
                model = wrapped(**arguments)
                kept = use(model)
                gone = weakref.ref(model)
                del model
                gc.collect()
                assert gone() is None
                del kept
            assert device.findings == [], (use, arguments)


def _watchdogs(model: ZeRO3) -> list[Watchdog]:
    found = root_state(model).context.operations._watchdogs.values()
    return [watchdog for watchdog in found if watchdog is not None]


def _check(watchdogs: list[Watchdog]) -> None:
    """As their threads do: what these learn orders nothing in this one."""
    for watchdog in watchdogs:
        thread = threading.Thread(target=watchdog.check)
        thread.start()
        thread.join()


@pytest.mark.parametrize("on_current_stream", [False, True], ids=["with work", "without"])
@as_fake_ranks((0, 1), 2)
def test_the_watchdog_asks_while_events_are_in_flight(on_current_stream: bool) -> None:
    """With a lag of 500 it is asked in the middle of a step, and both answers are right."""
    for seed in (None, 0, 1):
        findings, left, answers = _look(lag=500, seed=seed, on_current_stream=on_current_stream)
        assert findings == []
        assert left and not any(left), "all that was in flight is done, and nothing failed"
        assert answers == {False, True}


def _look(**device_arguments: Any) -> tuple[list[str], list[bool], set[bool]]:
    with (
        mock.patch("layerzero.watch.watchdog.run_periodically", lambda *_: None),
        simulated_device(**device_arguments) as device,
    ):
        model = wrapped()
        for _ in range(4):
            train(model, 1)
            _check(_watchdogs(model))
        findings = device.findings
        device.synchronize()
        _check(_watchdogs(model))
        left = [bool(each._in_flight) or each.has_failed for each in _watchdogs(model)]
        answers = {answer for answer, number in device.host.num_answers.items() if number}
    return findings, left, answers


@as_fake_ranks((0,), 2)
def test_what_the_device_has_not_come_to_does_not_stand_still() -> None:
    """It fails not while its stream is on the way there, but once that is there."""
    with (
        mock.patch("layerzero.watch.watchdog.run_periodically", lambda *_: None),
        mock.patch("layerzero.watch.watchdog._abort", lambda *_: None),
        mock.patch("layerzero.watch.watchdog.diagnose", lambda *_: RuntimeError("stands still")),
        mock.patch.object(Watchdog, "_compare_with_next_rank", lambda _: None),
        simulated_device(lag=COMES_NEVER) as device,
    ):
        model = wrapped()
        train(model, 1)
        device.synchronize()
        (watchdog,) = _watchdogs(model)
        watchdog.check()
        train(model, 1)
        watchdog.check()
        oldest = watchdog._in_flight[0]
        assert isinstance(oldest, Pending) and not oldest.is_reached
        hours = itertools.count(step=3600.0)
        for is_reached in (False, True):
            if is_reached:
                for event in oldest._events_before:
                    event.synchronize()
                assert oldest.is_reached and not oldest.is_done
            with mock.patch("layerzero.watch.watchdog.time.monotonic", hours.__next__):
                watchdog.check()
                watchdog.check()
            assert watchdog.has_failed == is_reached
