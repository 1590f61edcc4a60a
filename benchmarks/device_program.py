"""The program of a step at scale, for `simulator.py`: recorded from the engine, run on a device.

The engine trains a toy model, with as many units as the real one, on a fake group of two nodes of
two ranks (or one node), where a unit's compute is a mark in the program. The order of issue does
not depend on the number of ranks, so that is all it takes: sizes and groups become those of the
real model and the wanted ranks, marks become the real unit's seconds. On a device the host only
issues; what threads do on gloo, streams do there:

    host        spends its time on each operation, and never waits
    compute     units' forward and backward; waits for gathers, and for reductions at the end
    gathers     one collective after the other; each starts when compute has reached the place where
    reductions  the host issued it (it may reuse memory that compute has freed, or read gradients)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from dry_run import Recorder
from simulator import Await, Compute, Operation, Post, Program, Signal, Wait
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

WIDTH = 16
ROOT = "the root unit"
NODE = 2
"""Ranks in a node of the toy's world; there are as many nodes, or one."""


class Unit(NamedTuple):
    """One unit of the real model."""

    numel: float
    forward_s: float
    """Seconds of the device for a micro-batch."""
    backward_s: float


class Mark(NamedTuple):
    """Compute of a unit."""

    unit: int
    is_forward: bool


def record(num_units: int, outer: str, nodes: int, dtype: torch.dtype, sums: torch.dtype) -> Any:
    """The program of rank 0 on gloo, with marks.

    Args:
        outer: of `ZeRO3`.
        nodes: 1 or 2.
        dtype: of gathers.
        sums: of reductions.
    """
    from layerzero import MixedPrecision, ZeRO3

    recorder = Recorder()
    dist.init_process_group("fake", rank=0, world_size=NODE * nodes, store=FakeStore())
    try:
        with recorder.attached():
            toys = (_Toy(number, recorder) for number in range(num_units))
            model = ZeRO3(
                nn.Sequential(*toys),
                auto_wrap_policy={_Toy},
                zero3_size=NODE,
                outer=outer,
                mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=sums),
            )

            def step() -> None:
                model(torch.ones(1, WIDTH)).sum().backward()
                model.zero_grad()

            return [recorder.step(step) for _ in range(3)][-1]
    finally:
        dist.destroy_process_group()


class _Toy(nn.Module):
    def __init__(self, number: int, recorder: Recorder) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self._number, self._recorder = number, recorder

    def forward(self, x: Tensor) -> Tensor:
        return _Marked.apply(self.linear(x), self._number, self._recorder)


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, recorder: Recorder) -> Tensor:
        ctx.number, ctx.recorder = number, recorder
        recorder.note(Mark(number, is_forward=True))  # type: ignore[arg-type]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.recorder.note(Mark(ctx.number, is_forward=False))
        return gradient, None, None


def on_device(
    recorded: Program, units: Sequence[Unit], ranks: int, node_size: int, host_s: float
) -> Program:
    """The program of one of `ranks` on a device, from a recorded one.

    Args:
        host_s: seconds of the host for a unit and step.
    """
    main, *others = recorded.values()
    items = dict(_items(itertools.chain.from_iterable(others)))
    steps = [operation for operation in main if not isinstance(operation, Compute)]
    host_s *= len(units) / len(steps)
    host: list[Operation] = []
    compute: list[Operation] = []
    lanes: dict[str, list[Operation]] = {"gathers": [], "reductions": []}
    for place, step in enumerate(steps):
        host += [Compute(host_s), Signal(("issued", place))]
        compute.append(Await(("issued", place)))
        match step:
            case Mark(unit, is_forward):
                compute.append(Compute(units[unit][1 if is_forward else 2]))
            case Wait() | Await():
                compute.append(_scaled(step, units, ranks, node_size))
            case Post() | Signal():
                item = [step] if isinstance(step, Post) else items[step.name[1]]
                lane = lanes["reductions" if _reduces(item) else "gathers"]
                compute.append(Signal(("reached", place)))
                lane.append(Await(("reached", place)))
                for operation in item:
                    lane.append(scaled := _scaled(operation, units, ranks, node_size))
                    if isinstance(scaled, Post):
                        lane.append(Wait(scaled.collective, scaled.ranks))
    return {"host": host, "compute": compute, **lanes}


def _items(operations: Iterator[Operation]) -> Iterator[tuple[int, list[Operation]]]:
    """What threads do for each item that is queued for them, its signal included."""
    item: list[Operation] = []
    for operation in operations:
        match operation:
            case Await(("queued", _)):
                item = []
            case Signal(("done", number)):
                yield number, [*item, operation]
            case Compute():
                pass
            case _:
                item.append(operation)


def _reduces(item: Sequence[Operation]) -> bool:
    names = [o.collective for o in item if isinstance(o, Post | Wait)]
    return any("reduce" in name or "presence" in name for name in names)


def _scaled(operation: Operation, units: Sequence[Unit], ranks: int, node_size: int) -> Operation:
    if not isinstance(operation, Post | Wait):
        return operation
    name, toy = operation.collective, operation.ranks
    is_outer = toy == (0, NODE)
    group = range(0, ranks, node_size) if is_outer else range(ranks)
    if toy == (0, 1):
        group = range(node_size)
    if isinstance(operation, Wait):
        return Wait(name, group)
    message = next(iter(operation.sends.values()))
    unit = re.search(r" of (\d+) \(#", name)
    if unit is not None:
        # Of the whole unit, a message carries one of so many parts.
        message *= units[int(unit[1])].numel / WIDTH**2 * len(toy) / len(group)
        if is_outer:
            message *= NODE / node_size
    return Post(name, group, {1: message * (len(group) - 1)}, {})


def units_of_ledger(trace: dict[str, Any], itemsize: int) -> list[Unit]:
    """The units of a ledger that was saved (`ledger.save`), by the compute lane of its first rank.

    The root's own compute and parameters become one unit, which is the forward's last.
    """
    steps = trace["otherData"]["num_steps"]
    compute, seconds, nbytes = [], {}, {}
    for event in trace["traceEvents"]:
        if event["pid"] == 0 and event["ph"] == "X":
            name = event["name"].removeprefix("LayerZeRO3.").replace("(model)", f"({ROOT})")
            if event["tid"] == 1:
                compute.append((event["ts"], -event["dur"], name))
            elif name.startswith("unshard("):
                nbytes[name[8:-1]] = event["args"]["bytes"]
    around: list[tuple[float, str]] = []
    for begin, minus, name in sorted(compute):
        while around and around[-1][0] <= begin:
            around.pop()
        if around:
            seconds[around[-1][1]] += minus * 1e-6 / steps
        seconds[name] = seconds.get(name, 0.0) - minus * 1e-6 / steps
        around.append((begin - minus, name))
    labels = [name[8:-1] for name in seconds if name.startswith("forward(")]
    labels.sort(key=lambda label: label == ROOT)
    return [
        Unit(
            nbytes.get(label, 0) / itemsize,
            seconds[f"forward({label})"],
            seconds.get(f"backward({label})", 0.0),
        )
        for label in labels
    ]
