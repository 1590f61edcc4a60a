"""What this folder needs; where it is missing, every test is skipped for that one reason."""

import pytest
import torch

from layerzero.ops import native_status


@pytest.fixture(autouse=True)
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("tests/gpu needs a GPU and a CUDA build of torch")
    if not native_status().cuda:
        pytest.skip(f"tests/gpu needs the CUDA kernels: {native_status().reason}")
    return torch.device("cuda", torch.cuda.current_device())
