"""Runs worker.py under torchrun, and kills its ranks at random moments."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]


def kill_under_torchrun(
    folder: Path, num_steps: int, kills: int, mean_s: float, generator: random.Random
) -> int:
    """Train with two ranks, of which one is killed `kills` times. Returns the number of kills.

    Args:
        mean_s: mean time from the start of both ranks to the kill; exponentially distributed.

    Raises:
        AssertionError: torchrun failed, or did not end in time.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", str(kills + 1)]
    command += ["--monitor-interval", "0.1", str(_REPOSITORY / "tests" / "faults" / "worker.py")]
    command += [str(folder), str(num_steps), "0.02"]
    path = f"{_REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    # Else gloo may find the addresses of the attempt before in the store (docs/howto/hang.md).
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = 0
    with (folder / "output").open("w") as output:
        agent = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            for attempt in range(kills):
                pid = _wait_for_ranks(folder, attempt, agent)[generator.randrange(2)]
                time.sleep(generator.expovariate(1 / mean_s))
                os.kill(pid, signal.SIGKILL)
                done += 1
            code = agent.wait(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
    assert code == 0, (folder / "output").read_text()[-3000:]
    return done


def _wait_for_ranks(folder: Path, attempt: int, agent: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of the ranks of one attempt, once both run."""
    paths = [folder / f"pid-{attempt}-{rank}" for rank in range(2)]
    deadline = time.monotonic() + 120.0
    while not all(path.exists() for path in paths):
        assert agent.poll() is None and time.monotonic() < deadline, (
            f"attempt {attempt} did not start: {(folder / 'output').read_text()[-3000:]}"
        )
        time.sleep(0.02)
    return [int(path.read_text()) for path in paths]
