"""Reports a run to its user: memory, progress, log and loss curve."""

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TextIO

import torch

PROC_STATUS = Path("/proc/self/status")
CURVE_WINDOW = 10
REPORT_EVERY_S = 5.0


class MemoryMeter:
    """Peak bytes of this rank since the meter was made, measured the same for every engine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._resident_at_start = 0 if device.type == "cuda" else resident_nbytes("VmRSS")
        self._peak = 0

    def peak_nbytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        # The kernel's counters vary by a few pages between readings; `max` keeps a peak a peak.
        self._peak = max(self._peak, resident_nbytes("VmHWM") - self._resident_at_start)
        return self._peak


def resident_nbytes(field: str) -> int:
    """`VmRSS` (resident now) or `VmHWM` (its peak).

    Read from /proc on Linux: getrusage's ru_maxrss includes the launcher that forked this process,
    and does not have the current value.
    """
    if PROC_STATUS.exists():
        for line in PROC_STATUS.read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class StepRecord(NamedTuple):
    """One line of the log."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean of `rank_losses`."""
    rank_losses: list[float]
    """Nats per byte, each rank's float32 value unrounded."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    tokens_per_s: float
    """Total of all ranks."""
    bytes_per_rank: int
    """Largest peak of any rank so far."""


class StepReport:
    """Prints progress, and writes a log with one JSON object for each step. For one rank."""

    def __init__(self, num_steps: int, log: Path | None, num_done: int = 0) -> None:
        """`num_done`: steps that a resumed run has done; the log is then appended to."""
        if log is not None and num_done:
            forget_steps_after(num_done, log)
        self._log: TextIO | None = None if log is None else log.open("a" if num_done else "w")
        self._num_steps = num_steps
        self._first = num_done + 1
        self._last_printed, self._printed_at = num_done, time.monotonic()

    def add(self, record: StepRecord) -> None:
        if self._log is not None:
            self._log.write(json.dumps(record._asdict()) + "\n")
            # Flushed, so that a killed run leaves all its steps.
            self._log.flush()
        since_s = time.monotonic() - self._printed_at
        if since_s >= REPORT_EVERY_S or record.step in (self._first, self._num_steps):
            self._print(record, since_s)

    def _print(self, record: StepRecord, since_s: float) -> None:
        """Print one line, which reads the same on a terminal and in a file."""
        step_s = since_s / (record.step - self._last_printed)
        left = timedelta(seconds=round(step_s * (self._num_steps - record.step)))
        self._last_printed, self._printed_at = record.step, time.monotonic()
        print(
            f"step {record.step:{len(str(self._num_steps))}}/{self._num_steps}"
            f"  loss {record.loss:.3f}  lr {record.learning_rate:.1e}"
            f"  grad norm {record.grad_norm:.2f}  {record.tokens_per_s:,.0f} tokens/s"
            f"  peak {record.bytes_per_rank / 1e9:.2f} GB/rank  {left} left",
            flush=True,
        )

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def forget_steps_after(step: int, log: Path) -> None:
    """Truncate a log after the line of `step`, because later steps are repeated.

    Prints a note if lines of earlier steps are missing, as in a new file.
    """
    if not log.is_file():
        return
    nbytes = last = 0
    for line in log.read_bytes().splitlines(keepends=True):
        number = step_of(line)
        if number != last + 1 or number > step:
            break
        last, nbytes = number, nbytes + len(line)
    os.truncate(log, nbytes)
    if last < step:
        print(f"train_lm.py: {log} has no steps {last + 1} to {step}", file=sys.stderr)


def step_of(line: bytes) -> int | None:
    """The step of a line of the log; None for the incomplete last line of a killed run."""
    try:
        step: int = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if line.endswith(b"\n") else None


def save_loss_curve(losses: Sequence[float], title: str, path: Path) -> None:
    """Plot the loss of each step, in a pale colour, and its moving average."""
    # Imported here, because importing matplotlib would count as memory of the training.
    from matplotlib.figure import Figure

    recent = [losses[max(0, end - CURVE_WINDOW) : end] for end in range(1, len(losses) + 1)]
    smooth = [sum(window) / len(window) for window in recent]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, label="each step")
    axes.plot(steps, smooth, color="tab:blue", label=f"mean of the last {CURVE_WINDOW}")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
