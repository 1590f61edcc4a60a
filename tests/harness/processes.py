"""Programs in processes of the fork server, which has imported what would take them seconds."""

import multiprocessing.process
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.ranks import context, redirect_output, server_finds_the_repository


def call_alone(
    fn: Callable[..., Any],
    *args: Any,
    cwd: Path,
    environment: dict[str, str] | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Call `fn(*args)` in a process of its own, which may start others.

    Args:
        fn: a function of a module; `SystemExit` and other exceptions end it as they end a program.
        cwd: its working directory.
        environment: added to the server's, after torch was imported.
        timeout: seconds, after which it is killed.

    Raises:
        AssertionError: it was killed.
    """
    with tempfile.TemporaryDirectory(prefix="process-") as folder, server_finds_the_repository():
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = context.Process(target=_main, args=(outputs, cwd, environment or {}, fn, args))
        process.start()
        # As in ranks.py: else calls in several threads would read each other's exit codes.
        multiprocessing.process._children.discard(process)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        said, errors = (path.read_text() for path in outputs)
        assert process.exitcode != -9, f"not done after {timeout} s\n{said}{errors}"
        return subprocess.CompletedProcess(fn.__name__, process.exitcode or 0, said, errors)


def run_script(path: Path, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """`python path arguments`; `more` as of `call_alone`."""
    return call_alone(_run_script, str(path), arguments, **more)


def _run_script(path: str, arguments: tuple[str, ...]) -> None:
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def _main(
    outputs: list[Path], cwd: Path, environment: dict[str, str], fn: Callable[..., Any], args: Any
) -> None:
    redirect_output(*outputs)
    os.chdir(cwd)
    os.environ.update(environment)
    fn(*args)
