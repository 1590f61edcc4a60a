"""The parts of the GPU benchmark run on the CPU, every measure has an expected range, and what is
read from a trace shows each way in which a step may not overlap."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_gpu_step as bench
from benchmarks.gpu_expected import EXPECTED
from benchmarks.gpu_trace import Step, hidden_part, measures, read_steps
from tests.gpu import link
from tests.gpu.link import Link
from tests.harness.ranks import on_ranks, run_ranks

CPU = torch.device("cpu")
MEASURES = {
    "ceilings": {"copy_tb_s", "matmul_tflop_s"},
    "step": {"over_bare", "over_fully_shard"},
    "host": {"host_over_fully_shard", "host_ms_per_unit"},
    "memory": set(),
    "optimizer": {"step_over_floor"},
    "trace": set(),
    "peers": set(),
    "checkpoint": set(),
}
"""On the CPU; the allocator's counters and the device's part of a trace are a GPU's."""
MB = 1_000_000


def _parts() -> dict[str, Any]:
    dist.destroy_process_group()
    config = bench.Config("tiny", [(2, 16)], 1, CPU)
    found = {}
    for part, measure in bench.PARTS.items():
        report = bench.Report(part, config)
        measure(config, report)
        found[part] = report._result
    return found


def test_every_part_runs_and_every_measure_is_expected(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_ranks(1, _parts, timeout=120)[0]
    kinds = {
        part: {name.partition("@")[0] for name in result["measures"]}
        for part, result in found.items()
    }
    assert kinds == MEASURES
    for part, result in found.items():
        assert result["details"]["failures"] == [], part
        assert kinds[part] <= EXPECTED.keys()
    assert found["trace"]["details"]["steps"] == 2
    engines = {"bare", "fully_shard", "layerzero"}
    assert engines <= found["step"]["rows"][0]["values"].keys()
    assert engines <= found["peers"]["rows"][0]["values"].keys()
    assert len(found["optimizer"]["rows"]) == 3 * 4 and len(found["checkpoint"]["rows"]) == 2


@on_ranks(1, timeout=120, fresh=True)
def test_engines_are_compared_on_the_same_link() -> None:
    """Milliseconds that a step's bytes take, by engine."""
    dist.destroy_process_group()
    slow = Link(node_gb_s=1e-3)
    config = bench.Config("tiny", [(2, 16)], 1, CPU, variant="checkpoint", link=slow)
    report = bench.Report("step", config)
    bench.measure_step(config, report)
    ((_, details),) = [item for item in report.details.items() if item[0] != "failures"]
    ms = details["link_ms"]
    width, hidden, layers = 32, 64, 3
    block = 4 * width * width + 3 * width * hidden + 2 * width
    root = (256 + 16 + 1) * width
    # Blocks are gathered twice, the last and the root once or twice; all are reduced in float32.
    bounds = [
        (2 * (blocks * block + root * roots) + 4 * (layers * block + root)) * 7 / 8 * 1e-3
        for blocks, roots in ((2 * layers - 1, 1), (2 * layers, 2))
    ]
    assert ms["bare"] == 0.0
    for engine in ("layerzero", "fully_shard"):
        assert bounds[0] <= ms[engine] <= 1.1 * bounds[1], (engine, ms, bounds)  # With padding.


@pytest.mark.parametrize(
    ("ranks", "own", "ms"),
    [
        (range(1), 0, 0.0),
        # 7 of 8 parts, at 300 GB/s.
        (range(8), 3, 240 * 7 / 8 / 300),
        (range(8, 16), 3, 240 * 7 / 8 / 300),
        # Each node receives 7 of 8 parts over the links of its 8 GPUs, 63 of 64 go around inside.
        (range(64), 3, 240 * 63 / 64 / 300),
        # One rank of each of 8 nodes: 7 of 8 parts come over one link.
        (range(3, 64, 8), 0, 240 * 7 / 8 / 45),
        # Two of each of two nodes: half comes over two links.
        ((0, 1, 8, 9), 2, 240 / 2 / 2 / 45),
    ],
)
def test_bytes_take_the_time_of_the_slower_link(ranks, own: int, ms: float) -> None:
    assert Link().seconds(240 * MB, ranks, own) * 1e3 == pytest.approx(ms)


@pytest.mark.parametrize(
    ("address", "compiles", "expected"),
    [
        (4096, True, ["kernel (16, 1, 1) 64 vectors 2000000 ns"]),
        (4100, True, ["sleep 3000000", "copy"]),  # The kernel moves 16 bytes at a time.
        (4096, False, ["sleep 3000000", "copy"]),
    ],
)
def test_a_copy_takes_a_few_blocks_or_a_sleep(address, compiles, expected, monkeypatch) -> None:
    done: list[str] = []

    def kernel(grid: Any, block: Any, arguments: list[Any], shared_nbytes: int) -> None:
        done.append(f"kernel {grid} {arguments[2]} vectors {arguments[3]} ns")

    tensor = mock.Mock(nbytes=1024, device=torch.device("cuda"))
    tensor.data_ptr.return_value = address
    tensor.copy_.side_effect = lambda _: done.append("copy")
    monkeypatch.setattr(link, "_link_copy", lambda: kernel if compiles else None)
    monkeypatch.setattr(link, "_cycles_per_second", lambda: 1.5e9)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(f"sleep {cycles}"))
    Link().carry(tensor, tensor, 2e-3)
    assert done == expected


def test_rates_of_a_link_can_be_set() -> None:
    assert Link.parse("") == Link() and Link.parse("none") is None
    slower = Link.parse("150,20,24")
    assert slower == Link(node_gb_s=150, network_gb_s=20, num_blocks=24)
    assert slower.seconds(150 * MB, range(8), 0) * 1e3 == pytest.approx(7 / 8)


COMPUTE, UNSHARD = 7, 17
MATMUL, COPY = "ampere_gemm", "Memcpy DtoD (Device -> Device)"


def step_of(
    works: list[tuple[str, int, float, float]], ranges: list[tuple[str, int]], call: str = ""
) -> Step:
    """`works`: (name, stream, start, end), each launched a microsecond after the one before.
    `ranges`: of the engine, each around the launch of one of them."""
    events = []

    def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> None:
        common = {"ph": "X", "pid": 1, "tid": 1, "cat": cat, "name": name, "ts": ts, "dur": dur}
        events.append({**common, "args": args})

    for number, (name, stream, start, end) in enumerate(works):
        event("cuda_runtime", "cudaLaunchKernel", number + 1, 0.5, correlation=number)
        cat = "gpu_memcpy" if name == COPY else "kernel"
        event(cat, name, start, end - start, correlation=number, stream=stream)
    for name, number in ranges:
        event("user_annotation", f"LayerZeRO3.{name}", number + 0.9, 0.5)
    if call:
        event("cuda_runtime", call, len(works) + 1, 0.5)
    event("user_annotation", "bench_step#0", 0.0, len(works) + 2)
    # What others launch beside the step is not of it.
    event("cuda_runtime", "cudaDeviceSynchronize", len(works) + 9, 0.5)
    (step,) = read_steps(events)
    return step


def overlapping(stream: int = UNSHARD, start: float = 110.0, call: str = "") -> Step:
    """A cast and a gather of one unit, of 50 us, beside products from 0 to 200 us."""
    works = [
        ("vectorized_elementwise_kernel", UNSHARD, 20.0, 25.0),
        (COPY, stream, start, start + 50),
        (MATMUL, COMPUTE, 0.0, 100.0),
        (MATMUL, COMPUTE, 100.0, 200.0),
    ]
    return step_of(works, [("unshard(layers.1)", 0), ("unshard(layers.1)", 1)], call)


FINE = {
    "hidden_part": 1.0,
    "trace_gathers": 0.0,
    "trace_gathers_on_compute": 0.0,
    "trace_host": 0.0,
}


@pytest.mark.parametrize(
    ("step", "off"),
    [
        (overlapping(), {}),
        (overlapping(call="cudaMemcpyAsync"), {}),
        (overlapping(COMPUTE), {"trace_gathers_on_compute": 1.0}),
        (overlapping(start=175.0), {"hidden_part": 0.5}),
        (overlapping(call="cudaStreamSynchronize"), {"trace_host": 1.0}),
        (overlapping(call="cudaMalloc"), {"trace_host": 1.0}),
        (step_of([(MATMUL, COMPUTE, 0.0, 9.0)], []), {"trace_gathers": 1.0}),
        (
            step_of(
                [("link_copy", UNSHARD, 20.0, 50.0), (MATMUL, COMPUTE, 0.0, 99.0)],
                [("unshard(1)", 0)],
            ),
            {},
        ),
    ],
)
def test_a_step_that_does_not_overlap_is_seen(step: Step, off: dict[str, float]) -> None:
    assert measures(step) == FINE | off


def test_the_hidden_part_counts_each_moment_once() -> None:
    step = overlapping()
    inside = step.compute[-1]._replace(start=120.0, end=140.0)
    assert hidden_part(step.gathers, [step.compute[-1], inside]) == 1.0
    assert hidden_part(step.gathers, []) == 0.0


def test_a_trace_without_steps_or_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="no range named bench_step"):
        read_steps([])
    with pytest.raises(ValueError, match="was the device profiled"):
        measures(step_of([], []))
