"""On a device with streams every two accesses of the same memory are ordered, and the host is free;
also where collectives run on the current stream and return no work, as NCCL's with
asyncOp=False; with several models at once, which may share its streams, and models that are
deleted."""

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from layerzero import BackwardPrefetch, MixedPrecision, OffloadPolicy, ZeRO3
from layerzero.optim import WholeTensorOptimizer
from tests.harness.fake_ranks import as_fake_ranks, run_fake_ranks
from tests.harness.internals import (
    GradientReducer,
    Operation,
    Pending,
    ShardGroup,
    Streams,
    Unit,
    Watchdog,
    collectives,
    exchanges,
    hooks,
    root_state,
    streams,
)
from tests.harness.models import WIDTH
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import on_ranks
from tests.harness.recording import observed
from tests.harness.simulated_device import simulated_device
from tests.harness.stream_uses import (
    HOST_USES,
    LAYERED,
    MOMENTUM,
    OFFLOADED,
    SETTINGS,
    USES,
    a_missing_gradient,
    accumulation,
    evaluation_between,
    optimizing_after_a_forward,
    pipelining,
    plain_steps,
    recomputation,
    streaming,
    train,
    whole_tensors,
    wrapped,
)

MAKING_WHOLE_TENSORS = {
    *(f"{what} in exchanges.gather_bytes" for what in ("tolist", "tensor", "copy_")),
    *("_local_scalar_dense in new_groups.agree_on_group_names", "tolist in owners.__init__"),
    *("tolist in owners._held", "tolist in compare.bounds"),
}
"""Once for each optimizer of whole tensors: ranks compare what it was given."""
BY_DESIGN = {
    "tolist in first_forward.written": "the first forward is looked at, once a model",
    "equal in first_forward.found": "the same",
    "copy_ in presence.flags_tensor": "a rank misses a gradient: it tells the others",
    "tolist in presence.answer": "and has to know what they had",
}
"""What blocks the host after a model is wrapped -> why."""
BY_DESIGN_OFFLOADED = {
    "tolist in first_forward.written": BY_DESIGN["tolist in first_forward.written"],
    "equal in first_forward.found": BY_DESIGN["equal in first_forward.found"],
    "tolist in first_forward._orders": "the same, where a part was written after sharding",
    "synchronize of an event on offload in reducer._add_parts": "an optimizer on the host reads "
    "gradients",
    "synchronize of an event on pre_unshard in context.wait_for_uploads": "an optimizer on "
    "the host may write weights once forward has returned",
    "copy_ in stepping.finish": "whole tensors on the host are stepped there",
}
FREED = {
    ("full buffer", "unshard"),
    ("main shard", "compute"),
    ("unsharded gradient", "compute"),
    ("gradient buffer", "compute"),
    ("reduced chunk", "compute"),
    ("sum of a hop", "reduce"),
    ("received parts", "reduce"),
    ("gradient presence", "compute"),
    ("streamed bucket", "unshard"),
    ("packed pieces", "compute"),
}
FREED_IN_LAYERS = {
    ("compute shard", "compute"),
    ("shard kept for backward", "compute"),
    ("sum between hops", "reduce"),
}
FREED_OFFLOADED = {
    ("staged main shard", "pre_unshard"),
    ("staged sum", "offload"),
    ("reduced chunk", "reduce"),  # On its way to the host, or to a sum there.
}
"""(what, stream that owns it): the engine's memory of which frees must have been looked at."""


USES_OF_THE_LAST = (
    *(plain_steps, accumulation, evaluation_between, recomputation, pipelining),
    *(streaming, a_missing_gradient, optimizing_after_a_forward, whole_tensors),
)


ALWAYS = (accumulation,)
"""In every setting; the other uses go through the settings in turns, and `make soak` has all."""


class Found(NamedTuple):
    """In some settings and uses."""

    findings: dict[str, list[str]]
    host_waits: set[str]
    freed: set[tuple[str, str]]


def _sweep(
    settings: dict[str, dict[str, Any]], uses: list[Callable[..., None]], in_full: bool
) -> Found:
    """Unless `in_full`, all uses in the first setting and with two lanes, and a quarter of them in
    each other one."""
    found = Found({}, set(), set())
    is_first = dist.get_rank() == 0
    for place, (name, arguments) in enumerate(settings.items()):
        has_all = in_full or not place or "two lanes" in name
        for number, use in enumerate(uses):
            if not (is_first or use in USES_OF_THE_LAST):
                continue
            if not has_all and use not in ALWAYS and (place + number) % 4:
                continue
            with simulated_device(on_current_stream=not is_first) as device:
                model = wrapped(**arguments)
                device.host_waits.clear()
                use(model)
                found.host_waits.update(map(str, device.host_waits))
                del model
            if device.findings:
                found.findings[f"{name}, {use.__name__}"] = device.findings
            found.freed.update(device.memory.freed)
    return found


def _layered(size: int) -> dict[str, dict[str, Any]]:
    return {name: each for name, each in LAYERED.items() if each["zero3_size"] == size}


class Sweep(NamedTuple):
    world_size: int
    settings: dict[str, dict[str, Any]]
    uses: list[Callable[..., None]]
    host_waits: dict[str, str]
    freed: set[tuple[str, str]]


SWEEPS = {
    "one shard group": Sweep(2, SETTINGS, USES, BY_DESIGN, FREED),
    "outer axis": Sweep(4, _layered(2), USES, BY_DESIGN, FREED | FREED_IN_LAYERS),
    # Whole parameters leave two ranks an outer axis. Nothing is freed before the model is.
    "whole parameters": Sweep(2, _layered(1), USES, BY_DESIGN, {("full buffer", "compute")}),
    "host": Sweep(2, OFFLOADED, HOST_USES, BY_DESIGN_OFFLOADED, FREED_OFFLOADED),
}


# Layered modes take most of the time and wait as these do; `--slow` has them.
QUICK = ("one shard group",)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SWEEPS],
)
def test_every_two_accesses_are_ordered(name: str, in_full: bool) -> None:
    """A free counts as an access of the stream that owns the memory."""
    world_size, settings, uses, host_waits, freed = SWEEPS[name]
    each = (0, world_size - 1)
    ranks = run_fake_ranks(each, world_size, _sweep, settings, uses, in_full, timeout=300)
    assert [found.findings for found in ranks] == [{}, {}]
    waits = ranks[0].host_waits | ranks[1].host_waits
    assert waits - MAKING_WHOLE_TENSORS == set(host_waits)
    assert ranks[0].freed | ranks[1].freed >= freed


def _steady_host_waits(settings: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    found = {}
    for name, arguments in settings.items():
        with simulated_device() as device:
            model = wrapped(**arguments)
            train(model, 2)
            device.host_waits.clear()
            train(model, 1, torch.optim.AdamW)
            found[name] = sorted(set(map(str, device.host_waits)))
            device.host_waits.clear()
            model.clip_grad_norm_(1.0).item()
            assert [str(wait) for wait in device.host_waits] == [
                "_local_scalar_dense in code outside the engine"
            ], "the device reports what the test itself does"
    return found


def _steady_whole_tensors() -> list[str]:
    with simulated_device() as device:
        model = wrapped()
        optimizer = WholeTensorOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9, bucket_bytes=200
        )
        for step in range(3):
            model(torch.randn(3, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                device.host_waits.clear()
    return sorted(set(map(str, device.host_waits)))


def test_no_operation_of_a_step_blocks_the_host() -> None:
    for world_size, settings in ((2, SETTINGS), (4, _layered(2)), (2, _layered(1))):
        for found in run_fake_ranks((0,), world_size, _steady_host_waits, settings):
            assert found == {name: [] for name in settings}
    assert run_fake_ranks((0,), 2, _steady_whole_tensors) == [[]]


class _OnStream(torch.autograd.Function):
    """A product whose backward runs as autograd runs a node: on the stream of its forward, after
    its gradient. What it used stays until all streams have met."""

    @staticmethod
    def forward(ctx: Any, device: Any, used: list[Any], x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.device, ctx.used, ctx.stream = device, used, device.current_stream(1)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.used += x, gradient
        ctx.stream.wait_stream(ctx.device.current_stream(1))
        with ctx.device.stream(ctx.stream):
            return None, None, gradient @ weight, gradient.t() @ x


class _Tower(nn.Module):
    def __init__(self, device: Any, used: list[Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.args = device, used

    def forward(self, x: Tensor) -> Tensor:
        return _OnStream.apply(*self.args, x, self.weight)


class _Towers(nn.Module):
    """Two units compute on streams of their own, and meet."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.device, self.used = device, []
        self.towers = nn.ModuleList(_Tower(device, self.used) for _ in range(3))
        self.streams = [device.Stream(torch.device("cuda", 1)) for _ in range(2)]

    def meet(self) -> Any:
        compute = self.device.current_stream(1)
        for stream in self.streams:
            compute.wait_stream(stream)
            stream.wait_stream(compute)
        self.used.clear()
        return compute

    def forward(self, x: Tensor) -> Tensor:
        compute = self.meet()
        for tower, stream in zip(self.towers, self.streams, strict=False):
            with self.device.stream(stream):
                self.used += (tower(x),)
        for stream in self.streams:
            compute.wait_stream(stream)
        return self.towers[2](self.used[0] + self.used[1])


def _train_towers(arguments: dict[str, Any]) -> list[str]:
    begin_backward = hooks._begin_backward

    def on_the_stream_of_forward(calls: list[Any], gradient: Tensor) -> None:
        """As autograd calls hooks of a node."""
        number = calls[0].unit.fqn[-1:]
        stream = model.streams[int(number)] if number in ("0", "1") else model.compute
        stream.wait_stream(device.current_stream(1))
        with device.stream(stream):
            begin_backward(calls, gradient)

    with simulated_device(on_current_stream=True) as device:
        model = ZeRO3(_Towers(device), auto_wrap_policy={_Tower}, **arguments)
        model.compute = device.current_stream(1)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(4):
            with (
                mock.patch.object(hooks, "_begin_backward", on_the_stream_of_forward),
                model.no_sync() if step == 1 else nullcontext(),
            ):
                model(torch.randn(3, WIDTH)).sum().backward()
            model.meet()
            optimizer.step()
            optimizer.zero_grad()
    return device.findings


@as_fake_ranks((0,), 4)
def test_units_may_compute_on_streams_of_their_own() -> None:
    settings = (
        *({}, {"reshard_after_forward": False}, {"zero3_size": 2}, {"accumulation": "sharded"}),
        {"zero3_size": 2, "outer": "shard", "reshard_after_forward": "compute_shard"},
    )
    for arguments in settings:
        assert _train_towers(arguments) == [], arguments


def _waits_for_the_reduction_before(mode: BackwardPrefetch | None) -> list[bool]:
    """For each block in backward, whether it waits for the reduction that was queued last."""
    waits: list[bool] = []
    last: dict[int, int] = {}
    with simulated_device() as device:
        model = wrapped(backward_prefetch=mode)
        train(model, 2, torch.optim.SGD)
        loss = model(torch.randn(3, WIDTH)).sum()

        def reduced(*_: object) -> None:
            nonlocal last
            last = device.queued_collectives

        def shown(_: None, unit: Unit) -> None:
            if last and unit.fqn:
                waits.append(device.compute_waits_for(last))

        with (
            observed(GradientReducer, "reduce", after=reduced),
            observed(Unit, "show_unsharded", after=shown),
        ):
            loss.backward()
    return waits


@as_fake_ranks((0, 1), 2)
def test_a_prefetched_unit_does_not_wait_for_the_reduction_before_it() -> None:
    for mode in (None, *BackwardPrefetch):
        found = _waits_for_the_reduction_before(mode)
        assert len(found) >= 2 and set(found) == {mode is None}


def _losses(simulated: bool, **settings: Any) -> list[float]:
    group = make_plain_group(timedelta(seconds=60))
    with simulated_device(**settings) if simulated else nullcontext() as device:
        losses = train(wrapped(group), 4)
    assert device is None or device.findings == []
    return [loss.item() for loss in losses]


@on_ranks(2)
def test_the_simulation_trains_like_the_cpu() -> None:
    """With real ranks, on a backend that does not average: the engine scales the sum."""
    plain = _losses(simulated=False)
    assert plain == [loss.item() for loss in train(wrapped(), 4)], "two addends have one sum"
    for settings in ({}, {"on_current_stream": True}, {"num_streams": 4}):
        assert _losses(simulated=True, **settings) == plain, settings


class Recorder:
    """A process group that keeps the options it is given."""

    def __init__(self) -> None:
        self.options: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.options.append(args[-1])


@pytest.mark.parametrize(("backend", "has_work"), [("nccl", False), ("hccl", True)])
def test_backends_known_to_use_the_current_stream_are_asked_to(backend, has_work) -> None:
    asked = Recorder()
    group = ShardGroup(asked, 0, (0, 1), backend, timedelta(seconds=1))
    whole, part = torch.zeros(4), torch.zeros(2)
    collectives._issue_all_gather(whole, part, group)
    collectives._issue_reduce_scatter(part, whole, dist.ReduceOp.SUM, group)
    assert [options.asyncOp for options in asked.options] == [has_work] * 2
    with mock.patch.object(dist, "broadcast", return_value=None) as broadcast:
        exchanges.broadcast(whole, group, Operation("broadcast", "a", 1)).wait()
    assert broadcast.call_args.kwargs["async_op"] is has_work
    with mock.patch.object(dist, "all_to_all_single", return_value=None) as exchange:
        collectives.reduce_scatter(whole, group, Operation("sum", "a", 2), deterministic=True)
    assert exchange.call_args.kwargs["async_op"] is has_work


def test_an_error_of_the_call_names_the_collective() -> None:
    group = ShardGroup(None, 0, (0, 1), "nccl", timedelta(seconds=1))
    pending = Pending(Operation("all-gather", "a", 1), group, 8)

    def fail() -> None:
        raise RuntimeError("NCCL communicator was aborted")

    with (
        mock.patch.object(Pending, "diagnose", lambda pending, error: ValueError(pending.name)),
        pytest.raises(ValueError, match=r"all-gather of a \(#1\)"),
    ):
        pending.start(fail)


class _Stream:
    """A context, as torch's own are."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.priority, self.is_current = priority, False

    def __enter__(self) -> None:
        self.is_current = True

    def __exit__(self, *_: object) -> None:
        self.is_current = False

    def record_event(self) -> object:
        assert self.is_current
        return object()


class _Module:
    stream = None
    current_stream = staticmethod(lambda index: None)

    def __init__(self, has_priorities: bool) -> None:
        self.Stream = _Stream if has_priorities else lambda device: _Stream(device)


def test_streams_enter_themselves_and_those_that_compute_waits_for_are_urgent(monkeypatch) -> None:
    for urgent in (-1, 0):
        module = _Module(has_priorities=urgent < 0)
        monkeypatch.setattr(streams.torch, "get_device_module", lambda _, own=module: own)
        made = Streams(torch.device("cuda", 0))
        each = (made.pre_unshard, made.unshard, made.reduce, made.offload)
        assert [stream._stream.priority for stream in each] == [*[urgent] * 3, 0]
        with made.unshard as stream:
            before = made.record_event()
            assert made.events_before() == stream.events_before == (before,)
            stream.wait(None)
            assert stream.events_before == (before,)
        assert not stream._stream.is_current


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
BOTH: list[tuple[dict[str, Any], dict[str, Any]]] = [
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
    ways = [(BOTH[1], DEVICES[1]), (BOTH[2], DEVICES[2])]
    if dist.get_rank() == 0:
        ways += [(BOTH[0], each) for each in DEVICES]
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
    settings = ({}, {"reshard_after_forward": False}, *(each for pair in BOTH for each in pair))
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
