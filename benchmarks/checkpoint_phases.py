"""Where a save and a load spend their time: a clock around each of their steps, on this rank.

The steps are functions of `layerzero.checkpoint`, replaced by timed ones while `measured` is
entered; the product itself measures nothing. Steps inside another one, and those of the threads
that move bytes, are summed over threads, so they may exceed the time of the step around them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from layerzero.checkpoint import loading, save_plan, saving
from layerzero.checkpoint.file_io import direct_io, transfer
from layerzero.checkpoint.format import folder
from layerzero.state_dict.checkpoint_group import CheckpointGroup

_STEPS: dict[str, list[tuple[str, Any, str]]] = {
    "save": [
        ("list", save_plan.Content, "collect"),
        ("plan", saving, "SavePlan"),
        ("prepare folder and files", saving, "_prepare"),
        ("write", saving, "write_ranges"),
        ("  in threads: copy and checksum", transfer, "copy_crc32"),
        ("  in threads: write", direct_io, "_write_all"),
        ("  close and fsync", direct_io.FileWriter, "finish"),
        ("combine checksums", save_plan.SavePlan, "manifest"),
        ("rename and fsync", folder, "commit"),
        ("exchange, wait for others", CheckpointGroup, "gather"),
    ],
    "load": [
        ("open", loading, "open_source"),
        ("match", loading.LoadPlanner, "match_model"),
        ("match optimizers", loading.LoadPlanner, "match_optimizers"),
        ("allocate", transfer, "_in_memory"),
        ("read", loading, "read_ranges"),
        ("  in threads: read", direct_io.FileReader, "read"),
        ("  in threads: checksum", transfer, "crc32"),
        ("verify", loading, "_verify"),
        ("copy weights", torch.Tensor, "copy_"),
        ("put optimizer state", loading, "put_state"),
        ("exchange, wait for others", CheckpointGroup, "gather"),
    ],
}


class Phases:
    """Seconds of each step of one save or load; "total" is the whole, "CPU" of the process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    @contextmanager
    def measured(self, verb: str, work: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
        """`work`, a "save" or a "load", with clocks in it."""

        def timed(path: str) -> None:
            start, cpu = time.perf_counter(), time.process_time()
            work(path)
            self.seconds["total"] = time.perf_counter() - start
            self.seconds["CPU"] = time.process_time() - cpu

        with ExitStack() as stack:
            for name, owner, attribute in _STEPS[verb]:
                step = self._timed(name, getattr(owner, attribute))
                stack.enter_context(mock.patch.object(owner, attribute, step))
            yield timed

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                with self._lock:
                    self.seconds[name] += took

        return timed


def phase_names(verb: str) -> list[str]:
    return [*(name for name, _, _ in _STEPS[verb]), "total", "CPU"]
