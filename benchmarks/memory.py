"""The peak of live bytes in this process, counted alike for every engine.

torch keeps no statistic of its CPU memory, and its profiler misses what other threads release, such
as gloo's. So the C library is asked how many bytes it has given out and not got back, by a thread
that samples often enough to meet every large buffer, which takes longer to fill than a sample.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable

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
    """Peak of the live bytes in a step, above those before `prepare()`.

    Args:
        prepare: builds what is measured and returns one step of it.
        warmup: steps before those that count, e.g. for the optimizer to make its state.
        steps: that count. More than one, because threads free their buffers when they get to it.
    """
    gc.collect()
    before = live_bytes()
    step = prepare()
    for _ in range(warmup):
        step()
    gc.collect()  # a model that only cycles keep alive is not the engine's
    with _Sampler() as sampler:
        for _ in range(steps):
            step()
    return sampler.peak - before


def self_check() -> None:
    """Measure a known peak, so that a C library that counts otherwise is noticed."""
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
    """Notes the most live bytes while it is entered."""

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
