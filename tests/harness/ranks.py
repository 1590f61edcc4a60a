"""Run functions on several ranks, each a process, and always come back.

docs/internals/testing.md says which of `on_ranks`, the fixture `ranks` and `run_ranks` is for what.

Note [A rank's life]: a rank runs a function and sends its value or its traceback. Where it
returned, it waits for the next function, or to be released, so that no peer loses a connection
because this rank was faster. Where it raised, it leaves at once, so that peers that wait for it see
it go; the next test of the file starts new ranks.
"""

import contextlib
import datetime
import faulthandler
import functools
import gc
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.util
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from layerzero import notices

_REPOSITORY = Path(__file__).resolve().parents[2]
_GRACE_S = 10.0  # that the other ranks have, once one has failed
_LEAVE_S = 20.0  # from the release of the ranks to their end
_STACKS_S = 0.5  # from asking a rank for its stacks to killing it
_OUTPUT_CHARS = 8000  # of each rank's output in a report

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.harness.preload"])


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    expect_exit: Mapping[int, int] | None = None,
    in_float64: bool = False,
) -> list[Any]:
    """Call `fn(*args)` on new ranks.

    Args:
        fn: a function of a module (it is pickled by name).
        args: pickled; the same for every rank.
        timeout: seconds for the whole group.
        expect_exit: rank to the exit code it must end with (negative: the signal that kills it).
            Such a rank must not return; the others go on without it.
        in_float64: makes that the default dtype of models and batches, for comparisons by
            `assert_close_in_float64`.

    Returns:
        What each rank returned, in rank order; None for the ranks of `expect_exit`.

    Raises:
        AssertionError: a rank raised, died, hung, or did not end as expected.
    """
    group = Ranks(world_size, timeout, expect_exit)
    values = group.call(fn, *args, timeout=timeout, in_float64=in_float64)
    group.close()
    return values


def on_ranks(
    world_size: int | None = None,
    *,
    timeout: float = 60.0,
    in_float64: bool = False,
    fresh: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test whose body runs on ranks, see `KeptRanks`, or on `fresh` ones. Its arguments
    are pickled; `world_size` None: one of them says how many."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_kept_ranks(ranks: KeptRanks, **arguments: Any) -> None:
            size = arguments["world_size"] if world_size is None else world_size
            wanted = {name: arguments[name] for name in names}
            options = {"timeout": timeout, "in_float64": in_float64, "arguments": wanted}
            with contextlib.closing(KeptRanks()) if fresh else contextlib.nullcontext(ranks) as own:
                own(size, on_kept_ranks, **options)

        signature = inspect.signature(test)
        names = list(signature.parameters)
        on_kept_ranks.body = test
        fixture = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        on_kept_ranks.__signature__ = signature.replace(
            parameters=[*signature.parameters.values(), fixture]
        )
        return on_kept_ranks

    return decorate


def of_all_ranks(value: Any) -> list[Any]:
    """What each rank of the default group passes, in rank order. Collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class KeptRanks:
    """Groups of ranks, one of each size, that the tests of a file share: the fixture `ranks`.

    Each call begins with the seeds, notices, dtype and module constants of a new process.
    """

    def __init__(self) -> None:
        self._groups: dict[int, Ranks] = {}

    def __call__(self, world_size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """As `run_ranks`, with the options `timeout` and `in_float64`, and keyword `arguments`."""
        group = self._groups.get(world_size)
        if group is None or group.closed:
            group = self._groups[world_size] = Ranks(world_size)
        return group.call(fn, *args, **options)

    def close(self) -> None:
        """End all ranks; an AssertionError if one did not end well."""
        with contextlib.ExitStack() as stack:
            while self._groups:
                stack.callback(self._groups.popitem()[1].close)


class Ranks:
    """One group of ranks, which calls one function after another; closed when one failed."""

    def __init__(
        self, world_size: int, timeout: float = 60.0, expect_exit: Mapping[int, int] | None = None
    ) -> None:
        self.closed = False
        self._what = "nothing"  # which function was called last
        self._members: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        try:
            with server_finds_the_repository():
                for rank in range(world_size):
                    start = _Start(rank, world_size, timeout, self._folder.name)
                    self._members.append(_Rank(start, (expect_exit or {}).get(rank)))
        except BaseException:
            self._end()
            raise

    def call(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        in_float64: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **arguments)` on each rank; see `run_ranks`."""
        self._what = f"{fn.__module__}.{fn.__qualname__}"
        try:
            payload = pickle.dumps((fn, args, dict(arguments or {}), in_float64))
            for member in self._members:
                member.send(pickle.dumps((timeout, payload)))
            _wait_for_functions(self._members, timeout)
        except BaseException:
            self._end()
            raise
        if any(member.failed for member in self._members):
            self.close()
        self._print_output()
        return [member.value() for member in self._members]

    def close(self) -> None:
        """Let all ranks leave; an AssertionError if one failed, or did not."""
        if self.closed:
            return
        try:
            _wait_for_exits(self._members)
        finally:
            self._end()
        failed = [member for member in self._members if member.failed]
        if failed:
            first = min(failed, key=lambda member: member.settled_at)
            raise AssertionError(
                f"{len(failed)} of {len(self._members)} ranks of {self._what} failed, "
                f"rank {first.start.rank} first\n{self._report()}"
            )
        self._print_output()

    def _print_output(self) -> None:
        for member in self._members:
            member.read_output()
        if any(member.output for member in self._members):
            print(self._report())
        for member in self._members:
            member.output = ""

    def _report(self) -> str:
        return "\n".join(member.report() for member in self._members)

    def _end(self) -> None:
        self.closed = True
        for member in self._members:
            member.kill()
        self._folder.cleanup()


@contextlib.contextmanager
def float64_by_default() -> Iterator[None]:
    """In this process what `run_ranks(..., in_float64=True)` does on ranks; also a decorator."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class _Start:
    """What a rank is told."""

    rank: int
    world_size: int
    timeout: float
    folder: str

    @property
    def output_path(self) -> Path:
        return Path(self.folder) / f"output_{self.rank}"


class _Rank:
    """One process, as the test sees it."""

    def __init__(self, start: _Start, expected_exit: int | None) -> None:
        self.start = start
        self.output = ""
        self.settled_at = 0.0
        """When its function ended; 0.0 while it runs."""
        self.failed = False
        self._expected_exit = expected_exit
        self._outcome = "running"
        self._traceback = ""
        self._value: bytes | None = None
        self._output_read = 0  # bytes of earlier functions
        self.connection, child = context.Pipe()
        """Readable when the rank has something to say, or is dead."""
        self._process = context.Process(
            target=_rank_main, args=(start, child), name=f"rank {start.rank}", daemon=True
        )
        try:
            self._process.start()
            # Each start of a process polls all of these. Where groups run in several threads, two
            # of them would read one exit code, and the second gets 255.
            multiprocessing.process._children.discard(self._process)
        finally:
            child.close()  # else the pipe of a dead rank would stay open here

    def send(self, message: bytes) -> None:
        """What to call; or nothing, to let it leave (Note [A rank's life])."""
        if message:
            self.settled_at, self._outcome, self._value = 0.0, "running", None
        with contextlib.suppress(OSError):  # it is gone, which `receive` finds
            self.connection.send_bytes(message)

    def receive(self) -> None:
        """Take the rank's message, or learn that it is gone."""
        expected = self._expected_exit
        try:
            kind, body = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self._process.join(_LEAVE_S)
            is_fine = expected is not None and self._process.exitcode == expected
            self._settle("exited as expected" if is_fine else "died", failed=not is_fine)
            return
        if kind == "raised":
            self._traceback = body
            self._settle("raised", failed=True)
        elif expected is not None:
            self._settle(f"returned instead of exiting with {expected}", failed=True)
        else:
            self._value = body
            self._settle("returned")

    def ask_for_stacks(self) -> None:
        """Have it write the stack of each of its threads to its output."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.pid is not None:
                os.kill(self._process.pid, signal.SIGUSR1)

    def hang(self, elapsed: float) -> None:
        self._settle(f"hung in the function, killed after {elapsed:.1f} s", failed=True)
        self.kill()

    def leave(self, timeout: float) -> None:
        """Wait for the end of the process."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._settle("hung after the function, killed", failed=True)
            self.ask_for_stacks()
            self._process.join(_STACKS_S)
        elif self._outcome == "returned" and self._process.exitcode != 0:
            self._settle("returned, then died", failed=True)

    def kill(self) -> None:
        """Leave nothing behind; safe to call in any state."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(_LEAVE_S)
        self.connection.close()
        self.read_output()

    def read_output(self) -> None:
        """Add what it has written since the last call of this."""
        with contextlib.suppress(OSError), open(self.start.output_path, "rb") as file:
            file.seek(self._output_read)
            text = file.read()
            self._output_read += len(text)
            self.output = (self.output + text.decode(errors="replace")).strip()

    def value(self) -> Any:
        return None if self._value is None else pickle.loads(self._value)

    def report(self) -> str:
        code = self._process.exitcode
        ended = f"exit code {code}"
        if code is not None and -code in {*signal.Signals}:
            ended = f"signal {signal.Signals(-code).name}"
        lines = [f"--- rank {self.start.rank}: {self._outcome}, {ended}"]
        if self._traceback:
            lines.append(self._traceback.rstrip())
        if self.output:
            lines += ["output:", self.output[-_OUTPUT_CHARS:]]
        return "\n".join(lines)

    def _settle(self, outcome: str, failed: bool = False) -> None:
        self.settled_at = self.settled_at or time.monotonic()
        self._outcome, self.failed = outcome, failed


def _wait_for_functions(group: Sequence[_Rank], timeout: float) -> None:
    start = time.monotonic()
    deadline = start + timeout
    while running := [rank for rank in group if not rank.settled_at]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            # All stacks before the first kill, which the others could notice.
            for rank in running:
                rank.ask_for_stacks()
            time.sleep(_STACKS_S)
            for rank in running:
                rank.hang(time.monotonic() - start)
            return
        ready = multiprocessing.connection.wait([rank.connection for rank in running], remaining)
        for rank in running:
            if rank.connection in ready:
                rank.receive()
        if any(rank.failed for rank in group):
            deadline = min(deadline, time.monotonic() + _GRACE_S)


def _wait_for_exits(group: Sequence[_Rank]) -> None:
    for rank in group:
        rank.send(b"")
    deadline = time.monotonic() + _LEAVE_S
    for rank in group:
        rank.leave(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def server_finds_the_repository() -> Iterator[None]:
    """The fork server imports its preload with the path of its environment, not with this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(_REPOSITORY), prepend=os.pathsep)
        yield


def fork_the_server() -> None:
    """Start the server of ranks as a fork of this process: of pytest's, before the first test.

    It has imported already what takes a new interpreter ten seconds. A fork is safe here: no thread
    of pytest does more than wait for messages, and no device is in use. Does nothing elsewhere than
    on Linux, and with an accelerator; a new interpreter then starts with the first ranks.
    """
    if sys.platform != "linux" or torch.accelerator.is_available():
        return

    start_interpreter = multiprocessing.util.spawnv_passfds

    def fork(_path: str, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        try:
            multiprocessing.util.spawnv_passfds = start_interpreter  # for what ranks start
            forkserver._forkserver._lock = threading.Lock()  # the parent holds it
            give_up_descriptors(keep={0, 1, 2, *descriptors})
            exec(arguments[-1], {})  # what `python -c` would run
        finally:
            os._exit(1)

    resource_tracker.ensure_running()
    with mock.patch.object(multiprocessing.util, "spawnv_passfds", fork):
        forkserver.ensure_running()


def give_up_descriptors(keep: set[int]) -> None:
    """Put /dev/null in place of each other descriptor that is open.

    Handlers of loggers and captures of pytest have kept the numbers, and write to them or close
    them. If a number was free, it could by then be that of a socket of gloo: with a line of a log
    between two messages, both ranks wait forever.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in keep and number != nothing:
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _rank_main(start: _Start, connection: Connection) -> None:
    """The whole life of a rank; never returns (Note [A rank's life])."""
    _share_cores_well(start)
    _redirect_output(start.output_path)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    exit_code = 1
    try:
        _limit_time(start.timeout)
        _join_group(start)
        while message := connection.recv_bytes():
            timeout, payload = pickle.loads(message)
            _limit_time(timeout)
            # Bytes made here: a connection would send a tensor as a handle to this process.
            connection.send_bytes(pickle.dumps(("returned", pickle.dumps(_call(payload)))))
            signal.alarm(0)
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send_bytes(pickle.dumps(("raised", traceback.format_exc())))
    else:
        if dist.is_initialized():
            dist.destroy_process_group()
        exit_code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # No interpreter shutdown: it takes as long as the test.
        os._exit(exit_code)


def _limit_time(timeout: float) -> None:
    """Nothing survives its test: when the test itself was killed, a rank that waits for a function
    finds its pipe closed, and one that runs a function ends by this alarm."""
    signal.alarm(int(timeout + _GRACE_S + _LEAVE_S) + 1)


def _call(payload: bytes) -> Any:
    """Run one function as in a new process; an `on_ranks` test stands for its body."""
    gc.collect()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    notices._issued.clear()
    fn, args, arguments, in_float64 = pickle.loads(payload)
    with contextlib.ExitStack() as stack:
        if in_float64:
            stack.enter_context(float64_by_default())
        for name, module in list(sys.modules.items()):
            if name.startswith("layerzero."):
                constants = {each: value for each, value in vars(module).items() if each.isupper()}
                stack.callback(vars(module).update, constants)
        return getattr(fn, "body", fn)(*args, **arguments)


def _share_cores_well(start: _Start) -> None:
    """Where ranks crowd the cores, keep them from taking these from each other amid a send.

    A send over gloo wakes its receiver while the sender holds its pair's lock, and gloo's own
    thread polls without a pause for a lock that is taken. A sender put aside there by what it woke
    costs its whole wait in processor time: of crowded ranks a sixth to a third of all. So a wake
    puts nobody aside, and a rank stays on one core, where its two threads cannot run at once.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) <= start.world_size:
            # From another core on for each server: not all of a busy machine's first ranks on one.
            os.sched_setaffinity(0, {cores[(start.rank + os.getppid()) % len(cores)]})


def _redirect_output(path: Path) -> None:
    """Append what this process writes to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    # In the order in which others, as the dump of stacks, write to the same file.
    sys.stdout = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115


def _join_group(start: _Start) -> None:
    torch.set_num_threads(1)
    # gloo would ask the resolver for the host's name, which need not lead to a usable interface.
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback.pop()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{start.folder}/store",
        rank=start.rank,
        world_size=start.world_size,
        timeout=datetime.timedelta(seconds=start.timeout),
    )
    # Nobody runs, and perhaps dies, while a peer still connects to it. Through the store, because a
    # barrier would let the first rank out while the others are in it.
    store = dist.PrefixStore("joined", dist.distributed_c10d._get_default_store())
    store.set(str(start.rank), "")
    store.wait([str(rank) for rank in range(start.world_size)])
