"""Measures the peak of live bytes in this process, in the same way for every engine.

torch has no statistics of CPU memory, and its profiler misses memory released by other threads,
such as gloo's. So a thread samples the C library's count of allocated bytes. It samples often
enough to catch every large buffer, which takes longer to fill than the sampling interval.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

_INTERVAL_S = 2e-4


class _Mallinfo2(ctypes.Structure):
    """See mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def live_bytes() -> int:
    """Bytes in use from malloc, in all threads."""
    info = _mallinfo2()
    return info.uordblks + info.hblkhd


def peak_bytes(prepare: Callable[[], Callable[[], object]], warmup: int = 2, steps: int = 3) -> int:
    """Peak of the live bytes in a step; see `resting_and_peak_bytes`."""
    return resting_and_peak_bytes(prepare, warmup, steps).peak


class Held(NamedTuple):
    """Live bytes between steps, and the peak in a step."""

    resting: int
    peak: int


def resting_and_peak_bytes(
    prepare: Callable[[], Callable[[], object]], warmup: int = 2, steps: int = 3
) -> Held:
    """Live bytes between steps, and their peak in a step, above those before `prepare()`.

    Args:
        prepare: builds the object to measure, and returns a function that runs one step of it.
        warmup: steps that do not count, e.g. for the optimizer to create its state.
        steps: steps that count; more than one, because threads free their buffers late.
    """
    gc.collect()
    before = live_bytes()
    step = prepare()
    for _ in range(warmup):
        step()
    gc.collect()  # The original model, if only reference cycles keep it alive, must not count.
    resting = live_bytes()
    with _Sampler() as sampler:
        for _ in range(steps):
            step()
    return Held(resting - before, sampler.peak - before)


def self_check() -> None:
    """Measure a known peak, to detect a C library that counts differently."""
    megabyte = 1 << 20

    def prepare() -> Callable[[], None]:
        kept = torch.zeros(30 * megabyte, dtype=torch.uint8)
        resized = torch.empty(0, dtype=torch.uint8)

        def step() -> None:
            resized.untyped_storage().resize_(20 * megabyte)
            extra = kept[: 10 * megabyte].clone()
            time.sleep(0.01)
            del extra
            resized.untyped_storage().resize_(0)

        return step

    expected, counted = 60 * megabyte, peak_bytes(prepare)
    if abs(counted - expected) > 0.01 * expected:
        raise RuntimeError(f"counted {counted} bytes where {expected} are live")


class _Sampler:
    """Records the peak of live bytes while it is entered."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Sampler:
        self.peak = live_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self.peak = max(self.peak, live_bytes())


def _mallinfo2() -> _Mallinfo2:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except AttributeError as error:
        raise NotImplementedError(
            "this C library has no mallinfo2 (glibc 2.33 and later do); leave the peak out"
        ) from error
    function.restype = _Mallinfo2
    return function()
