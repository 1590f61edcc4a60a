"""Programs in examples/: the trainer of `make train`, which can be killed at any time, and on two
machines, a consumer of weights, a model of two modalities, and a worker of Ray Train."""

import functools
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.run import main as torchrun

from layerzero.checkpoint.format.folder import committed_steps
from tests.harness import ranks
from tests.harness.checks import of_floats
from tests.harness.processes import call_alone
from tests.harness.ranks import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
SMALL = ["--layers", "1", "--width", "16", "--seq", "16", "--steps", "12", "--batch", "2"]
NUM_STEPS = 12


def _train(arguments: list[str], die_after: tuple[int, float] | None = None) -> list[float]:
    """Train as `main` does, on these ranks; returns the losses. `die_after`: see `_die`."""
    import lm_options
    import train_lm

    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = lm_options.Place(
        rank=rank, local_rank=rank, local_world_size=world_size, world_size=world_size
    )
    options, corpus = lm_options.load_options_on_rank(arguments, place)
    if die_after is not None:
        pids: list[Any] = [None] * world_size
        dist.all_gather_object(pids, os.getpid())
        if rank == 0:
            threading.Thread(target=_die, args=(options.log, pids, *die_after), daemon=True).start()
    seen: list[float] = []
    train_lm.on_step = lambda record: seen.append(record.loss)
    outcome = train_lm.train_and_sample(options, corpus, place, torch.device("cpu"))
    reported = [] if rank else outcome.losses
    assert seen == (reported[options.steps - len(seen) :] if options.resume else reported)
    return outcome.losses


def _die(log: Path, pids: list[int], num_lines: int, delay_s: float) -> None:
    """Kill all ranks outright, a moment after so many steps."""
    while log.read_bytes().count(b"\n") < num_lines:
        time.sleep(0.001)
    time.sleep(delay_s)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGKILL)


_run = functools.partial(run_ranks, in_float64=True)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a small model on text of its own."""
    folder = tmp_path_factory.mktemp("example")
    text = folder / "text"
    text.write_bytes(random.Random(0).randbytes(5000))
    return [*SMALL, "--data", str(text), "--out", str(folder)]


def _steps(log: Path) -> list[tuple[int, float, list[float]]]:
    """What the log says of each step, apart from speed and memory."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [(line["step"], line["loss"], line["rank_losses"]) for line in lines]


class Whole(NamedTuple):
    """A run that was never stopped, with all its checkpoints."""

    log: Path
    checkpoints: Path
    losses: list[float]


@pytest.fixture(scope="module")
def whole(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    log, checkpoints = folder / "log", folder / "checkpoints"
    own = ["--log", str(log), "--checkpoint-dir", str(checkpoints), "--checkpoint-every", "5"]
    return Whole(log, checkpoints, _run(2, _train, [*flags, *own])[0])


def _until(step: int, whole: Whole, folder: Path) -> list[str]:
    """Flags to go on from an earlier checkpoint of a run, with what its log had then."""
    name = f"step-{step:08d}"
    shutil.copytree(whole.checkpoints / name, folder / name)
    return ["--checkpoint-dir", str(folder), "--resume", "--log", str(folder / "log")]


def test_saving_changes_no_loss(flags: list[str], whole: Whole, tmp_path: Path) -> None:
    _run(2, _train, [*flags, "--log", str(tmp_path / "log")])
    assert _steps(tmp_path / "log") == _steps(whole.log)
    assert [step for step, _, _ in _steps(whole.log)] == list(range(1, NUM_STEPS + 1))
    assert list(committed_steps(whole.checkpoints)) == [5, 10, 12]


def test_a_run_killed_at_any_time_goes_on_bit_for_bit(
    flags: list[str], whole: Whole, tmp_path: Path
) -> None:
    log, checkpoints = tmp_path / "log", tmp_path / "checkpoints"
    own = ["--log", str(log), "--checkpoint-dir", str(checkpoints), "--checkpoint-every", "2"]
    own += ["--keep", "2", "--resume"]
    dead = dict.fromkeys(range(2), -signal.SIGKILL)
    log.touch()
    for num_lines in (1, 5, 10):
        moment = (num_lines, random.SystemRandom().uniform(0, 0.02))
        _run(2, _train, [*flags, *own], moment, expect_exit=dead)
        steps = _steps_of_a_killed_run(log)
        assert steps == _steps(whole.log)[: len(steps)], moment
        with log.open("a") as file:
            file.write('{"step": 1')  # torn, as a machine that goes down may leave it
    losses = _run(2, _train, [*flags, *own])[0]
    assert losses == whole.losses
    assert _steps(log) == _steps(whole.log)
    assert list(committed_steps(checkpoints)) == [10, 12]
    assert [each.name for each in checkpoints.glob(".*")] == [".lock"]


def _steps_of_a_killed_run(log: Path) -> list[tuple[int, float, list[float]]]:
    log.write_text("".join(line for line in log.read_text().splitlines(True) if line[-1] == "\n"))
    return _steps(log)


def test_a_run_goes_on_at_another_number_of_ranks(
    flags: list[str], whole: Whole, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = [*_until(5, whole, tmp_path), "--batch", "4"]
    losses = _run(1, _train, [*flags, *own])[0]
    assert losses[:5] == whole.losses[:5]
    # The same windows, their mean taken over one rank instead of two.
    assert losses == of_floats(whole.losses)
    assert [step for step, _, _ in _steps(tmp_path / "log")] == list(range(6, NUM_STEPS + 1))
    assert f"{tmp_path / 'log'} has no steps 1 to 5" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (["--lr", "0.1", "--seq", "8"], "was saved with --seq 16, not 8, --lr 0.001, not 0.1"),
        (["--width", "24"], "shapes differ"),
    ],
)
def test_another_run_is_not_gone_on_with(
    changed: list[str], reason: str, flags: list[str], whole: Whole, tmp_path: Path
) -> None:
    own = _until(5, whole, tmp_path)
    with pytest.raises(AssertionError) as failed:
        _run(1, _train, [*flags, *own, *changed])
    lines = [line for line in str(failed.value).splitlines() if "train_lm.py: error: " in line]
    assert len(lines) == 1
    assert reason in lines[0]


def test_ranks_do_not_outlive_a_launcher_that_was_killed() -> None:
    rank = "import lm_launcher, time; lm_launcher.leave_with_launcher(); print(1); time.sleep(50)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-uc', {rank!r}])"
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "here", "PYTHONPATH": str(EXAMPLES)}
    with subprocess.Popen(
        [sys.executable, "-c", launcher], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        process.kill()
        killed = time.monotonic()
        assert process.stdout.read() == ""  # until the rank, which holds the pipe too, is gone
        assert time.monotonic() - killed < 20


@pytest.mark.slow
def test_other_engines_train_too(flags: list[str]) -> None:
    for engine in ("fully_shard", "ddp"):
        losses = _run(1, _train, [*flags, "--engine", engine])[0]
        assert len(losses) == NUM_STEPS and losses[-1] < losses[0]


SMALL_SENDER = ["--steps", "4", "--layers", "1", "--width", "64", "--seq", "16", "--tokens", "2"]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    for module in (multiprocessing, torch.multiprocessing):
        # Their processes are forked from the server, which has loaded torch.
        monkeypatch.setattr(module, "get_context", lambda _: ranks.context)


def test_the_consumer_ends_with_the_bits_of_the_trainer_and_a_picture(
    tmp_path: Path, examples: None
) -> None:
    import sync_weights

    picture = tmp_path / "deep" / "picture.png"
    with ranks.server_finds_the_repository():
        found = sync_weights.main([*SMALL_SENDER, "--picture", str(picture)])
    assert found["equal"] and found["texts"] >= 1 and len(found["rounds"]) == 4
    for each in found["rounds"]:
        assert 0 < each["bytes"] < 0.25 * each["full_bytes"]
    assert picture.read_bytes()[:4] == b"\x89PNG"


SMALL_TOWERS = ["--steps", "12", "--batch", "4"]


def _program(picture: Path | None) -> None:
    """As torchrun starts it, and then on this rank alone."""
    sys.path.insert(0, str(EXAMPLES))
    import train_two_towers as example

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with mock.patch.object(dist, "init_process_group"):  # There is one.
        example.main([*SMALL_TOWERS, *(["--plot", str(picture)] if picture else [])])
    example.main([*SMALL_TOWERS, "--single", "--ranks", size])


@pytest.mark.slow
def test_two_towers_train_like_one_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two ranks, whose sums have one order, to the bit."""
    draws = importlib.util.find_spec("matplotlib") is not None
    picture = tmp_path / "losses.png" if draws else None
    run_ranks(2, _program, picture)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    sharded, *single = (json.loads(line)["losses"] for line in lines)
    assert len(sharded) == 12 and single == [sharded] * 2
    assert picture is None or picture.exists()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="gloo is told the loopback interface of Linux")
def test_two_agents_train_as_one_agent_with_two_ranks(flags: list[str], tmp_path: Path) -> None:
    """docs/howto/several_machines.md."""
    two, one = ([*flags, "--log", str(tmp_path / name)] for name in ("two", "one"))
    meeting = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(_free_port())]

    def run_agent(node: int) -> subprocess.CompletedProcess[str]:
        place = [*meeting, "--node-rank", str(node), "--nproc-per-node", "1", "--"]
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        arguments = [*place, str(EXAMPLES / "train_lm.py"), *two]
        return call_alone(torchrun, arguments, cwd=EXAMPLES.parent, environment=environment)

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(run_agent, (0, 1)):
            assert done.returncode == 0, done.stderr[-5000:]
    run_ranks(2, _train, one)
    assert len(_steps(tmp_path / "two")) == NUM_STEPS
    assert _steps(tmp_path / "two") == _steps(tmp_path / "one")


RESUMED = ["--workers", "2", "--steps", "6", "--checkpoint-every", "2", "--fail-at", "5"]


def _ray_worker(config: dict[str, Any]) -> None:
    """What Ray calls on each worker, on a rank that it did not start."""
    ray = MagicMock()
    ray.train.torch.get_device.return_value = torch.device("cpu")
    sys.modules |= {"ray": ray, "ray.train": ray.train, "ray.train.torch": ray.train.torch}
    import train_ray

    train_ray.train_worker(config)


def _uninterrupted(folder: Path) -> dict[str, Any]:
    """Metrics of a run that no failure stops."""
    folder.mkdir()
    config = {"steps": 6, "checkpoint_every": 2, "fail_at": None, "storage": str(folder)}
    run_ranks(2, _ray_worker, config)
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    assert metrics["step"] == 6 and metrics["resumed_from"] == 0
    return metrics


@pytest.mark.slow  # Ray takes seconds to import.
def test_a_worker_of_ray_resumes_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but Ray's own processes."""
    pytest.importorskip("ray.train")
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_ray

    class Trainer(train_ray.TorchTrainer):
        def __init__(self, worker: Any, *, train_loop_config: dict[str, Any], **given: Any) -> None:
            super().__init__(worker, train_loop_config=train_loop_config, **given)
            self.config = train_loop_config

        def fit(self) -> None:
            with pytest.raises(AssertionError, match="asked to fail at step 5"):
                run_ranks(2, _ray_worker, self.config)
            run_ranks(2, _ray_worker, self.config)

    monkeypatch.setattr(train_ray, "TorchTrainer", Trainer)
    resumed = train_ray.run(train_ray.parse([*RESUMED, "--storage", str(tmp_path)]))
    assert resumed == {**_uninterrupted(tmp_path / "uninterrupted"), "resumed_from": 4}
