"""Programs, and functions as programs, in new interpreters."""

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
    fn: Callable[..., Any], *args: Any, cwd: Path, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Call `fn(*args)` in a new interpreter, where `SystemExit` and other exceptions end it as they
    end a program.

    Args:
        fn: a function of a module.
        cwd: its working directory.
        **more: as of `run_python`.
    """
    pickled = pickle.dumps((fn, args)).hex()
    return run_python("-c", _CALL, pickled, str(cwd), cwd=_REPOSITORY, **more)


def run_python(
    *arguments: str, cwd: Path, environment: dict[str, str] | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """`python arguments`, which finds the repository. `environment` is added to this process's; the
    timeout is an error."""
    paths = {"PYTHONPATH": os.pathsep.join([str(_REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **paths, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
