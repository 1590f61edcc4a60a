"""The engine's host work for a unit and step is what benchmarks/results/host_work_*.md says.

That includes what a device adds: events, waits, streams, storages and collectives, counted on a
device that does nothing else. Counts, not times: they are the same on every machine, so a branch or
a frame more in the hot path is a failure here and not noise. After a change that is worth its work,
run the benchmark and commit its output.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import layerzero
from tests.harness.pages import REPOSITORY

BENCHMARK = REPOSITORY / "benchmarks" / "bench_host_work.py"


def _committed() -> dict[str, Any]:
    [page] = (REPOSITORY / "benchmarks" / "results").glob("host_work_*.md")
    [line] = re.findall(r'^\{"benchmark": "host_work".*\}$', page.read_text(), re.M)
    return json.loads(line)


@pytest.mark.skipif(
    not layerzero.native_status().native, reason="plain torch instead of kernels does more work"
)
@pytest.mark.parametrize("ranks", ["64", pytest.param("4096", marks=pytest.mark.soak)])
def test_host_work_of_a_unit_is_not_more_than_committed(ranks: str) -> None:
    committed = _committed()
    # A new interpreter: what other tests have imported adds frames of torch.
    command = [sys.executable, str(BENCHMARK), "--engines", "layerzero", "--measure"]
    runs = [
        subprocess.Popen(
            [*command, world_size],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            text=True,
        )
        for world_size in ("8", ranks)
    ]
    found = []
    for run in runs:
        output, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors
        found.append(json.loads(output.splitlines()[-1])["layerzero"])
    at_8, at_many = found
    assert at_8 == at_many, "the engine's work, construction's too, must not grow with the world"

    expected = committed["world_sizes"]["8"]["layerzero"]
    environment = committed["environment"]
    # What torch's own functions do is for one version of torch and of Python alone.
    of_torch = {"frames", "operations", "allocations", "construction_frames"}
    versions = (environment["torch"], environment["python"].rpartition(".")[0])
    if versions == (torch.__version__, platform.python_version().rpartition(".")[0]):
        of_torch = {"construction_frames"}
    assert "event_records" in expected
    for kind in expected.keys() - of_torch:
        assert at_8[kind] <= expected[kind], kind
