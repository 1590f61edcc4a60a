"""Two ranks of a script, ended when neither has written anything for a while."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

START_LIMIT_S = 120.0
"""Until the first line is written: imports take long on a busy machine."""


class Watched(NamedTuple):
    """What became of the ranks, each in rank order."""

    lines: list[list[str]]
    """What it has written."""
    hung: list[bool]
    errors: list[str]
    """How it ended; "" if well, or if it hung."""


def run(script: str, arguments: list[str], limit_s: float) -> Watched:
    """Run `script --rank RANK ARGUMENT... STORE` on two ranks; STORE is a file's path.

    Args:
        limit_s: seconds without a line of any rank, after which all are ended.
    """
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        files = [Path(folder, f"{rank}.{kind}") for rank in range(2) for kind in ("out", "err")]
        ranks = []
        for rank in range(2):
            own = [sys.executable, script, "--rank", str(rank), *arguments, f"{folder}/store"]
            with files[2 * rank].open("w") as out, files[2 * rank + 1].open("w") as err:
                ranks.append(subprocess.Popen(own, stdout=out, stderr=err))
        try:
            hung = _wait(ranks, files[::2], limit_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        texts = [file.read_text() for file in files]
    errors = [
        "" if is_hung else _error(process.returncode, text)
        for process, is_hung, text in zip(ranks, hung, texts[1::2], strict=True)
    ]
    return Watched([text.splitlines() for text in texts[::2]], hung, errors)


def _wait(ranks: list[subprocess.Popen[bytes]], outputs: list[Path], limit_s: float) -> list[bool]:
    """Which of the ranks still run when none has written anything for so long."""
    size, deadline = 0, time.monotonic() + START_LIMIT_S
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
        written = sum(output.stat().st_size for output in outputs)
        if written > size:
            size, deadline = written, time.monotonic() + limit_s
    return [process.poll() is None for process in ranks]


def _error(code: int | None, text: str) -> str:
    """How a rank ended; "" if well."""
    if not code:
        return ""
    lines = [line for line in text.splitlines() if line and line[0] != " " and "Error" in line]
    ended = f"died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return lines[-1].partition("]: ")[2][:160] if lines else ended


def named(chosen: Iterable[bool]) -> str:
    """ "rank 0" or "both ranks"; "" for none."""
    ranks = [str(rank) for rank, is_chosen in enumerate(chosen) if is_chosen]
    return "both ranks" if len(ranks) == 2 else "".join(f"rank {rank}" for rank in ranks)


def plural_s(subject: str) -> str:
    return "" if subject == "both ranks" else "s"


def compared(losses: Sequence[Sequence[float]], single: Sequence[Sequence[float]]) -> str:
    """What to say of a run that ended, whose losses on each rank one process has as `single`."""
    pairs = [
        (a, b)
        for own, other in zip(losses, single, strict=True)
        for a, b in zip(own, other, strict=True)
    ]
    if all(abs(a - b) < 1e-5 * abs(b) for a, b in pairs):
        return "trains, with the losses of one process"
    return f"trains, with OTHER LOSSES than one process: {pairs}"
