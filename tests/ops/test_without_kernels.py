"""Where a device has no kernels of ours, plain torch runs and never blocks the host."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from layerzero import ops
from layerzero.ops import Segments, missing_kernels, ordered_sum_, pack_, reference
from tests.ops.truth import concatenate

_READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero")


@contextmanager
def no_reads(allowed: torch.Tensor | None = None) -> Iterator[None]:
    """Every tensor but `allowed` stands for one on a device: to read its values raises."""

    def refused(name: str) -> Any:
        read = getattr(torch.Tensor, name)

        def call(tensor: torch.Tensor, *args: Any) -> Any:
            assert tensor is allowed, f"{name}() of a device tensor blocks the host"
            return read(tensor, *args)

        return call

    with ExitStack() as patches:
        for name in _READS:
            patches.enter_context(mock.patch.object(torch.Tensor, name, refused(name)))
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.complex64])
def test_plain_torch_reads_no_tensor_but_the_table(dtype: torch.dtype) -> None:
    segs = Segments.build([(0, 1, 2, 3), (1, 0, 8, 4)], 16)
    srcs = [torch.arange(5).to(dtype), torch.arange(4).to(dtype)]
    out, wanted = torch.ones(16, dtype=dtype), torch.zeros(16, dtype=dtype)
    wanted[2:5], wanted[8:12] = srcs[0][1:4], srcs[1]
    with no_reads(segs.table):
        if dtype in reference.DTYPES:
            reference.pack_(out, srcs, segs.table, 1.0)
        else:
            reference.move_(out, srcs, segs.table, 1.0)
    assert torch.equal(out, wanted)
    if dtype == torch.int16:
        return
    total = torch.empty_like(out)
    add = reference.complex_sum_ if dtype.is_complex else reference.ordered_sum_
    with no_reads():
        add(total, [out, out], 0.5)
    assert torch.equal(total, out)


@pytest.mark.parametrize("kernel", [False, True], ids=["without", "with"])
def test_the_table_goes_where_it_is_read(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for an accelerator, its fake kernel for what is dispatched to."""
    monkeypatch.setattr(ops, "has_kernel", lambda device_type: kernel)
    given: list[torch.Tensor] = []

    def watched(op: Any, out: Any, srcs: Any, segs: torch.Tensor, *rest: Any) -> None:
        given.append(segs)

    packet = type(torch.ops.layerzero.pack_.default)
    segs = concatenate([4], 8, 8)
    meta = torch.empty(4, device="meta")
    with mock.patch.object(packet, "__call__", watched):
        pack_(torch.empty(8, device="meta"), [meta], segs)
    assert [each.device.type for each in given] == ["meta" if kernel else "cpu"]
    assert given[0] is (segs.on(meta.device) if kernel else segs.table)
    pack_(torch.empty(8, device="meta"), [meta], segs)
    ordered_sum_(torch.empty(4, device="meta"), [meta, meta])


def test_a_table_on_the_device_is_refused_rather_than_waited_for() -> None:
    segs = concatenate([4]).table.to("meta")
    out, srcs = torch.empty(4, device="meta"), [torch.empty(4, device="meta")]
    with (
        mock.patch.object(reference, "_check_memory"),
        pytest.raises(ValueError, match="would block"),
    ):
        reference.pack_(out, srcs, segs, 1.0)


def test_what_is_missing_is_said_with_a_remedy() -> None:
    assert missing_kernels(torch.device("cpu")) is None
    xpu = missing_kernels(torch.device("xpu"))
    assert xpu is not None and "device type 'xpu': none exist" in xpu
    status = ops.native_status()
    cuda = missing_kernels(torch.device("cuda"))
    assert (cuda is None) == status.cuda
    if cuda is not None:
        assert status.reason in cuda and "pip install -v --no-build-isolation" in cuda
