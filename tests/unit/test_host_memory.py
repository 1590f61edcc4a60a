"""Page-locked memory has the size that was asked for, and every registration is given back; buffers
that come and go are mapped in pages of 2 MiB, where the kernel has them."""

from __future__ import annotations

import gc
import os
import resource
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from layerzero import notices
from layerzero.flat import host_memory as host
from layerzero.flat.buffer import is_worth_huge_pages, prefer_huge_pages
from layerzero.flat.host_memory import DeviceRuntime, HostMemory, registered, runtime_of
from tests.harness.host_memory import FakeRuntime

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("numel", "dtype"), [(1, torch.float32), (1000, torch.bfloat16), ((1 << 20) + 3, torch.uint8)]
)
def test_memory_is_registered_exactly_and_until_its_last_view_is_gone(
    numel: int, dtype: torch.dtype
) -> None:
    runtime = FakeRuntime()
    tensor = registered(numel, dtype, runtime)
    assert (tensor.shape, tensor.dtype) == ((numel,), dtype) and not tensor.any()
    assert runtime.held == {tensor.data_ptr(): numel * dtype.itemsize}
    view = torch.nn.Parameter(tensor[-1:], requires_grad=False)
    storage = view.untyped_storage()
    del tensor
    view.fill_(1)
    del view
    gc.collect()
    assert runtime.held
    del storage
    assert not runtime.held


def test_a_copy_in_a_forked_process_gives_nothing_back() -> None:
    runtime = FakeRuntime()
    tensor = registered(8, torch.float32, runtime)
    with mock.patch.object(os, "getpid", lambda: -1):
        del tensor
    assert runtime.held


def memory(runtime: FakeRuntime | None, pin_memory: bool = True) -> HostMemory:
    with mock.patch.object(host, "runtime_of", lambda device: runtime):
        return HostMemory(pin_memory, CPU)


def test_only_lasting_memory_is_registered_and_only_if_it_is_to_be_pinned() -> None:
    runtime = FakeRuntime()
    allocated = mock.Mock(return_value=torch.empty(0))
    with mock.patch.object(torch, "empty", allocated):
        memory(runtime).empty(5, torch.float32)
        memory(runtime).lasting(0, torch.float32)
        memory(None).lasting(5, torch.float32)
        memory(runtime, pin_memory=False).lasting(5, torch.float32)
    assert not runtime.sizes
    assert [call.kwargs["pin_memory"] for call in allocated.mock_calls] == [True] * 3 + [False]
    kept = memory(runtime).lasting(5, torch.float64)
    assert runtime.sizes == [40] and kept.numel() == 5


def test_where_the_runtime_refuses_torchs_allocator_is_used_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notices, "_issued", set())
    own, runtime = memory(FakeRuntime(refuses=True)), FakeRuntime(refuses=True)
    monkeypatch.setattr(own, "empty", lambda numel, dtype: torch.ones(numel, dtype=dtype))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert own.lasting(4, torch.float32).tolist() == [1.0] * 4
        own.lasting(4, torch.float32)
    (only,) = caught
    assert "page-lock 16 bytes" in str(only.message) and "out of locked memory" in str(only.message)
    assert not runtime.held


class Code:
    """As torch's enum of errors: equal to no integer, but convertible to one."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __int__(self) -> int:
        return self._value


class FakeModule:
    """As torch.cuda: `cudart()` returns the calls."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def cudart(self) -> FakeModule:
        return self

    @contextmanager
    def device(self, device: torch.device):
        self.log.append(device)
        yield
        self.log.append("left")

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Code:
        self.log.append(("register", nbytes, flags))
        return Code(0 if nbytes < 1000 else 712)

    def cudaHostUnregister(self, address: int) -> None:
        self.log.append("unregister")

    def synchronize(self, device: torch.device) -> None:
        self.log.append("synchronize")


def test_torchs_binding_is_called_in_the_context_of_the_models_device() -> None:
    module, device = FakeModule(), torch.device("cuda", 3)
    with mock.patch.object(torch, "get_device_module", lambda _: module):
        runtime = runtime_of(device)
    assert isinstance(runtime, DeviceRuntime)
    tensor = registered(2, torch.float32, runtime)
    assert module.log == [device, ("register", 8, 1), "left"]
    module.log.clear()
    del tensor
    assert module.log == [device, "synchronize", "unregister", "left"], "after copies under way"
    with pytest.raises(RuntimeError, match="error 712"):
        registered(500, torch.float32, runtime)
    assert "unregister" not in module.log[4:], "what was refused is not given back"


def test_devices_without_a_binding_have_no_runtime() -> None:
    assert runtime_of(CPU) is None
    assert runtime_of(torch.device("xpu")) is None


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


def test_small_and_memoryless_tensors_are_left_alone() -> None:
    assert is_worth_huge_pages(torch.empty(4 << 20, dtype=torch.uint8))
    assert not is_worth_huge_pages(torch.empty((4 << 20) - 1, dtype=torch.uint8))
    assert not is_worth_huge_pages(torch.empty(4 << 20, dtype=torch.uint8, device="meta"))
    freed = torch.empty(4 << 20, dtype=torch.uint8)
    freed.untyped_storage().resize_(0)
    prefer_huge_pages(freed)
    values = torch.arange(1 << 20)
    prefer_huge_pages(values)
    assert torch.equal(values, torch.arange(1 << 20)), "no value changes"
