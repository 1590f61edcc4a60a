"""`layerzero.capture`, and graphs that a program makes: a step as graphs has the bits of an eager
one, and leaves the same state.

On the simulated device, whose graphs are tests/harness/simulated_graphs.py. Most of it runs in one
process whose peers send what it does; some, and all of `make soak`, on real ranks.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import layerzero
from layerzero import OffloadPolicy, ZeRO3
from layerzero.graphs import capture as graph_capture
from layerzero.graphs.capture import CapturedStep
from layerzero.optim import AdamW, WholeTensorOptimizer
from tests.harness import captured_steps
from tests.harness.captured_steps import (
    OWN_PROGRAMS,
    PROGRAMS,
    SAMPLE,
    OwnGraph,
    Program,
    draw_alike,
)
from tests.harness.checks import assert_bitwise, named
from tests.harness.fake_ranks import run_fake_ranks, run_mirrored
from tests.harness.internals import (
    GradientReducer,
    HostMemory,
    Operations,
    Unit,
    root_state,
    watchdog,
)
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.recording import observed
from tests.harness.simulated_device import SimulatedDevice, simulated_device
from tests.harness.stream_uses import LAYERED, SETTINGS, wrapped


class Run(NamedTuple):
    """What a program left."""

    values: list[Tensor]
    weights: list[Tensor]
    captured: list[CapturedStep | OwnGraph]
    device: SimulatedDevice


def run(program: Program, by: str, steps: int, group: Any, **settings: Any) -> Run:
    """`by`: "capture" captures steps, "graph" has the program make graphs, "" neither."""
    captured: list[CapturedStep | OwnGraph] = []

    def wrap(step: Callable[..., Any], *sample: Any) -> Callable[..., Any]:
        if not by:
            return step
        make = functools.partial(OwnGraph, device, captured_steps.CPU)
        captured.append((make if by == "graph" else layerzero.capture)(step, *sample))
        return captured[-1]

    with simulated_device() as device:
        model = wrapped(group, **settings)
        draw_alike()
        values = [value.detach().clone() for value in program(model, wrap, steps)]
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        for each in captured:
            if isinstance(each, OwnGraph):
                each.order_warm_up()
        model.zero_grad()
    return Run(values, weights, captured, device)


def _check(
    cases: list[tuple[str, dict[str, Any], str]],
    steps: int,
    is_alone: bool = False,
    by: str = "capture",
) -> None:
    """Programs, each in a setting, as graphs have the bits of eager steps."""
    group = None if is_alone else make_plain_group(timedelta(seconds=60))
    for name, arguments, program in cases:
        with named(name, program):
            function = (PROGRAMS | OWN_PROGRAMS)[program]
            eager = run(function, "", steps, group, **arguments)
            graphs = run(function, by, steps, group, **arguments)
            for what in ("values", "weights"):
                pairs = zip(getattr(graphs, what), getattr(eager, what), strict=True)
                for number, pair in enumerate(pairs):
                    assert_bitwise(*pair, f"{what}[{number}]")
            assert not graphs.device.graph_faults and not graphs.device.findings
            assert all(each.num_replays for each in graphs.captured)


NAMES, OWN_NAMES = [*PROGRAMS], [*OWN_PROGRAMS]


def _cases(names: list[str], settings: dict[str, dict[str, Any]]) -> list[Any]:
    """Each setting with one of the programs."""
    turns = zip(settings, itertools.cycle(names), strict=False)
    return [(setting, settings[setting], name) for setting, name in turns]


def test_replays_have_the_bits_of_eager_steps() -> None:
    """Each program, and each setting with one of them."""
    cases = [("default", {}, name) for name in NAMES] + _cases(NAMES, SETTINGS)
    run_mirrored(0, 2, _check, cases, 9, True, timeout=300)


@pytest.mark.parametrize(
    ("world_size", "settings"), [(2, SETTINGS), (4, LAYERED)], ids=["one group", "layered"]
)
def test_graphs_that_a_program_makes_have_the_bits_of_eager_steps(
    world_size: int, settings: dict[str, dict[str, Any]]
) -> None:
    """Each program, and each setting with one of them; an arena, of which a replay uses the
    addresses, with those that run several graphs."""
    cases = [("default", {}, name) for name in OWN_NAMES if world_size == 2]
    cases += _cases(OWN_NAMES, settings)
    for name, arguments in settings.items():
        if "arena" in name:
            cases += [(name, arguments, own) for own in ("train_and_evaluate", "two_towers")]
    run_mirrored(0, world_size, _check, cases, 9, True, "graph", timeout=300)


def test_replays_on_real_ranks_have_the_bits_of_eager_steps(
    ranks: KeptRanks, in_full: bool
) -> None:
    """`make soak`: a hundred steps in every setting, of accumulation, of two others in turns, and
    of a graph that the program makes."""
    few = [("default", {}, "train_and_evaluate"), ("bfloat16", SETTINGS["bfloat16"], NAMES[1])]
    if not in_full:
        ranks(2, _check, few, 8)
        return
    for world_size, settings in ((2, SETTINGS), (4, LAYERED)):
        for place, (name, arguments) in enumerate(settings.items()):
            others = [NAMES[(2 * place + more) % len(NAMES)] for more in range(2)]
            programs = {"capture": ["accumulation", *others], "graph": OWN_NAMES[place % 7 :][:1]}
            for by, each in programs.items():
                cases = [(name, arguments, program) for program in each]
                ranks(world_size, _check, cases, 100, False, by, timeout=500)


def _forgets_a_stream(device: Any, x: Tensor) -> None:
    stream = device.Stream(device.index)
    stream.wait_stream(device.current_stream(device.index))
    with device.stream(stream):
        x.add_(1)


def _uses_another_stream(device: Any, x: Tensor) -> None:
    with device.stream(device.Stream(device.index)):
        x.clone()


FORBIDDEN: dict[str, Callable[[Any, Tensor], object]] = {
    "the host waits (_local_scalar_dense)": lambda _, x: x[0].item(),
    "the host waits (synchronize of compute)": lambda device, _: device.synchronize(),
    "the host waits (synchronize of an event": lambda device, _: _event(device).synchronize(),
    "the host asks for an event": lambda device, _: _event(device).query(),
    "memory of the host is allocated": lambda *_: _pinned(),
    "a graph repeats a copy_ of the host's memory": lambda _, x: x.copy_(PINNED[0]),
    "which is not in the capture": _uses_another_stream,
    "the capture ends before": _forgets_a_stream,
    "a rank reads from the store": lambda *_: watchdog._published(dist.HashStore(), 0),
    "the watchdog watches a collective": lambda *_: _watched_unshard(),
}
"""What the simulated device says of an act inside a capture, and the act."""
PINNED: list[Tensor] = []
MODELS: list[ZeRO3] = []


def _pinned() -> Tensor:
    return HostMemory(True, captured_steps.CPU).empty(3, torch.float32)


def _event(device: Any) -> Any:
    return device.current_stream().record_event()


def _watched_unshard() -> None:
    watched = property(lambda _: True, lambda *_: None)
    with mock.patch.object(Operations, "is_watched", watched):
        for unit in layerzero.units(MODELS[-1]):
            unit.unshard()


@on_ranks(2)
def test_the_simulated_device_sees_what_a_graph_forbids() -> None:
    group = make_plain_group(timedelta(seconds=60))
    for fault, act in FORBIDDEN.items():
        with simulated_device() as device:
            PINNED[:], MODELS[:] = [_pinned()], [wrapped(group)]
            x, graph = torch.ones(3), device.CUDAGraph()
            with device.graph(graph):
                act(device, x)
            assert any(fault in each for each in device.graph_faults), (fault, device.graph_faults)
    with simulated_device() as device:
        x, graph = torch.ones(3), device.CUDAGraph()
        with device.graph(graph):
            x.add_(1)
        x.untyped_storage().resize_(0)
        graph.replay()
        [fault] = device.graph_faults
    assert "a replay of add_ uses memory that was freed or moved since" in fault


@on_ranks(2)
def test_on_a_cpu_every_call_is_eager() -> None:
    for program in (captured_steps.native_adamw, captured_steps.train_and_evaluate):
        values = []
        for is_captured in (False, True):
            model = wrapped()
            draw_alike()
            wrap: Any = layerzero.capture if is_captured else lambda step, *sample: step
            with mock.patch.object(graph_capture._logger, "info") as info:
                values.append([each.detach() for each in program(model, wrap, 5)])
            assert bool(info.call_args_list) is is_captured
        assert all(map(torch.equal, *values)), program.__name__


def _train_on(model: Any) -> None:
    captured_steps._backward(model, torch.randn(3, captured_steps.WIDTH))


def _train(model: Any) -> None:
    _train_on(model)
    model.zero_grad()


def _left(model: Any) -> None:
    with model.no_sync():
        _train_on(model)


def _unsharded(model: Any) -> None:
    _train(model)
    model.unshard()


def _in_backward(model: Any) -> None:
    model.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    _train(model)


def _with_a_hook(model: Any) -> None:
    next(model.parameters()).register_hook(lambda gradient: gradient)
    _train(model)


def _with_a_scaler(model: Any) -> None:
    optimizer, scaler = AdamW(model.parameters()), layerzero.GradScaler("cpu")
    scaler.scale(model(torch.randn(3, captured_steps.WIDTH)).sum()).backward()
    scaler.step(optimizer)


REFUSED: list[tuple[str, dict[str, Any], Callable[[Any], None]]] = [
    ("offload", {"offload": OffloadPolicy(grads=True)}, _train),
    ("what layerzero.optim.nonfinite does", {"on_nonfinite": "skip"}, _train),
    ("gradients of no_sync that wait for the next call", {}, _left),
    ("units that stay unsharded between two calls", {}, _unsharded),
    ("what layerzero.optim.in_backward does", {}, _in_backward),
    ("hooks on sharded parameters", {}, _with_a_hook),
    ("a GradScaler", {}, _with_a_scaler),
]
"""What a graph cannot contain, how a model is built with it, and a step."""


@on_ranks(2)
def test_what_a_graph_cannot_contain_is_refused_before() -> None:
    """By `layerzero.capture`, and by a forward in a graph that the program makes."""
    for reason, arguments, step in REFUSED:
        group, text = make_plain_group(timedelta(seconds=60)), f"a graph cannot contain {reason}$"
        with simulated_device() as device, named(reason):
            model = wrapped(group, **arguments)
            with pytest.raises(RuntimeError, match=text):
                layerzero.capture(functools.partial(step, model))()
            fails: Any = pytest.raises(RuntimeError, match=f"the root unit: {text}")
            if step is _with_a_scaler:  # None of the model's: torch's own error is of its step.
                fails = nullcontext()
            with device.graph(device.CUDAGraph()), fails:
                model(SAMPLE)
            assert not device.graph_faults, "nothing was recorded"


@on_ranks(2)
def test_a_graph_of_a_pass_that_has_not_run_is_refused() -> None:
    group = make_plain_group(timedelta(seconds=60))
    with simulated_device() as device:
        model = wrapped(group)
        _train(model)
        model.eval()
        text = "the root unit: a graph cannot contain a pass that has not run yet"
        for context in (torch.no_grad(), torch.enable_grad()):
            with context, device.graph(device.CUDAGraph()), pytest.raises(RuntimeError, match=text):
                model(SAMPLE)
        assert not device.graph_faults
        model.train()
        with device.graph(device.CUDAGraph()):
            _train(model)
        assert not device.graph_faults


@on_ranks(2)
def test_work_on_side_streams_is_in_the_graph_of_its_pass() -> None:
    def add_beside(_: None, reducer: GradientReducer, unit: Unit) -> None:
        tensor = unit.handles[0].full.data.new_ones(3)
        with unit.context.streams.offload:  # Compute waits for it nowhere else.
            tensor.add_(1)

    with observed(GradientReducer, "reduce", after=add_beside), simulated_device() as device:
        model = wrapped(make_plain_group(timedelta(seconds=60)))
        for _ in range(3):
            _train(model)
        with device.graph(device.CUDAGraph()):
            _train(model)
        assert not device.graph_faults


def _step_in_a_graph() -> None:
    whole = functools.partial(WholeTensorOptimizer, optimizer_class=torch.optim.SGD)
    for name, make in {"AdamW": AdamW, "WholeTensorOptimizer": whole}.items():
        with simulated_device() as device:
            model = wrapped()
            optimizer = make(model.parameters(), lr=0.1)
            _train_on(model)
            optimizer.step()
            model.zero_grad()
            with device.graph(device.CUDAGraph()):
                _train_on(model)
                with pytest.raises(RuntimeError, match=f"{name}.step: a graph would repeat the r"):
                    optimizer.step()
            assert not device.graph_faults
            model.zero_grad()


def test_native_optimizers_refuse_to_step_in_a_graph() -> None:
    run_fake_ranks([0], 2, _step_in_a_graph)


@contextmanager
def _in_place_of_cuda(device: SimulatedDevice) -> Iterator[None]:
    """What `make_graphed_callables` uses of `torch.cuda` is the simulated device's."""
    uses = ("CUDAGraph", "graph", "stream", "synchronize")
    used = {name: getattr(device, name) for name in uses}
    used["Stream"] = functools.partial(device.Stream, device.index)
    with (
        mock.patch.multiple(torch.cuda, **used),
        mock.patch.object(torch.cuda.graphs, "graph_pool_handle", lambda: None),
    ):
        yield


@on_ranks(2)
def test_graphed_callables_are_refused() -> None:
    """They take the gradients of a module's parameters from autograd, which are shards here."""
    group = make_plain_group(timedelta(seconds=60))
    given = SAMPLE.clone().requires_grad_()
    with simulated_device() as device, _in_place_of_cuda(device):
        make = torch.cuda.make_graphed_callables
        model = wrapped(group)
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            make(model, (given,))
        del model
        model = wrapped(group)
        with pytest.raises(RuntimeError, match="get none in make_graphed_callables"):
            make(model, (given,), allow_unused_input=True)


@on_ranks(1)
def test_a_sample_is_checked() -> None:
    with pytest.raises(ValueError, match="no sharded model is alive"):
        layerzero.capture(_train, SAMPLE)
    model = wrapped()
    for wrong in (torch.ones(1, requires_grad=True), object(), {"a": [object()]}):
        with pytest.raises(ValueError, match="expected a sample of tensors that require no grad"):
            layerzero.capture(_train, SAMPLE, wrong)
    del model


@on_ranks(2)
def test_the_watchdog_knows_a_replay_by_its_name() -> None:
    group = make_plain_group(timedelta(seconds=60))
    with simulated_device():
        model = wrapped(group)
        [watchdog] = {
            root_state(model).operations._watchdog_of(handle.placement.shard_group)
            for unit in root_state(model).units
            for handle in unit.handles
        }
        assert watchdog is not None, "its messages carry no names"
        train = layerzero.capture(functools.partial(_train, model))
        for _ in range(graph_capture.WARM_UP_CALLS + 1):
            train()
        issued = mock.MagicMock(**{"__bool__.return_value": False})  # Its thread takes none out.
        with mock.patch.object(watchdog, "issued", issued):
            train()
    [call] = issued.append.call_args_list
    assert call.args[0].name.split(" (")[0] == "replay of partial"
