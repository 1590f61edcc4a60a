"""On a device: several models at once, which may share its streams, and models that are deleted."""

import gc
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
from layerzero.step.reducer import GradientReducer
from layerzero.watch.watchdog import Watchdog
from tests.harness.fake_ranks import as_fake_ranks
from tests.harness.internals import root_state
from tests.harness.models import WIDTH
from tests.harness.recording import observed
from tests.harness.simulated_device import simulated_device
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


def one_accumulates(one: ZeRO3, other: ZeRO3) -> None:
    for _ in range(2):
        with one.no_sync():
            one(_batch()).sum().backward()
            train(other, 1)
        one(_batch()).sum().backward()
        _step(one)


PAIRS = [one_loss, one_inside_the_other, adversaries, one_accumulates]
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


def _in_backward(model: ZeRO3) -> None:
    def fail(*_: Any) -> None:
        raise ValueError

    with observed(GradientReducer, "reduce", after=fail), suppress(ValueError):
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
    with (
        mock.patch("layerzero.watch.watchdog.run_periodically", lambda *_: None),
        simulated_device(lag=500, on_current_stream=on_current_stream) as device,
    ):
        model = wrapped()
        for _ in range(4):
            train(model, 1)
            _check(_watchdogs(model))
        assert device.findings == []
        device.synchronize()
        _check(_watchdogs(model))
        left = [bool(each._in_flight) for each in _watchdogs(model)]
        assert left and not any(left), "all that was in flight is done"
        assert root_state(model).operations.failure is None
        assert all(device.host.num_answers.values()), "both answers were given"
