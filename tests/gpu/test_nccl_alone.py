"""NCCL behaves as the engine assumes: a group of one rank, without peers."""

import pytest
import torch

from tests.gpu.process import in_process

pytestmark = pytest.mark.gpu


def test_verbs_move_values_and_return_no_work_on_the_current_stream() -> None:
    found = in_process("tests.gpu.scenes:verbs", "cuda", timeout=60)
    assert [name for name, is_right in found.items() if not is_right] == []


def test_a_collective_runs_behind_the_current_stream() -> None:
    found = in_process("tests.gpu.scenes:on_the_current_stream", "cuda", timeout=60)
    assert [name for name, is_right in found.items() if not is_right] == []


def test_abort_returns_behind_a_busy_stream() -> None:
    assert in_process("tests.gpu.scenes:abort_behind_a_busy_stream", timeout=60) < 20


def test_a_stuck_stream_is_reported_and_the_host_goes_on() -> None:
    found = in_process("tests.gpu.scenes:a_stuck_stream_is_reported", timeout=90)
    assert found["error"] is not None and "all-gather of " in found["error"]
    # Two seconds of standing still, a second between looks, a few for the report of all ranks.
    assert found["seconds"] < 20
    # With the interpreter's lock held in a call on the stuck device, every thread would stand.
    assert found["longest_pause_s"] < 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_may_be_on_another_device_than_the_current_one() -> None:
    wrong = in_process("tests.gpu.scenes:another_device", 1, timeout=90)
    assert not any(wrong.values()), wrong
