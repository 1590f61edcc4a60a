"""A training step of one rank of many on one GPU: time, host time, memory, and a checked trace.

    python -m benchmarks.bench_gpu_step --part step        (from the root of the repository)

The other ranks do not exist: the world is torch's fake group, and collectives run as one-rank NCCL
calls that bring bytes of the right number (tests/gpu/mirror.py, without comparing). So launches,
streams, memory and the host's work are those of a real step. What is missing is the time on the
wire: a gather here takes as long as a copy within the GPU.

Parts, each meant for a process of its own:

    ceilings  what the device reaches in a copy and in a matrix product
    step      forward and backward, and the optimizer apart: bare, layerzero and fully_shard take
              turns in each round
    host      the same with a batch so small that the host is the slower one: host time of each unit
    memory    what stays between steps, and what a step needs beside its activations
    trace     two steps under the profiler, checked by gpu_trace.py
    optimizer  clip and step of torch's fused AdamW and of layerzero's, on one rank's shard: device
              and host time, and the time that their bytes take at the rate of a copy

The last line of the output is JSON: "measures" by the names of gpu_expected.py, and "details".
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from benchmarks import gpu_trace
from benchmarks.common import (
    STATE_NBYTES,
    Spread,
    difference,
    environment,
    interleave,
    print_json,
    ratio,
    step_nbytes,
)
from benchmarks.engines import Transformer, TransformerBlock
from layerzero import MixedPrecision, ZeRO3, optim
from layerzero.comm import collectives
from layerzero.flat.groups import ShardGroup
from tests.gpu.mirror import Wires, fake_world, one_rank_group

ENGINES = ("bare", "layerzero", "fully_shard")
SIZES = {"1b": (2048, 16, 16, 8192), "tiny": (32, 3, 2, 64)}  # width, layers, heads, hidden
PARTS = ("ceilings", "step", "host", "memory", "trace", "optimizer")
RANK = 3


@dataclass(frozen=True)
class Config:
    size: str
    batch: int
    length: int
    rounds: int
    device: torch.device

    @property
    def num_layers(self) -> int:
        return SIZES[self.size][1]

    def build(self) -> Transformer:
        width, layers, heads, hidden = SIZES[self.size]
        torch.manual_seed(0)
        with self.device:
            return Transformer(width, layers, heads, self.length, hidden)


class Flow(Wires):
    """Brings the same small random values into every gather; compares nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
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


def _with_fully_shard(model: nn.Module, flow: Flow) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

    real = one_rank_group(flow.device)

    class Gather(DefaultAllocMixin, AllGather):
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
        ) -> Any:
            options = AllgatherOptions()
            options.asyncOp = async_op
            values = flow.values(output_tensor.numel())
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
            if flow.device.type != "cuda":
                op = dist.ReduceOp.SUM  # gloo has no average; over one rank it is the sum.
            is_plain = isinstance(op, dist.ReduceOp.RedOpType)
            options.reduceOp = dist.ReduceOp(op) if is_plain else op
            options.asyncOp = async_op
            own = input_tensor.view(dist.get_world_size(), -1)[dist.get_rank()]
            verb = getattr(real, collectives._REDUCE_SCATTER)
            return verb(output_tensor.view(-1), own, options)

    mesh = init_device_mesh(flow.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [m for m in model.modules() if isinstance(m, TransformerBlock)] + [model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Gather())
            module.set_custom_reduce_scatter(Scatter())
    return model


class Training:
    """One engine's model with its optimizer, on one batch."""

    def __init__(self, engine: str, config: Config, flow: Flow) -> None:
        self.device = config.device
        model: nn.Module = config.build()
        if engine == "layerzero":
            precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            model = ZeRO3(model, auto_wrap_policy={TransformerBlock}, mixed_precision=precision)
        elif engine == "fully_shard":
            model = _with_fully_shard(model, flow)
        else:
            model = model.to(torch.bfloat16)
        self.model = model
        self.batch = torch.randint(256, (config.batch, config.length + 1), device=self.device)
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def passes(self) -> None:
        self.model(self.batch).backward()

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

    def settle(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

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

    def host_ms(self, call: Callable[[], object]) -> float:
        """Until the call returns, with nothing queued on the device before."""
        self.settle()
        begin = time.perf_counter()
        call()
        elapsed = time.perf_counter() - begin
        self.settle()
        return 1e3 * elapsed


# Parts ----------------------------------------------------------------------------------------

Result = tuple[dict[str, float], dict[str, Any]]
"""(measures, details)"""


def measure_ceilings(config: Config, world: int) -> Result:
    """Bandwidth of a copy (read plus written), and rate of a bfloat16 product of random values."""
    clock = Clock(config.device)
    on_gpu = config.device.type == "cuda"
    numel, side = (1 << 31, 8192) if on_gpu else (1 << 16, 64)
    source = torch.empty(numel, dtype=torch.uint8, device=config.device).random_(0, 256)
    target = torch.empty_like(source)
    left, right = (
        torch.randn(side, side, device=config.device).to(torch.bfloat16) for _ in range(2)
    )
    copy = [clock.time(lambda: target.copy_(source))[0] for _ in range(12)][2:]
    product = [clock.time(lambda: left @ right)[0] for _ in range(12)][2:]
    return {
        "copy_tb_s": 2 * numel / Spread.of(copy).median / 1e9,
        "matmul_tflop_s": 2 * side**3 / Spread.of(product).median / 1e9,
    }, {"copy_ms": Spread.of(copy).as_dict(), "matmul_ms": Spread.of(product).as_dict()}


def measure_step(config: Config, world: int) -> Result:
    """Device time of each engine's passes, and of its optimizer."""
    clock = Clock(config.device)
    flow = Flow(config.device)
    optimizer_ms: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    with fake_world(RANK, world), flow.installed():
        trainings = {engine: Training(engine, config, flow) for engine in ENGINES}

        def passes_ms(engine: str) -> float:
            passes, optimize = clock.time(trainings[engine].passes, trainings[engine].optimize)
            optimizer_ms[engine].append(optimize)
            return passes

        times = interleave(ENGINES, passes_ms, config.rounds, warmup=3)
    over_bare, over_other = (
        ratio(times["layerzero"], times[other]) for other in ("bare", "fully_shard")
    )
    measures = {
        "bare_ms": Spread.of(times["bare"]).median,
        f"layerzero_over_bare_w{world}": over_bare.median,
        f"layerzero_over_fully_shard_w{world}": over_other.median,
    }
    return measures, {
        "passes_ms": {name: Spread.of(each).as_dict() for name, each in times.items()},
        "optimizer_ms": {name: Spread.of(each).as_dict() for name, each in optimizer_ms.items()},
        "over_bare": over_bare.as_dict(),
        "over_fully_shard": over_other.as_dict(),
    }


def measure_host(config: Config, world: int) -> Result:
    """Host time of the passes above that of the bare model, for each unit."""
    clock = Clock(config.device)
    flow = Flow(config.device)
    with fake_world(RANK, world), flow.installed():
        trainings = {engine: Training(engine, config, flow) for engine in ENGINES}

        def host_ms(engine: str) -> float:
            elapsed = clock.host_ms(trainings[engine].passes)
            trainings[engine].optimize()
            return elapsed

        times = interleave(ENGINES, host_ms, config.rounds, warmup=3)
    num_units = config.num_layers + 1
    measures, details = {}, {"host_ms": {n: Spread.of(t).as_dict() for n, t in times.items()}}
    for engine in ENGINES[1:]:
        above = Spread.of([ms / num_units for ms in difference(times[engine], times["bare"])])
        measures[f"host_ms_per_unit_{engine}"] = above.median
        details[f"per_unit_{engine}"] = above.as_dict()
    return measures, details


def measure_optimizer(config: Config, world: int) -> Result:
    """Device and host time of clip and step; `over_floor` is the step's, over that of its bytes."""
    clock = Clock(config.device)
    rate = measure_ceilings(config, world)[0]["copy_tb_s"]
    flow = Flow(config.device)
    measures: dict[str, float] = {"copy_tb_s": rate}
    rows: list[dict[str, Any]] = []
    with fake_world(RANK, world), flow.installed():
        training = Training("layerzero", config, flow)
        parameters = [*training.model.parameters()]
        numel = sum(parameter.numel() for parameter in parameters)
        for name in ("torch fused", *STATE_NBYTES):
            if name != "torch fused":
                del training.optimizer  # A parameter has one optimizer at a time.
                gc.collect()
                training.optimizer = optim.AdamW(parameters, lr=1e-4, state=cast(Any, name))
            row = {"optimizer": name, "numel": numel, "parameters": len(parameters)}
            row |= _optimizer_ms(training, clock, config.rounds)
            nbytes = sum(step_nbytes("float32", 0) if name == "torch fused" else step_nbytes(name))
            floor_ms = nbytes * numel / rate / 1e9
            over = row["device_ms"]["step"] / floor_ms
            row |= {"nbytes_per_element": nbytes, "floor_ms": floor_ms, "over_floor": over}
            row["clip_floor_ms"] = 4 * numel / rate / 1e9
            rows.append(row)
            print(json.dumps(row), flush=True)
            measures[f"step_over_floor_{name.replace(' ', '_')}"] = over
    return measures, {"rows": rows}


def _optimizer_ms(training: Training, clock: Clock, rounds: int) -> dict[str, Any]:
    optimizer: Any = training.optimizer
    is_native = isinstance(optimizer, optim.AdamW)
    clip = optimizer.clip_grad_norm_ if is_native else training.model.clip_grad_norm_
    calls = {
        "clip": lambda: clip(1.0),
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
    }
    device, host = [], []
    for _ in range(rounds + 2):
        training.passes()
        device.append(clock.time(*calls.values(), ahead_ms=20.0))
        training.passes()
        host.append([clock.host_ms(call) for call in calls.values()])
    return {
        what: {
            part: Spread.of([*each]).median
            for part, each in zip(calls, zip(*times[2:], strict=True), strict=True)
        }
        for what, times in (("device_ms", device), ("host_ms", host))
    }


def measure_memory(config: Config, world: int) -> Result:
    """Bytes between steps, and above them and the activations at the peak of a step."""
    if config.device.type != "cuda":
        return {}, {"not measured": "the allocator's counters are the GPU's"}
    activations = _activation_nbytes(config)
    flow = Flow(config.device)
    flow.values(max(p.numel() for p in config.build().parameters()) * 8)
    with fake_world(RANK, world), flow.installed():
        gc.collect()
        before = torch.cuda.memory_allocated(config.device)
        training = Training("layerzero", config, flow)
        numel = sum(p.numel() for p in config.build().parameters())
        training.step()
        gc.collect()
        torch.cuda.empty_cache()  # What building left behind is no part of training.
        allocations = []
        for _ in range(8):
            gc.collect()
            resident = torch.cuda.memory_allocated(config.device) - before
            torch.cuda.reset_peak_memory_stats(config.device)
            training.step()
            torch.cuda.synchronize(config.device)
            allocations.append(torch.cuda.memory_stats(config.device)["num_device_alloc"])
        peak = torch.cuda.max_memory_allocated(config.device)
        reserved = torch.cuda.max_memory_reserved(config.device)
    # Main shards and two moments in float32, compute shards in bfloat16.
    expected = (3 * 4 + 2) * numel / world
    measures = {
        f"resident_over_computed_w{world}": resident / expected,
        f"transient_gb_w{world}": (peak - before - resident - activations) / 1e9,
        f"reserved_over_allocated_w{world}": reserved / peak,
        f"device_allocs_after_step_3_w{world}": allocations[-1] - allocations[2],
    }
    return measures, {
        "num_parameters": numel,
        "resident_gb": resident / 1e9,
        "activations_gb": activations / 1e9,
        "peak_gb": (peak - before) / 1e9,
        "device_allocations": allocations,
    }


def _activation_nbytes(config: Config) -> int:
    """Bytes that the forward of the bare model leaves for its backward."""
    model = config.build().to(torch.bfloat16)
    batch = torch.randint(256, (config.batch, config.length + 1), device=config.device)
    model(batch).backward()  # Workspaces of the math library come first.
    for parameter in model.parameters():
        parameter.grad = None
    before = torch.cuda.memory_allocated(config.device)
    loss = model(batch)
    after = torch.cuda.memory_allocated(config.device)
    del loss
    return after - before


def measure_trace(config: Config, world: int, path: Path | None = None) -> Result:
    """What gpu_trace.py finds in two steady steps."""
    flow = Flow(config.device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = config.device.type == "cuda"
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    path = path or Path("gpu_trace.json.gz")
    with fake_world(RANK, world), flow.installed():
        training = Training("layerzero", config, flow)
        for _ in range(4):
            training.step()
        Clock(config.device).settle()
        with torch.profiler.profile(activities=activities) as profiler:
            # The first step under the profiler pays for its start.
            training.step()
            Clock(config.device).settle()
            for number in range(2):
                with torch.profiler.record_function(f"{gpu_trace.STEP}#{number}"):
                    training.step()
            Clock(config.device).settle()
    profiler.export_chrome_trace(str(path))
    steps = gpu_trace.read_steps(gpu_trace.load(path))
    details: dict[str, Any] = {"trace": str(path), "steps": len(steps)}
    if not on_gpu:
        return {}, details
    failures = [failure for step in steps for failure in gpu_trace.check_step(step)]
    hidden = [
        gpu_trace.hidden_part(
            [work for work in step.works if work.is_gather], gpu_trace.compute_of(step)
        )
        for step in steps
    ]
    of_check = {name: 0 for name in gpu_trace.CHECKS}
    for failure in failures:
        of_check[failure.check] += 1
    measures: dict[str, float] = {"hidden_part": min(hidden)}
    measures |= {f"trace_{name.replace(' ', '_')}": count for name, count in of_check.items()}
    return measures, {**details, "failures": [f"{f.check}: {f.text}" for f in failures]}


MEASURES: dict[str, Callable[..., Result]] = {
    "ceilings": measure_ceilings,
    "step": measure_step,
    "host": measure_host,
    "memory": measure_memory,
    "trace": measure_trace,
    "optimizer": measure_optimizer,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--cpu", action="store_true", help="run the branches that need no GPU")
    parser.add_argument("--size", choices=SIZES, help="default: 1b, on the CPU tiny")
    parser.add_argument("--world", type=int, default=8, help="ranks of the world, a power of two")
    parser.add_argument("--batch", type=int, help="sequences; default: 2, 1 for the host")
    parser.add_argument("--length", type=int, help="bytes in each; default: 4096, 256 for the host")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--trace", type=Path, help="file of the trace, .json or .json.gz")
    args = parser.parse_args(arguments)
    if not args.cpu and not torch.cuda.is_available():
        print("no GPU: bench_gpu_step needs one, or --cpu", file=sys.stderr)
        return 2
    is_host = args.part in ("host", "optimizer")
    config = Config(
        size=args.size or ("tiny" if args.cpu else "1b"),
        batch=args.batch or (1 if is_host else 2),
        length=args.length or (256 if is_host else 16 if args.cpu else 4096),
        rounds=args.rounds,
        device=torch.device("cpu") if args.cpu else torch.device("cuda", 0),
    )
    extra = (args.trace,) if args.part == "trace" else ()
    measures, details = MEASURES[args.part](config, args.world, *extra)
    for name, value in measures.items():
        print(f"{name}: {value:.4g}")
    print_json(
        {
            "benchmark": "gpu_step",
            "part": args.part,
            "world": args.world,
            "measures": measures,
            "details": details,
            "config": {**vars(config), "device": str(config.device)},
            "environment": environment(),
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
