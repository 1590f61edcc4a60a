"""Finds and loads the native library built from csrc/."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class NativeStatus:
    """Which native kernels are available; `native_status()` returns it."""

    native: bool
    """Whether the native CPU kernels run; otherwise plain torch does."""
    cuda: bool
    """Whether the library has CUDA kernels."""
    reason: str
    """Why one of the two is False, and what to do; empty where both are True."""


def ops_revision() -> str:
    """Checksum of what defines the ops: a library built for others would misread arguments."""
    return f"{zlib.crc32(Path(__file__).with_name('schema.py').read_bytes()):08x}"


def load(folder: Path) -> NativeStatus:
    """Load the library in the package's folder. Never raises: the status gives the reason."""
    found = sorted(folder.glob("_C.*so"))
    if not found:
        return NativeStatus(
            False,
            False,
            f"no library in {folder}: with torch and a C++ compiler installed, `pip install -v "
            "--no-build-isolation` builds it, or prints why it cannot",
        )
    # Read before it is loaded: whatever it registers then stays.
    if f"layerzero ops {ops_revision()}".encode() not in found[0].read_bytes():
        return NativeStatus(False, False, f"{found[0]} was built for other ops: build it again")
    try:
        torch.ops.load_library(found[0])
    except Exception as error:
        # Whatever is wrong with a library, the package works without it.
        return NativeStatus(False, False, f"{found[0]} could not be loaded: {error}")
    if not _has_kernel("CUDA"):
        return NativeStatus(
            True,
            False,
            "built without CUDA kernels: nvcc is missing, or failed; install it or set CUDA_HOME, "
            "and build again with `pip install -v --no-build-isolation`",
        )
    return NativeStatus(True, True, "")


def _has_kernel(key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("layerzero::pack_", key)


@functools.cache
def has_kernel(device_type: str) -> bool:
    """Whether `pack_` has a kernel for this type of device. Elsewhere plain torch runs."""
    return _has_kernel(torch._C._dispatch_key_for_device(device_type))
