"""Forks of one process, the server, which has imported the tests: workers, and other programs.

Each worker of pytest-xdist would import torch, the frameworks and all files of tests, which takes
as long as many tests. On Linux without an accelerator the server does it once, for all; elsewhere
each worker is an interpreter of its own. The fork is safe for the reasons of `fork_the_server`
(ranks.py).

pytest-xdist starts a program for each worker, and talks with it over its stdin and stdout. The
program is a stand-in for Python: it gives these to the server, which forks, and ends as the fork
does. So `python()` serves other programs as well, if a torch that is imported already is as good.
"""

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

_STAND_IN = """
import json, os, socket, sys
door, *arguments = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as server:
    try:
        server.connect(door)
        socket.send_fds(server, [b"?"], [0, 1, 2])
        what = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
        server.sendall(len(what).to_bytes(8, "big") + what)
    except OSError:
        os.execv(sys.executable, [sys.executable, *arguments])
    status = server.recv(1)
sys.exit(status[0] if status else 1)
"""
"""Without a server it becomes the interpreter that it stands for."""
_VARIABLE = "LAYERZERO_TESTS_PYTHON"


def python() -> str:
    """An executable like `sys.executable`, for `[-u] (SCRIPT | -c CODE | -m MODULE) ARGUMENTS`;
    under pytest-xdist one that has imported torch and the tests. The program is no child of the
    process that is started, but ends with it, and with its exit status."""
    return os.environ.get(_VARIABLE, sys.executable)


_path_of_imports: list[str] = []
_environment_of_imports: dict[str, str] = {}
"""What the imports of tests have added to both. A worker gets them from pytest-xdist as they were
before."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        sys.path[:0] = [each for each in _path_of_imports if each not in sys.path]
        os.environ.update(_environment_of_imports)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    import torch

    if sys.platform != "linux" or torch.accelerator.is_available():
        return
    folder = Path(tempfile.mkdtemp(prefix="workers-"))
    program, stand_in, door = (folder / name for name in ("stand_in.py", "python", "door"))
    program.write_text(_STAND_IN)
    command = shlex.join([sys.executable, "-I", "-S", str(program), str(door)])
    stand_in.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    stand_in.chmod(0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(door))
    listener.listen()
    os.environ[_VARIABLE] = str(stand_in)
    ended, ends = os.pipe()  # readable once this process is gone, however it ended
    if (server := os.fork()) == 0:
        status = 1
        try:
            os.close(ends)
            _import_tests(_files(config))
            _serve(listener, ended)
            status = 0
        finally:
            os._exit(status)
    os.close(ended)
    listener.close()

    def end() -> None:
        os.close(ends)
        os.waitpid(server, 0)
        shutil.rmtree(folder)
        del os.environ[_VARIABLE]

    config.add_cleanup(end)
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = shlex.quote(str(stand_in))


def _files(config: pytest.Config) -> Iterator[str]:
    """Modules of the files that the workers will collect, as pytest names them."""
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.partition("::")[0])
        for file in [path] if path.is_file() else sorted(path.rglob("test_*.py")):
            folder = next(each for each in file.parents if not (each / "__init__.py").exists())
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
            yield ".".join(file.relative_to(folder).with_suffix("").parts)


def _import_tests(modules: Iterator[str]) -> None:
    path, environment = sys.path.copy(), dict(os.environ)
    # Those of the pytest that was forked.
    logging.getLogger().handlers.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            # What does not import is reported by the workers.
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(name)
    _path_of_imports.extend(each for each in sys.path if each not in path)
    _environment_of_imports.update(dict(os.environ.items() - environment.items()))
    gc.collect()
    gc.freeze()


def _serve(listener: socket.socket, ended: int) -> None:
    """Fork for each connection, until pytest has ended."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by a descriptor of the process
    is_open = True
    while is_open or running:
        connections = {each.fileno(): pid for pid, each in running.values()}
        doors = [listener.fileno(), ended] if is_open else []
        ready = {*select.select([*doors, *running, *connections], [], [])[0]}
        for process in running.keys() & ready:
            pid, connection = running.pop(process)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):
                connection.sendall(bytes([code if code >= 0 else 128 - code]))
            os.close(process)
            connection.close()
        for stand_in in connections.keys() & ready:  # It was killed.
            with contextlib.suppress(ProcessLookupError):
                os.kill(connections[stand_in], signal.SIGKILL)
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            if (request := _receive(connection)) is None:
                connection.close()
                continue
            streams, what = request
            if (pid := os.fork()) == 0:
                _run(streams, *what)
            for stream in streams:
                os.close(stream)
            running[os.pidfd_open(pid)] = pid, connection
        is_open = is_open and ended not in ready


def _receive(connection: socket.socket) -> tuple[list[int], list[Any]] | None:
    """The streams and what `_STAND_IN` sends with them; None if it was killed meanwhile."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as file:
        what = file.read(int.from_bytes(file.read(8), "big"))
    if what:
        return streams, json.loads(what)
    for stream in streams:
        os.close(stream)
    return None


def _run(
    streams: list[int], arguments: list[str], environment: dict[str, str], folder: str
) -> NoReturn:
    """What an interpreter does, from its start to its end."""
    from tests.harness.ranks import give_up_descriptors

    status = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        give_up_descriptors(keep={0, 1, 2})
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        how, *rest = arguments[arguments[0] == "-u" :]
        if how == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(rest[0], vars(main))
        elif how == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [how, *rest]
            sys.path.insert(0, str(Path(how).resolve().parent))
            runpy.run_path(how, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
