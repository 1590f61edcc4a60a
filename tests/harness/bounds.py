"""What code that reads foreign bytes may do: raise CheckpointError, soon, in little memory."""

import contextlib
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from layerzero.checkpoint import CheckpointError

ALLOWED: tuple[type[Exception], ...] = (CheckpointError,)
LIMIT_S = 1.0
MOST_NBYTES = 64 << 20
"""By which the memory of a process may grow over all cases, each of which has a few kilobytes."""
_HANGS_S = 30.0
_LEAK = re.compile(r"rank \d+: (?!CheckpointError|DeltaError|OSError)[A-Z]\w*(Error|Exception)\b")
"""The name of an exception that nobody meant to raise, in a message."""


def outcome(
    attempt: Callable[[], Any], allowed: tuple[type[Exception], ...] = ALLOWED
) -> tuple[bool, str | None]:
    """Whether `attempt` returned instead of raising one of `allowed`, and what is wrong or None."""
    begin, returned, problem = time.process_time(), False, None
    signal.signal(signal.SIGALRM, _hangs)
    signal.setitimer(signal.ITIMER_REAL, _HANGS_S)
    try:
        attempt()
        returned = True
    except allowed as error:
        leak = _LEAK.search(str(error))
        problem = f"a message names {leak[0]}: {error!s:.300}" if leak else None
    except Exception as error:
        problem = f"raised {type(error).__name__}: {error!s:.300}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took = time.process_time() - begin
    return returned, problem or (f"took {took:.1f} s" if took > LIMIT_S else None)


def _hangs(*_: object) -> None:
    raise RuntimeError(f"it hangs for {_HANGS_S} s")


def peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextlib.contextmanager
def limited_memory(more_nbytes: int = 1 << 30) -> Iterator[None]:
    """Let allocations fail that would take this process's address space so far beyond today's."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    former = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more_nbytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, former)
