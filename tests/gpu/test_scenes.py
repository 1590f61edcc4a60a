"""Memory may leave its pool at any time; a steady step asks for none, and waits for nothing; NCCL
behaves as the engine assumes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.gpu.process import REFUSED, ProcessFailed, find_program, in_process
from tests.gpu.scenes import USES

pytestmark = pytest.mark.gpu

ALLOCATORS = ("expandable_segments:True", "backend:cudaMallocAsync")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_memory_may_leave_its_pool_between_forward_and_backward(allocator, dtype: str) -> None:
    wrong = in_process(
        "tests.gpu.scenes:empty_cache_between",
        "cuda",
        {"bfloat16": dtype == "bfloat16"},
        30,
        timeout=90,
        env={"PYTORCH_CUDA_ALLOC_CONF": allocator},
    )
    assert not any(wrong.values()), wrong


def test_the_sanitizer_finds_no_use_after_free_in_stream_order() -> None:
    sanitizer = find_program("compute-sanitizer")
    if sanitizer is None:
        pytest.skip(f"{REFUSED}no compute-sanitizer on this machine")
    # NCCL asks the driver for what a device may lack: such answers are no errors.
    tool = ["--tool", "memcheck", "--track-stream-ordered-races", "all", "--error-exitcode", "9"]
    tool += ["--report-api-errors", "no"]
    try:
        in_process(
            "tests.gpu.scenes:empty_cache_between",
            "cuda",
            {},
            1,
            64,
            timeout=150,
            env={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
            before=[sanitizer, *tool],
        )
    except ProcessFailed as error:
        if "Device not supported" in str(error):
            pytest.skip(f"{REFUSED}by compute-sanitizer, this device")
        raise


def test_a_steady_step_asks_the_driver_for_no_memory() -> None:
    counts = in_process("tests.gpu.scenes:allocations", "cuda", 10, timeout=60)
    assert counts[3:] == [counts[3]] * (len(counts) - 3), counts


@pytest.mark.parametrize("use", USES)
def test_a_steady_step_returns_while_the_device_is_busy(use: str) -> None:
    assert in_process("tests.gpu.scenes:host_goes_on", "cuda", use, timeout=60) == {"busy": True}


def test_nccl_moves_values_and_returns_no_work_on_the_current_stream() -> None:
    found = in_process("tests.gpu.scenes:verbs", "cuda", timeout=60)
    assert [name for name, is_right in found.items() if not is_right] == []


def test_nccl_runs_behind_the_current_stream() -> None:
    found = in_process("tests.gpu.scenes:on_the_current_stream", "cuda", timeout=60)
    assert [name for name, is_right in found.items() if not is_right] == []


def test_nccl_aborts_behind_a_busy_stream() -> None:
    assert in_process("tests.gpu.scenes:abort_behind_a_busy_stream", timeout=60) < 20


def test_nccl_that_is_stuck_is_reported_and_the_host_goes_on() -> None:
    found = in_process("tests.gpu.scenes:a_stuck_stream_is_reported", timeout=90)
    assert found["error"] is not None and "all-gather of " in found["error"]
    # Two seconds of standing still, a second between looks, a few for the report of all ranks.
    assert found["seconds"] < 20
    # With the interpreter's lock held in a call on the stuck device, every thread would stand.
    assert found["longest_pause_s"] < 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_serves_a_model_on_another_device_than_the_current_one() -> None:
    wrong = in_process("tests.gpu.scenes:another_device", 1, timeout=90)
    assert not any(wrong.values()), wrong


def test_two_ranks_train_like_the_replica(tmp_path: Path) -> None:
    """On one GPU, which NCCL does not support: it may refuse or hang.

    Ranks that name different hosts get past its check that no two share a GPU, and then talk over
    sockets. What it shows is right or wrong values; not how fast anything is.
    """

    def run(rank: int) -> int:
        return in_process(
            "tests.gpu.scenes:one_of_two",
            "cuda",
            rank,
            str(tmp_path),
            timeout=80,
            env={
                "NCCL_HOSTID": f"host-{rank}",
                "NCCL_NET": "Socket",
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_P2P_DISABLE": "1",
                "NCCL_SHM_DISABLE": "1",
                "NCCL_IB_DISABLE": "1",
            },
        )

    with ThreadPoolExecutor(2) as pool:
        started = [pool.submit(run, rank) for rank in range(2)]
    try:
        wrong = [each.result() for each in started]
    except ProcessFailed as error:
        if "NCCL error" in str(error) or "Duplicate GPU" in str(error) or "killed" in str(error):
            pytest.skip(f"{REFUSED}by NCCL: {str(error).splitlines()[-1][:200]}")
        raise
    assert wrong == [0, 0]
