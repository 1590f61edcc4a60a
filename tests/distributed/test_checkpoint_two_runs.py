"""Two runs that save to one folder, as when ranks outlive a launcher that was killed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from layerzero import ZeRO3
from layerzero.checkpoint import CheckpointError, load, save
from layerzero.checkpoint.__main__ import verify
from layerzero.checkpoint.format.folder import committed_steps
from tests.harness.models import Mlp
from tests.harness.ranks import KeptRanks


def _save_beside_another(root: Path) -> str:
    """Each rank is a run of its own; the first one's save goes on while the second one's comes."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    rank = dist.get_rank()
    model = ZeRO3(Mlp(), process_group=groups[rank])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank + 1)
    if rank == 0:
        writing, go_on = threading.Event(), threading.Event()

        def wait(done_nbytes: int, total_nbytes: int) -> None:
            writing.set()
            go_on.wait(20)

        handle = save(root, model, step=8, blocking=False, progress=wait)
        assert writing.wait(20)
        dist.barrier()
        dist.barrier()
        go_on.set()
        path = handle.wait()
        assert all(not damages for _, damages in verify(path))
        dist.barrier()
        dist.barrier()
        return ""
    dist.barrier()
    with pytest.raises(CheckpointError) as refused:
        save(root, model, step=8)
    dist.barrier()
    dist.barrier()
    load(root, model)
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())
    save(root, model, step=9)
    dist.barrier()
    return str(refused.value)


def test_the_second_is_refused_and_the_first_is_whole(tmp_path: Path, ranks: KeptRanks) -> None:
    reason = ranks(2, _save_beside_another, tmp_path / "run")[1]
    assert f"{tmp_path / 'run'}: process " in reason
    assert "is saving here" in reason
    assert list(committed_steps(tmp_path / "run")) == [8, 9]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "latest",
        "step-00000008",
        "step-00000009",
    ]


def _save_once(root: Path) -> None:
    save(root, ZeRO3(Mlp()), step=3)


def test_what_a_killed_run_held_is_free(tmp_path: Path, ranks: KeptRanks) -> None:
    (tmp_path / ".lock").write_text("process 1 on elsewhere")
    ranks(2, _save_once, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000003"]
