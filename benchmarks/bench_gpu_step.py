"""A training step of one rank of many on one GPU: time, host time, memory, and a checked trace.

    python -m benchmarks.bench_gpu_step --part step        (from the root of the repository)

The other ranks do not exist: the world is torch's fake group, and collectives run as one-rank NCCL
calls that bring bytes of the right number (tests/gpu/mirror.py, without comparing), in the time
that a link would take for them, on as many SMs as NCCL takes (tests/gpu/link.py), for each engine
alike. So launches, streams, memory and the host's work are those of a real step.

Parts, each meant for a process of its own:

    ceilings    what the device reaches in a copy and in a matrix product
    step        forward and backward, and the optimizer: engines take turns in each round
    host        host time of a unit, where a unit keeps the device busy for 1 ms and for 5 ms
    memory      bytes at rest and at the peak
    optimizer   clip and step of one rank's shards, on the device and on the host; the time of the
                step over that of its bytes at the rate of a copy
    trace       two steps under the profiler, checked by gpu_trace.py
    peers       whole steps of every engine that is installed, on a real group of one rank
    checkpoint  a save and a load, on a real group of one rank

Each row that is done is printed, followed by the JSON of all so far: "rows" have a value for each
engine, "measures" are what gpu_expected.py expects something of, by "name@of what".
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from benchmarks import gpu_trace, peers
from benchmarks.common import (
    STATE_NBYTES,
    Spread,
    environment,
    interleave,
    print_json,
    step_nbytes,
)
from benchmarks.engines import Transformer
from layerzero import MixedPrecision, ZeRO3, checkpoint, optim
from layerzero.comm import collectives
from layerzero.flat.placement import ShardGroup
from tests.gpu.link import Link
from tests.gpu.mirror import Wires, fake_world, one_rank_group

ENGINES = ("bare", "fully_shard", "layerzero")
SIZES = {  # width, layers, heads, hidden
    "1b": (2048, 16, 16, 8192),
    "1b/2": (2048, 8, 16, 8192),
    "1b/4": (2048, 4, 16, 8192),
    "8b/4": (4096, 8, 32, 14336),
    "tiny": (32, 3, 2, 64),
}
VARIANTS = ("", "compile", "checkpoint")
RANK = 3
_LINK_REPEATS = 8
WARMUP = 2
"""Rounds before those that count."""


@dataclass(frozen=True)
class Config:
    size: str
    cells: Sequence[tuple[int, int]]
    """(sequences, bytes in each) of the batches to measure."""
    rounds: int
    device: torch.device
    worlds: Sequence[int] = (8,)
    variant: str = ""
    """One of `VARIANTS`: blocks are compiled, or recomputed."""
    link: Link | None = field(default_factory=Link)
    seconds: float = 4.0
    """For the rounds of a cell: there are fewer if they would take longer, but three."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def num_units(self) -> int:
        return SIZES[self.size][1] + 1

    def build(self) -> Transformer:
        width, layers, heads, hidden = SIZES[self.size]
        length = max(length for _, length in self.cells)
        torch.manual_seed(0)
        with self.device:
            model = Transformer(width, layers, heads, length, hidden)
        if self.variant == "compile":
            for block in model.blocks:
                block.compile()
        if self.variant == "checkpoint":
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
                checkpoint_wrapper,
            )

            model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
        return model

    def named(self, world: int, cell: tuple[int, int] | None = None) -> str:
        batch = f" {cell[0]} x {cell[1]}" if cell else ""
        return f"{self.size}{batch} {self.variant}".strip() + f", rank {RANK} of {world}"


class Report:
    """What a part has found so far."""

    def __init__(self, part: str, config: Config) -> None:
        self._result: dict[str, Any] = {
            "benchmark": "gpu_step",
            "part": part,
            "rows": [],
            "measures": {},
            "details": {"failures": []},
            "config": {**vars(config), "device": str(config.device)},
            "environment": environment(),
        }
        self._result["config"]["link"] = vars(config.link) if config.link else None
        self.details: dict[str, Any] = self._result["details"]

    def row(self, what: str, unit: str, values: dict[str, float], **measures: float) -> None:
        """`measures`: by their names of gpu_expected.py."""
        self._result["rows"].append({"what": what, "unit": unit, "values": values})
        self._result["measures"] |= {f"{name}@{what}": each for name, each in measures.items()}
        print(what, {name: round(value, 4) for name, value in values.items()}, unit, measures)
        self.publish()

    def failed(self, what: str) -> None:
        """Note the error that is being handled."""
        traceback.print_exc()
        error = sys.exc_info()[1]
        self.details["failures"].append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
        self.publish()

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """An error inside ends neither the part nor what was found."""
        try:
            yield
        except Exception:
            self.failed(what)

    def publish(self) -> None:
        print_json(self._result)

    @property
    def has_failed(self) -> bool:
        return bool(self.details["failures"])


class Flow(Wires):
    """Brings the same small random values into every gather; compares nothing."""

    def __init__(self, device: torch.device, link: Link | None = None) -> None:
        super().__init__(device, link=link)
        self._values = torch.empty(0, dtype=torch.bfloat16, device=device)

    def arriving(self, full: Tensor, shard: Tensor, group: ShardGroup) -> Tensor:
        if full.dtype != torch.bfloat16:
            return super().arriving(full, shard, group)
        return self.values(full.numel())

    def values(self, numel: int) -> Tensor:
        if self._values.numel() < numel:
            self._values = torch.empty(numel, dtype=torch.bfloat16, device=self.device).normal_(
                std=0.02
            )
        return self._values[:numel]


def _with_fully_shard(model: nn.Module, unit: type[nn.Module], flow: Flow | None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [m for m in model.modules() if isinstance(m, unit)] + [model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if flow is not None:
        gather, scatter = _collectives_over(flow)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(scatter)
    return model


def _collectives_over(flow: Flow) -> tuple[Any, Any]:
    """fully_shard's all-gather and reduce-scatter, as `Wires` does those of layerzero."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

    real = one_rank_group(flow.device)
    rank, ranks = dist.get_rank(), range(dist.get_world_size())

    class Gather(DefaultAllocMixin, AllGather):
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
        ) -> Any:
            options = AllgatherOptions()
            options.asyncOp = async_op
            values = flow.values(output_tensor.numel())
            values = flow.over_link(output_tensor, values, output_tensor.nbytes, ranks, rank)
            return getattr(real, collectives._ALL_GATHER)(output_tensor, values, options)

    class Scatter(DefaultAllocMixin, ReduceScatter):
        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: Any,
            op: Any,
            async_op: bool = False,
        ) -> Any:
            options = ReduceScatterOptions()
            if flow.device.type != "cuda" or flow.link is not None:
                op = dist.ReduceOp.SUM  # As in `Wires.reduce_scatter`.
            is_plain = isinstance(op, dist.ReduceOp.RedOpType)
            options.reduceOp = dist.ReduceOp(op) if is_plain else op
            options.asyncOp = async_op
            output = output_tensor.view(-1)
            own = input_tensor.view(len(ranks), -1)[rank]
            own = flow.over_link(output, own, input_tensor.nbytes, ranks, rank)
            return getattr(real, collectives._REDUCE_SCATTER)(output, own, options)

    return Gather(), Scatter()


class Training:
    """One engine's model with its optimizer, on one batch."""

    def __init__(
        self, engine: str, config: Config, flow: Flow | None, states: str | None = None
    ) -> None:
        """`states`: dtype of the states of `layerzero.optim.AdamW`; None: torch's, fused."""
        self._device = config.device
        model: nn.Module = config.build()
        unit = type(model.blocks[0])  # type: ignore[index]
        if engine == "layerzero":
            precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            model = ZeRO3(model, auto_wrap_policy={unit}, mixed_precision=precision)
        elif engine == "fully_shard":
            model = _with_fully_shard(model, unit, flow)
        else:
            model = model.to(torch.bfloat16)
        self.model = model
        parameters = list(model.parameters())
        self.optimizer: torch.optim.Optimizer
        if states is None:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        else:
            self.optimizer = optim.AdamW(parameters, lr=1e-4, state=states)
        self.feed(*config.cells[0])

    def feed(self, batch: int, length: int) -> None:
        self.batch = torch.randint(256, (batch, length + 1), device=self._device)

    def passes(self) -> None:
        self.model(self.batch).backward()

    def clip(self) -> None:
        for owner in (self.optimizer, self.model):
            if hasattr(owner, "clip_grad_norm_"):
                return owner.clip_grad_norm_(1.0)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def optimize(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.passes()
        self.optimize()


class Clock:
    """Milliseconds of the device where there is one, else of the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self, empties: bool = False) -> None:
        """Wait for the device; `empties`: give cached memory back as well."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            if empties:
                torch.cuda.empty_cache()

    def time(self, *calls: Callable[[], object], ahead_ms: float = 0.0) -> list[float]:
        """Of each call, one after the other; the host is not held up in between.

        Args:
            ahead_ms: how far the host runs ahead of the device, as it does in training: a call
                then takes what the device needs for it.
        """
        self.settle()
        if self._device.type != "cuda":
            marks = [time.perf_counter()]
            for call in calls:
                call()
                marks.append(time.perf_counter())
            return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        if ahead_ms:
            torch.cuda._sleep(int(ahead_ms * 1.5e6))  # Cycles; of no more than 2 GHz.
        events[0].record()
        for call, event in zip(calls, events[1:], strict=True):
            call()
            event.record()
        torch.cuda.synchronize(self._device)
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def host_ms(self, call: Callable[[], object]) -> tuple[float, float]:
        """Until the call returns, and until the device is done; nothing is queued before."""
        self.settle()
        begin = time.perf_counter()
        call()
        returned = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return 1e3 * (returned - begin), 1e3 * (time.perf_counter() - begin)

    def rounds(
        self, names: Sequence[str], measure: Callable[[str], float], config: Config
    ) -> dict[str, list[float]]:
        """`interleave` after two rounds, for as many as fit into the seconds there are."""
        interleave(names, measure, 0, warmup=WARMUP)
        began = time.perf_counter()
        first = interleave(names, measure, 1, warmup=0)
        fitting = int(config.seconds / (time.perf_counter() - began))
        more = max(min(config.rounds, fitting), min(config.rounds, 3)) - 1
        times = interleave(names, measure, more, warmup=0)
        return {name: first[name] + times[name] for name in names}


def _medians(times: dict[str, list[float]], skipped: int = 0) -> dict[str, float]:
    """`skipped`: of what a call of `Clock.rounds` noted, `WARMUP`."""
    return {name: median(values[skipped:]) for name, values in times.items()}


def measure_ceilings(config: Config, report: Report) -> None:
    """Bandwidth of a copy (read plus written), and rate of a bfloat16 product of random values."""
    clock = Clock(config.device)
    side = 8192 if config.on_gpu else 64
    left, right = (
        torch.randn(side, side, device=config.device).to(torch.bfloat16) for _ in range(2)
    )
    product = median([clock.time(lambda: left @ right)[0] for _ in range(12)][2:])
    copied, multiplied = _copy_tb_s(config), 2 * side**3 / product / 1e9
    report.row("copy, read and written", "TB/s", {"bare": copied}, copy_tb_s=copied)
    report.row("product", "TFLOP/s", {"bare": multiplied}, matmul_tflop_s=multiplied)
    if config.on_gpu and config.link is not None:
        link, part = config.link, torch.rand(1 << 26, device=config.device)
        gathered = torch.zeros_like(part)
        seconds = link.seconds(part.nbytes, range(8), RANK)

        def several() -> None:
            for _ in range(_LINK_REPEATS):  # One alone would take as long as its launch, too.
                link.carry(gathered, part, seconds)

        ms = median([clock.time(several)[0] for _ in range(6)][1:]) / _LINK_REPEATS
        assert torch.equal(gathered, part), "the link delivers other bytes"
        name = f"a gather of {part.nbytes >> 20} MiB among 8 on the mirror's link"
        report.row(name, "ms", {"bare": ms}, link_over_wanted=ms / 1e3 / seconds)


def _copy_tb_s(config: Config) -> float:
    """Read plus written."""
    clock = Clock(config.device)
    numel = 1 << 31 if config.on_gpu else 1 << 16
    source = torch.empty(numel, dtype=torch.uint8, device=config.device).random_(0, 256)
    target = torch.empty_like(source)
    ms = median([clock.time(lambda: target.copy_(source))[0] for _ in range(12)][2:])
    return 2 * numel / ms / 1e9


def measure_step(config: Config, report: Report) -> None:
    """Device time of each engine's passes, and of its optimizer."""
    clock = Clock(config.device)
    for world in config.worlds:
        flow = Flow(config.device, config.link)
        with report.reporting(config.named(world)), fake_world(RANK, world), flow.installed():
            trainings = {engine: Training(engine, config, flow) for engine in ENGINES}
            for cell in config.cells:
                with report.reporting(config.named(world, cell)):
                    _step_cell(config, report, clock, flow, trainings, world, cell)
            del trainings
        clock.settle(empties=True)


def _step_cell(
    config: Config,
    report: Report,
    clock: Clock,
    flow: Flow,
    trainings: dict[str, Training],
    world: int,
    cell: tuple[int, int],
) -> None:
    clock.settle(empties=True)
    for training in trainings.values():
        training.feed(*cell)
    optimizer_ms: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    link_ms: dict[str, float] = {}

    def passes_ms(engine: str) -> float:
        before = flow.link_s
        passes, optimize = clock.time(trainings[engine].passes, trainings[engine].optimize)
        link_ms[engine] = (flow.link_s - before) * 1e3
        optimizer_ms[engine].append(optimize)
        return passes

    times = clock.rounds(ENGINES, passes_ms, config)
    name, ms = config.named(world, cell), _medians(times)
    measures = {
        "over_bare": ms["layerzero"] / ms["bare"],
        "over_fully_shard": ms["layerzero"] / ms["fully_shard"],
    }
    if config.on_gpu and config.link is not None:
        sms = torch.cuda.get_device_properties(config.device).multi_processor_count
        taken = link_ms["layerzero"] * config.link.num_blocks / sms
        measures["over_bare_and_sms"] = (ms["layerzero"] - taken) / ms["bare"]
    report.details[name] = {
        "passes_ms": {engine: Spread.of(each).as_dict() for engine, each in times.items()},
        "link_ms": link_ms,
        "rounds": len(times["bare"]),
    }
    report.row(f"passes, {name}", "ms", ms, **measures)
    report.row(f"optimizer, {name}", "ms", _medians(optimizer_ms, WARMUP))


def measure_host(config: Config, report: Report) -> None:
    """Host time of the passes above that of the bare model, for each unit; no link."""
    clock = Clock(config.device)
    (world, *_) = config.worlds
    flow = Flow(config.device)
    with fake_world(RANK, world), flow.installed():
        trainings = {engine: Training(engine, config, flow) for engine in ENGINES}
        for cell in config.cells:
            for training in trainings.values():
                training.feed(*cell)
            device_ms: dict[str, list[float]] = {engine: [] for engine in ENGINES}

            def host_ms(engine: str, device_ms: Any = device_ms) -> float:
                host, device = clock.host_ms(trainings[engine].passes)
                trainings[engine].optimize()
                device_ms[engine].append(device)
                return host

            times = clock.rounds(ENGINES, host_ms, config)
            per_unit = {name: ms / config.num_units for name, ms in _medians(times).items()}
            until_done = {n: ms / config.num_units for n, ms in _medians(device_ms, WARMUP).items()}
            above = {name: per_unit[name] - per_unit["bare"] for name in ENGINES[1:]}
            units = f"a unit of {until_done['bare']:.1f} ms, {config.named(world, cell)}"
            report.row(
                f"host above bare, {units}",
                "ms",
                above,
                host_over_fully_shard=above["layerzero"] / above["fully_shard"],
                host_ms_per_unit=above["layerzero"],
            )
            report.row(f"until the device is done, {units}", "ms", until_done)


def measure_memory(config: Config, report: Report) -> None:
    """Bytes between steps and at the peak of a step, AdamW included, one engine after the other."""
    if not config.on_gpu:
        return
    cuda = torch.cuda
    for world in config.worlds:
        rest, peaks = {}, {}
        for engine in ENGINES[1:]:
            flow = Flow(config.device, config.link)
            numel = sum(p.numel() for p in config.build().parameters())
            flow.values(max(p.numel() for p in config.build().parameters()) * 8)
            with fake_world(RANK, world), flow.installed():
                Clock(config.device).settle(empties=True)
                before = cuda.memory_allocated()
                training = Training(engine, config, flow)
                training.step()
                Clock(config.device).settle(empties=True)  # What building left behind.
                allocations = []
                for _ in range(7):
                    gc.collect()
                    resident = cuda.memory_allocated() - before
                    cuda.reset_peak_memory_stats()
                    training.step()
                    cuda.synchronize()
                    allocations.append(cuda.memory_stats()["num_device_alloc"])
                rest[engine] = resident * world / numel
                peaks[engine] = (cuda.max_memory_allocated() - before) / 1e9
                reserved = (cuda.max_memory_reserved() - before) / 1e9
                del training
            name = f"{config.named(world, config.cells[0])}, {engine}"
            report.details[name] = {"allocations": allocations, "reserved_gb": reserved}
        name = config.named(world, config.cells[0])
        report.row(f"bytes a parameter at rest, {name}", "B", rest, bytes_at_rest=rest["layerzero"])
        report.row(  # Of layerzero, which is the last.
            f"peak, {name}",
            "GB",
            peaks,
            peak_over_fully_shard=peaks["layerzero"] / peaks["fully_shard"],
            reserved_over_allocated=reserved / peaks["layerzero"],
            allocs_after_step_3=allocations[-1] - allocations[2],
        )


def measure_optimizer(config: Config, report: Report) -> None:
    """Clip and step of one rank's shards: torch's fused AdamW on both engines, and ours."""
    clock = Clock(config.device)
    (world, *_) = config.worlds
    copied = _copy_tb_s(config)
    kinds: dict[str, tuple[str, str | None]] = {
        "fully_shard": ("fully_shard", None),
        "torch's fused AdamW": ("layerzero", None),
        **{f"optim.AdamW, {state}": ("layerzero", state) for state in STATE_NBYTES},
    }
    flow = Flow(config.device)
    with fake_world(RANK, world), flow.installed():
        trainings = {
            kind: Training(engine, config, flow, states) for kind, (engine, states) in kinds.items()
        }
        numel = sum(p.numel() for p in trainings["torch's fused AdamW"].model.parameters())
        parts: dict[str, dict[str, list[float]]] = {
            part: {kind: [] for kind in kinds} for part in ("clip", "step", "host of both")
        }

        def total_ms(kind: str) -> float:
            training = trainings[kind]
            training.passes()
            clip, step = clock.time(training.clip, training.optimize, ahead_ms=20.0)
            training.passes()
            host, _ = clock.host_ms(lambda: (training.clip(), training.optimize()))
            for part, value in zip(parts, (clip, step, host), strict=True):
                parts[part][kind].append(value)
            return clip + step

        clock.rounds(list(kinds), total_ms, config)
    for part, times in parts.items():
        ms = _medians(times, WARMUP)
        for kind, (engine, states) in kinds.items():
            if engine == "layerzero":
                values = {"fully_shard": ms["fully_shard"], "layerzero": ms[kind]}
                measures = {}
                if part == "step" and states is not None:
                    floor_ms = sum(step_nbytes(states)) * numel / copied / 1e9
                    measures["step_over_floor"] = ms[kind] / floor_ms
                name = f"{part}, {kind}, {numel / 1e6:.1f} M elements, {config.named(world)}"
                report.row(name, "ms", values, **measures)


def measure_peers(config: Config, report: Report) -> None:
    """Whole steps on a group of one rank, which is real: no mirror, no link."""
    clock = Clock(config.device)
    with _alone(config):
        steps: dict[str, Callable[[], object]] = {}
        for engine in ENGINES:
            with report.reporting(engine):
                steps[engine] = Training(engine, config, None).step
        batch, length = config.cells[0]
        tokens = torch.randint(256, (batch, length + 1), device=config.device)
        for name in peers.installed_peers(peers.STEPS if config.on_gpu else peers.PEERS):
            with report.reporting(name):
                of_peer = peers.STEPS[name](config.build(), 1e-4, batch)
                steps[name] = lambda step=of_peer: step(tokens)  # type: ignore[misc]
                steps[name]()

        def step_ms(engine: str) -> float:
            return clock.time(steps[engine])[0]

        ms = _medians(clock.rounds(list(steps), step_ms, config))
    missing = [name for name in peers.STEPS if name not in steps]
    report.details["not installed, or failed"] = missing
    report.row(f"whole step, {config.size} {batch} x {length}, one rank", "ms", ms)


def measure_checkpoint(config: Config, report: Report) -> None:
    """Save and load of model and optimizer, on a real group of one rank, in a temporary folder."""
    clock = Clock(config.device)
    save: dict[str, float] = {}
    load: dict[str, float] = {}
    with _alone(config), tempfile.TemporaryDirectory() as folder:
        for engine in ENGINES[1:]:
            with report.reporting(engine):
                training = Training(engine, config, None)
                training.step()
                model = training.model
                saving, loading = _checkpointing(engine, training, f"{folder}/{engine}")
                saved = [p.detach().clone() for p in model.parameters()]
                save[engine] = clock.host_ms(saving)[1] / 1e3
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                load[engine] = clock.host_ms(loading)[1] / 1e3
                for before, after in zip(saved, model.parameters(), strict=True):
                    assert bool((before == after).all()), "other values came back"
        files = [each for each in Path(folder, "layerzero").rglob("*") if each.is_file()]
        nbytes = sum(each.stat().st_size for each in files)
    report.row(f"save, {nbytes / 1e9:.1f} GB", "s", save)
    report.row(f"load, {nbytes / 1e9:.1f} GB", "s", load)


def _checkpointing(
    engine: str, training: Training, path: str
) -> tuple[Callable[[], object], Callable[[], object]]:
    """(save, load) of one engine."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = training.model, training.optimizer
    if engine == "layerzero":
        return (
            lambda: checkpoint.save(path, model, optimizer, step=1),
            lambda: checkpoint.load(path, model, optimizer),
        )
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    return (
        lambda: dcp.save(state, checkpoint_id=path),
        lambda: dcp.load(state, checkpoint_id=path),
    )


@contextmanager
def _alone(config: Config) -> Iterator[None]:
    """A default group of this process, over NCCL or gloo."""
    backend = "nccl" if config.on_gpu else "gloo"
    if config.on_gpu:
        torch.cuda.set_device(config.device)
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure_trace(config: Config, report: Report, path: Path = Path("gpu_trace.json.gz")) -> None:
    """What gpu_trace.py finds in two steady steps."""
    flow = Flow(config.device, config.link)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if config.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    (world, *_) = config.worlds
    clock = Clock(config.device)
    with fake_world(RANK, world), flow.installed():
        training = Training("layerzero", config, flow)
        for _ in range(4):
            training.step()
        clock.settle()
        with torch.profiler.profile(activities=activities) as profiler:
            # The first step under the profiler pays for its start.
            training.step()
            clock.settle()
            for number in range(2):
                with torch.profiler.record_function(f"{gpu_trace.STEP}#{number}"):
                    training.step()
            clock.settle()
    profiler.export_chrome_trace(str(path))
    steps = gpu_trace.read_steps(gpu_trace.load(path))
    report.details |= {"trace": str(path), "steps": len(steps)}
    if not config.on_gpu:
        return
    failures = [failure for step in steps for failure in gpu_trace.check_step(step)]
    report.details["found"] = [f"{f.check}: {f.text}" for f in failures]
    hidden = min(
        gpu_trace.hidden_part([w for w in s.works if w.is_gather], gpu_trace.compute_of(s))
        for s in steps
    )
    found = {f"trace_{c.replace(' ', '_')}": 0.0 for c in gpu_trace.CHECKS if c != "hidden"}
    for failure in failures:
        name = f"trace_{failure.check.replace(' ', '_')}"
        if name in found:
            found[name] += 1
    name = f"gathers beside compute, {config.named(world, config.cells[0])}"
    report.row(name, "", {"layerzero": hidden}, hidden_part=hidden, **found)


PARTS: dict[str, Callable[..., None]] = {
    "ceilings": measure_ceilings,
    "step": measure_step,
    "host": measure_host,
    "memory": measure_memory,
    "optimizer": measure_optimizer,
    "trace": measure_trace,
    "peers": measure_peers,
    "checkpoint": measure_checkpoint,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--cpu", action="store_true", help="run the branches that need no GPU")
    parser.add_argument("--size", choices=SIZES, default="1b", help="on the CPU always tiny")
    parser.add_argument("--world", type=int, nargs="+", default=[8], help="powers of two")
    parser.add_argument("--cells", nargs="+", default=["2x4096"], help="sequences x bytes")
    parser.add_argument("--variant", choices=VARIANTS, default="")
    parser.add_argument("--link", default="", help='GB/s in and between nodes, SMs; or "none"')
    parser.add_argument("--rounds", type=int, default=8, help="at most")
    parser.add_argument("--seconds", type=float, default=4.0, help="for the rounds of a cell")
    parser.add_argument("--trace", type=Path, help="file of the trace, .json or .json.gz")
    parser.add_argument("--wait", action="store_true", help="for a line of input, after imports")
    args = parser.parse_args(arguments)
    if args.wait:
        sys.stdin.readline()
    if not args.cpu and not torch.cuda.is_available():
        print("no GPU: bench_gpu_step needs one, or --cpu", file=sys.stderr)
        return 2
    cells = [tuple(map(int, cell.split("x"))) for cell in args.cells]
    config = Config(
        size=args.size,
        cells=cells,  # type: ignore[arg-type]
        rounds=args.rounds,
        device=torch.device("cpu") if args.cpu else torch.device("cuda", 0),
        worlds=args.world,
        variant=args.variant,
        link=Link.parse(args.link),
        seconds=args.seconds,
    )
    if args.cpu:
        config = replace(config, size="tiny", cells=[(2, 16)], rounds=1)
    report = Report(args.part, config)
    extra = (args.trace,) if args.part == "trace" and args.trace else ()
    with report.reporting(args.part):
        PARTS[args.part](config, report, *extra)
    report.publish()
    return int(report.has_failed)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # A stuck stream, or a communicator, would hold up the interpreter's end.
