"""Memory may leave its pool at any time; a steady step asks for none, and waits for nothing."""

import pytest

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
