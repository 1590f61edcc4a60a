"""Two calls of the CUDA driver that torch does not offer to a thread beside the main one.

Through ctypes, on the driver that the process has loaded; without one (CPU, other devices, ROCm)
nothing happens. The driver and not the runtime, because its name does not change with the version,
and torch may have linked the runtime statically.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from typing import Any

_CAPTURE_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"""
_SUCCESS = 0
_NOT_READY = 600
"""CUDA_ERROR_NOT_READY"""

_logger = logging.getLogger(__name__)


@functools.cache
def _driver() -> Any:
    """The driver, if the process has loaded it; else None."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
        driver.cuEventQuery.argtypes = [ctypes.c_void_p]
        return driver
    except (OSError, AttributeError) as error:
        _logger.debug("no CUDA driver is loaded: %s", error)
        return None


def ignore_captures_of_other_threads() -> None:
    """Let this thread query events while another thread captures a graph.

    By default a query on any thread invalidates a capture that was begun in mode "global", which
    is torch's default. Concerns the calling thread alone.
    """
    driver = _driver()
    if driver is None:
        return
    mode = ctypes.c_int(_CAPTURE_THREAD_LOCAL)
    code = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if code != _SUCCESS:
        _logger.warning(
            "watchdog threads may invalidate graph captures: the CUDA driver returned error %d",
            code,
        )


def is_done(event: Any) -> bool:
    """`event.query()`, on CUDA without the GIL, which torch keeps.

    A query may block on a lock of the driver while a collective is stuck.
    """
    driver = _driver() if hasattr(event, "cuda_event") else None
    if driver is not None:
        code = driver.cuEventQuery(event.cuda_event)  # ctypes releases the GIL.
        if code in (_SUCCESS, _NOT_READY):
            return bool(code == _SUCCESS)
    return bool(event.query())  # It raises, and names what is wrong.
