"""The parts of the GPU benchmark run on the CPU, and every measure has an expected range."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks import bench_gpu_step as bench
from benchmarks.gpu_expected import EXPECTED
from tests.harness.ranks import run_ranks

MEASURES = {
    "ceilings": {"copy_tb_s", "matmul_tflop_s"},
    "step": {"bare_ms", "layerzero_over_bare_w8", "layerzero_over_fully_shard_w8"},
    "host": {"host_ms_per_unit_layerzero", "host_ms_per_unit_fully_shard"},
    "memory": set(),
    "trace": set(),
}
"""On the CPU; the allocator's counters and the device's part of a trace are a GPU's."""


def _parts() -> dict[str, tuple[list[str], dict]]:
    dist.destroy_process_group()
    config = bench.Config("tiny", 2, 16, 1, torch.device("cpu"))
    found = {}
    for part in bench.PARTS:
        measures, details = bench.MEASURES[part](config, 8)
        found[part] = (sorted(measures), details)
    return found


def test_every_part_runs_and_every_measure_is_expected(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_ranks(1, _parts, timeout=120)[0]
    assert {part: set(measures) for part, (measures, _) in found.items()} == MEASURES
    for measures, _ in found.values():
        assert set(measures) <= EXPECTED.keys()
    assert found["trace"][1]["steps"] == 2
