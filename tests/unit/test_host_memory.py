"""Page-locked memory has the size that was asked for, and every registration is given back; large
memory is mapped in pages of 2 MiB, where it asks for them and the kernel has them."""

import gc
import os
import resource
from pathlib import Path
from unittest import mock

import pytest
import torch

from layerzero.flat import host_memory as host
from layerzero.flat.host_memory import HostMemory
from layerzero.optim.huge_pages import prefer_huge_pages
from tests.harness.host_memory import FakeRuntime

CPU = torch.device("cpu")


def lasting(
    numel: int, dtype: torch.dtype, runtime: object, pin_memory: bool = True
) -> torch.Tensor:
    with mock.patch.object(host, "get_device_module", lambda _: runtime):
        return HostMemory(pin_memory, CPU).lasting(numel, dtype)


def test_memory_is_registered_exactly_and_until_its_last_view_is_gone() -> None:
    runtime = FakeRuntime()
    tensor = lasting(1003, torch.bfloat16, runtime)
    assert (tensor.shape, tensor.dtype) == ((1003,), torch.bfloat16) and not tensor.any()
    assert runtime.held == {tensor.data_ptr(): 2006}
    assert runtime.log == [CPU, "register", "left"]
    view = torch.nn.Parameter(tensor[-1:], requires_grad=False)
    storage = view.untyped_storage()
    del tensor
    view.fill_(1)
    del view
    gc.collect()
    assert runtime.held
    del storage
    assert not runtime.held
    assert runtime.log[3:] == [CPU, "synchronize", "unregister", "left"], "after copies under way"


def test_a_copy_in_a_forked_process_gives_nothing_back() -> None:
    runtime = FakeRuntime()
    tensor = lasting(8, torch.float32, runtime)
    with mock.patch.object(os, "getpid", lambda: -1):
        del tensor
    assert runtime.held


def test_else_torchs_allocator_is_used() -> None:
    allocated = mock.Mock(return_value=torch.empty(0))
    with mock.patch.object(torch, "empty", allocated):
        lasting(0, torch.float32, FakeRuntime())
        lasting(5, torch.float32, torch.cpu)
        lasting(5, torch.float32, FakeRuntime(refuses=True))
        lasting(5, torch.float32, FakeRuntime(), pin_memory=False)
    assert [call.kwargs["pin_memory"] for call in allocated.mock_calls] == [True] * 3 + [False]


_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NBYTES = 64 << 20


def _faults_of_a_first_touch(advised: bool) -> int:
    buffer = torch.empty(_NBYTES, dtype=torch.uint8)
    if advised:
        prefer_huge_pages(buffer, collapse=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer.fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(
    not _SETTING.exists() or "[madvise]" not in _SETTING.read_text(),
    reason="the kernel gives huge pages to all or to none",
)
def test_a_first_touch_of_a_large_buffer_takes_few_page_faults() -> None:
    plain, advised = _faults_of_a_first_touch(False), _faults_of_a_first_touch(True)
    assert plain > 10_000
    assert advised < plain / 10


def test_tensors_without_memory_are_left_alone() -> None:
    freed = torch.empty(4 << 20, dtype=torch.uint8)
    freed.untyped_storage().resize_(0)
    prefer_huge_pages(freed)
    values = torch.arange(1 << 20)
    prefer_huge_pages(values)
    assert torch.equal(values, torch.arange(1 << 20)), "no value changes"
