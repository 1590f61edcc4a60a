"""The parts of the GPU benchmark run on the CPU, every measure has an expected range, and the
checker of traces finds each way in which a step may not overlap as drawn."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_gpu_step as bench
from benchmarks.gpu_expected import EXPECTED
from benchmarks.gpu_trace import check_step, collectives_of, load, main, read_steps
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


COMPUTE, PRE, UNSHARD, REDUCE = 7, 13, 17, 21
MATMUL, PACK, COPY = "ampere_gemm", "void pack_kernel<float>", "Memcpy DtoD (Device -> Device)"
CAST = "vectorized_elementwise_kernel"
ROOT = "the root unit"


class Trace:
    """Builds a step: the host launches everything early, and the device follows."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._host = 0.0

    def _event(self, cat: str, name: str, ts: float, dur: float, **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1}
        self.events.append({**event, "args": args})

    def call(self, name: str) -> None:
        self._host += 1
        self._event("cuda_runtime", name, self._host, 0.5)

    def work(self, name: str, stream: int, start: float, end: float) -> None:
        self._host += 1
        number = len(self.events)
        self._event("cuda_runtime", "cudaLaunchKernel", self._host, 0.5, correlation=number)
        cat = "gpu_memcpy" if name == COPY else "kernel"
        self._event(cat, name, start, end - start, correlation=number, stream=stream)

    def at(self, time: float) -> None:
        """The host is there next."""
        self._host = time

    def within(self, action: str, unit: str, *works: tuple[str, int, float, float]) -> None:
        begin = self._host + 0.6
        for work in works:
            self.work(*work)
        self._host += 1
        self._event("user_annotation", f"LayerZeRO3.{action}({unit})", begin, self._host - begin)

    def ended(self) -> list[dict[str, Any]]:
        self._event("user_annotation", "bench_step#0", 0.0, self._host + 1)
        return self.events


def gather(trace: Trace, unit: str, at: float, stream: int = UNSHARD) -> None:
    trace.within("unshard", unit, (CAST, stream, at - 5, at - 1), (COPY, stream, at, at + 50))


def reduction(trace: Trace, unit: str, at: float) -> None:
    trace.within("reduce", unit, (PACK, COMPUTE, at, at + 4), (COPY, REDUCE, at + 5, at + 40))


def good_step(
    order: str = "pre",
    gather_stream: int = UNSHARD,
    pause: float = 0.0,
    packs: int = 1,
    exposed: bool = False,
    sync: str = "",
) -> list[dict[str, Any]]:
    """GR G1 r G2 F1 F2 r | G2 b G1 B2 R2 B1 R1 RR, with a defect on request."""
    trace = Trace()
    gather(trace, ROOT, 20 if not exposed else -900)
    gather(trace, "1", 110, gather_stream)
    trace.work(MATMUL, COMPUTE, 10, 200)
    gather(trace, "2", 210)
    trace.work(MATMUL, COMPUTE, 200, 500)
    if sync:
        trace.call(sync)
    trace.work(MATMUL, COMPUTE, 500, 800)
    trace.work(MATMUL, COMPUTE, 800, 900)
    gather(trace, "2", 810)
    if order == "pre":
        gather(trace, "1", 910)
    trace.work(MATMUL, COMPUTE, 900, 1300)
    reduction(trace, "2", 1300)
    if order == "on demand":
        gather(trace, "1", 1310)
    trace.work(MATMUL, COMPUTE, 1304 + pause, 1700 + pause)
    for unit in ("1", ROOT) if order != "reversed" else (ROOT, "1"):
        reduction(trace, unit, 1700 + pause)
    for _ in range(packs - 1):
        trace.within("reduce", "1", (PACK, COMPUTE, 1720 + pause, 1722 + pause))
    trace.work(MATMUL, COMPUTE, 1750 + pause, 1800 + pause)
    return trace.ended()


def test_a_step_as_drawn_passes() -> None:
    (step,) = read_steps(good_step())
    assert check_step(step) == []
    assert step.compute_stream == COMPUTE
    letters = [f"{kind}{unit[:1]}" for kind, unit in collectives_of(step)]
    assert letters == ["Gt", "G1", "G2", "G1", "R2", "R1", "Rt"]


def no_reductions() -> list[dict[str, Any]]:
    copies = [e for e in good_step() if e["args"].get("stream") == REDUCE]
    return [e for e in good_step() if e not in copies]


def no_gathers() -> list[dict[str, Any]]:
    return [e for e in good_step() if not e["name"].startswith("LayerZeRO3.unshard")]


DEFECTS: dict[str, tuple[Callable[[], list[dict[str, Any]]], str, str]] = {
    "a gather on the compute stream": (
        lambda: good_step(gather_stream=COMPUTE),
        "gathers on compute",
        "1 gathers on the compute stream, first of 1",
    ),
    "a gather beside nothing": (lambda: good_step(exposed=True), "hidden", "0.80 of the time"),
    "a gather behind the reduction": (
        lambda: good_step(order="on demand"),
        "order",
        "1 is gathered after the reduction of 2 began",
    ),
    "reductions in another order": (
        lambda: good_step(order="reversed"),
        "order",
        "reduced 2 the root unit 1; expected the reverse",
    ),
    "no reduction": (no_reductions, "order", "no reduction"),
    "no gather": (no_gathers, "gathers", "no gather"),
    "one kernel too many": (
        lambda: good_step(packs=2),
        "own kernels",
        "4 own kernels for 1, expected 3 (1 units differ)",
    ),
    "compute waits at a border": (
        lambda: good_step(pause=80.0),
        "gaps",
        "1 gaps over 50 us at borders of units, up to 80 us",
    ),
    "the host waits": (
        lambda: good_step(sync="cudaStreamSynchronize"),
        "host",
        "cudaStreamSynchronize within the step",
    ),
    "the host allocates": (lambda: good_step(sync="cudaMalloc"), "host", "cudaMalloc within"),
}


def late_gather(why: str) -> list[dict[str, Any]]:
    """F1 F2 F3, each of 200 us; the third unit's gather ends 120 us after F2."""
    trace = Trace()
    trace.at(1000.0 if why != "host" else 0.0)
    gather(trace, "1", -200)
    trace.within("wait_for_unshard", "1")
    gather(trace, "2", -100)
    trace.work(MATMUL, COMPUTE, 2000, 2200)
    trace.within("reshard", "1")
    trace.within("wait_for_unshard", "2")
    trace.work(MATMUL, COMPUTE, 2200, 2300)
    begin = {"memory": 2402, "length": 2100, "link": 2255, "host": 2440, "copy": 2240}[why]
    end = 2290 if why == "copy" else 2520
    if why == "link":
        trace.within("unshard", "0", (COPY, UNSHARD, 2000, 2250))
    if why == "host":
        trace.at(2435.0)
    if why != "memory":
        trace.within("unshard", "3", (COPY, UNSHARD, begin, end))
    trace.work(MATMUL, COMPUTE, 2300, 2400)
    trace.within("reshard", "2")
    if why == "memory":
        trace.within("unshard", "3", (PACK, PRE, 2300, 2310), (COPY, UNSHARD, begin, end))
    if why == "copy":
        trace.within("unshard", "4", (COPY, UNSHARD, 2405, 2518))
    trace.within("wait_for_unshard", "3")
    trace.work(MATMUL, COMPUTE, 2520, 2700)
    reduction(trace, "1", 2700)
    return trace.ended()


@pytest.mark.parametrize(
    ("why", "text"),
    [
        (
            "memory",
            "3's gather ended 120 us after the unit before finished: it began late, when "
            "memory of 2 was freed",
        ),
        ("link", "it began late, when 0's gather left the link"),
        ("host", "it began late, when the host issued it"),
        ("length", "it takes 420 us, longer than 2 computes, from when "),
        ("copy", "4's gather held the device"),
    ],
)
def test_a_late_gather_is_named_with_its_reason(why: str, text: str) -> None:
    (step,) = read_steps(late_gather(why))
    (gaps,) = [failure for failure in check_step(step) if failure.check == "gaps"]
    assert "1 gaps" in gaps.text and text in gaps.text


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_is_found_alone(defect: str) -> None:
    events, check, text = DEFECTS[defect]
    (step,) = read_steps(events())
    failures = check_step(step)
    assert {failure.check for failure in failures} == {check}, failures
    assert text in failures[0].text


def test_calls_that_do_not_wait_are_not_reported() -> None:
    for name in ("cudaMemcpyAsync", "cudaEventRecord", "cudaStreamWaitEvent", "cudaMemsetAsync"):
        (step,) = read_steps(good_step(sync=name))
        assert check_step(step) == []


def test_a_gap_in_the_middle_of_a_unit_is_not_of_the_engine() -> None:
    trace = Trace()
    gather(trace, "1", 20)
    trace.work(MATMUL, COMPUTE, 10, 100)
    trace.work(MATMUL, COMPUTE, 300, 400)
    (step,) = read_steps(trace.ended())
    assert "gaps" not in {failure.check for failure in check_step(step)}


def test_it_reads_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    text = json.dumps({"traceEvents": good_step(pause=80.0)})
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    assert load(plain) == load(packed)
    monkeypatch.setattr("sys.argv", ["gpu_trace.py", str(packed)])
    assert main() == 1
    assert capsys.readouterr().out.startswith("gaps: 1 gaps over 50 us")


def test_the_paced_copy_of_a_link_is_a_collective() -> None:
    trace = Trace()
    trace.within("unshard", "1", ("link_copy", UNSHARD, 20, 50))
    trace.work(MATMUL, COMPUTE, 10, 100)
    ((work, _),) = [step.works for step in read_steps(trace.ended())]
    assert work.is_gather and not work.is_own_kernel
