"""A training program that may be killed at any moment: it goes on from its latest checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 5 tests/faults/worker.py FOLDER STEPS

Each rank writes its losses to FOLDER, as exact hexadecimal numbers.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from layerzero import ZeRO3, checkpoint
from tests.harness.models import Block

SAVE_EVERY = 10
_ROWS = 12
"""Of the batch of all ranks; they divide by 1 to 4 ranks."""
_WIDTH = 32


def train(folder: Path, num_steps: int, pause_s: float = 0.0) -> None:
    """Train up to step `num_steps`, in the world that the environment describes.

    Args:
        pause_s: that a step takes besides, in place of the compute of a larger model.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(_WIDTH, 4 * _WIDTH) for _ in range(3)))
    model = ZeRO3(module, auto_wrap_policy={Block}, timeout=timedelta(seconds=30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved, step = folder / "saved", 0
    if (saved / "latest").exists():
        step = checkpoint.load(saved, model, optimizer)["step"]
    mine = slice(rank * _ROWS // world_size, (rank + 1) * _ROWS // world_size)
    with (folder / f"losses-{rank}").open("a", buffering=1) as log:
        while step < num_steps:
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(_ROWS, _WIDTH, generator=generator)[mine]
            loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            log.write(f"{step} {world_size} {loss.item().hex()}\n")
            step += 1
            time.sleep(pause_s)
            if step % SAVE_EVERY == 0 or step == num_steps:
                checkpoint.save(saved, model, optimizer, step=step, extra={"step": step}, keep=2)
    (folder / f"done-{rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    _attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    _pid = Path(sys.argv[1]) / f"pid-{_attempt}-{os.environ['RANK']}"
    _pid.with_suffix(".new").write_text(str(os.getpid()))
    _pid.with_suffix(".new").rename(_pid)
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
