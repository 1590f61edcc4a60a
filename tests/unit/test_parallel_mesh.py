"""Which kind of device a mesh is made for, told by the backend and the machine's accelerator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from layerzero.parallel.mesh import device_type_of

BOTH = "cpu:gloo,cuda:gloo"


@pytest.mark.parametrize(
    ("backend", "accelerator", "expected"),
    [
        ("gloo", None, "cpu"),
        ("gloo", "cuda", "cpu"),  # it serves both, and who wants the other says another backend
        (BOTH, "cuda", "cpu"),
        ("nccl", "cuda", "cuda"),
        ("nccl", None, "cuda"),
        ("xccl", "xpu", "xpu"),
        ("cpu:gloo,cuda:nccl", "cuda", "cuda"),
        ("cpu:gloo,cuda:nccl", None, "cpu"),
        ("cpu:gloo,cuda:nccl", "xpu", "cpu"),  # an accelerator that the backend does not serve
        ("cuda:gloo", "cuda", "cuda"),
        ("npu:hccl", "npu", "npu"),
        ("cpu:gloo,npu:hccl", "npu", "npu"),
        ("npu:hccl", None, "npu"),
    ],
)
def test_a_mesh_is_for_the_accelerator_that_the_backend_serves_alone(
    backend: str, accelerator: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = None if accelerator is None else SimpleNamespace(type=accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    assert device_type_of(backend) == expected
