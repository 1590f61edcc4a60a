"""docs/howto/several_machines.md: two agents of torchrun, and Ray Train, each with two ranks."""

import json
import random
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

from tests.harness.processes import call_alone
from tests.harness.ranks import run_ranks

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
SMALL = ["--layers", "1", "--width", "16", "--seq", "16", "--steps", "4", "--batch", "2"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _losses(log: Path) -> list[tuple[int, list[float]]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [(line["step"], line["rank_losses"]) for line in lines]


def _train_lm(flags: list[str]) -> None:
    """On ranks that one agent would have started."""
    sys.path.insert(0, str(EXAMPLES))
    import train_lm
    from lm_options import Place, load_options_on_rank

    rank, size = dist.get_rank(), dist.get_world_size()
    place = Place(rank=rank, local_rank=rank, local_world_size=size, world_size=size)
    options, corpus = load_options_on_rank(flags, place)
    train_lm.train_and_sample(options, corpus, place, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="gloo is told the loopback interface of Linux")
def test_two_agents_train_as_one_agent_with_two_ranks(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(random.Random(0).randbytes(5000))

    def flags_of(name: str) -> list[str]:
        out = ["--out", str(tmp_path / name), "--log", str(tmp_path / f"{name}.jsonl")]
        return [*SMALL, "--data", str(text), *out]

    meeting = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(_free_port())]

    def run_agent(node: int) -> subprocess.CompletedProcess[str]:
        flags = [*meeting, "--node-rank", str(node), "--nproc-per-node", "1", "--"]
        arguments = [*flags, str(EXAMPLES / "train_lm.py"), *flags_of("two")]
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return call_alone(torchrun, arguments, cwd=REPOSITORY, environment=environment)

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(run_agent, (0, 1)):
            assert done.returncode == 0, done.stderr[-5000:]
    run_ranks(2, _train_lm, flags_of("one"))

    two, one = _losses(tmp_path / "two.jsonl"), _losses(tmp_path / "one.jsonl")
    assert len(two) == 4
    assert two == one


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
