"""Call a function in a process of its own: a GPU's errors, settings and hangs end with it.

    value = in_process("tests.gpu.mirror_runs:run", "cuda", 0, 8, cases, timeout=120)

Arguments and the result travel as JSON. Not `run_ranks`: its processes are forked, and CUDA must
not have been touched before a fork.
"""

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
REFUSED = "refused: "
"""Begins the reason of a skip where the machine does not let a test run that needs not pass."""
_OUTPUT_CHARS = 4000


class ProcessFailed(AssertionError):
    """The process ended with an error, or was killed after its time."""


def in_process(
    function: str,
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
) -> Any:
    """Call `module:function` with `args` in a new interpreter, and return its result.

    Args:
        env: variables to set there, beside those of this process.
        before: a command and its flags to run the interpreter under, such as compute-sanitizer.

    Raises:
        ProcessFailed: it failed, or took longer than `timeout` seconds; with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        answer = Path(folder, "answer.json")
        command = [*before, sys.executable, "-m", __name__, function, str(answer), json.dumps(args)]
        code, output = run_command(command, timeout, env)
        if code != 0 or not answer.exists():
            state = f"killed after {timeout:.0f} s" if code is None else f"exit status {code}"
            raise ProcessFailed(f"{function}: {state}\n{output[-_OUTPUT_CHARS:]}")
        return json.loads(answer.read_text())


def run_command(
    command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a command in the repository; see `Started.finish`."""
    return Started(command, env).finish(timeout)


class Started:
    """A command that runs in the repository, or waits for a line of its input to begin."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # One signal then reaches its children, too.
        )

    def finish(self, timeout: float) -> tuple[int | None, str]:
        """Let it begin, and wait for its end; returns (exit status, output).

        The status is None if it was killed, with its children, after `timeout` seconds.
        """
        code: int | None
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(b"\n")
            self._process.stdin.close()
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_tree(self._process)
        with self._output:
            self._output.seek(0)
            return code, self._output.read().decode(errors="replace")


def find_program(name: str) -> str | None:
    """Where a program of CUDA's toolkit is; None if it is neither on the path nor there."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process and all it has started, also what has a session of its own by now."""
    running = [] if process.poll() is not None else [*_descendants(process.pid), process.pid]
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # Orphans of those that had ended before are in the session's group only.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[int]:
    """Children, their children and so on, by /proc; where there is none, nothing."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def _main() -> None:
    function, answer, args = sys.argv[1:]
    module, _, name = function.partition(":")
    value = getattr(importlib.import_module(module), name)(*json.loads(args))
    Path(answer).write_text(json.dumps(value))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # A stuck stream, or a communicator, would hold up the interpreter's end.


if __name__ == "__main__":
    _main()
