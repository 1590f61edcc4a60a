"""Functions as programs, in interpreters of their own."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parents[2]
_CALL = """
import os, pickle, sys
fn, args = pickle.loads(bytes.fromhex(sys.argv[1]))
os.chdir(sys.argv[2])
fn(*args)
"""


def call_alone(
    fn: Callable[..., Any],
    *args: Any,
    cwd: Path,
    environment: dict[str, str] | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Call a function of a module, imported from the repository, in a new interpreter, where
    `SystemExit` and other exceptions end it as they end a program; `environment` is added to that
    of this process."""
    paths = os.pathsep.join([str(_REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", _CALL, pickle.dumps((fn, args)).hex(), str(cwd)],
        cwd=_REPOSITORY,
        env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
