"""See a run under Ray Train resume from its checkpoint after a failure, and its last loss.

    pip install layerzero[ray]
    python examples/train_ray.py --workers 2 --steps 20 --storage out/ray

`--fail-at 12` makes it fail once. Ray starts the workers and their process group; each worker runs
`train_worker`. The storage must be a folder that all machines share.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn

from layerzero import ZeRO3, checkpoint

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Rows and their reversals; different on each rank and in each step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows = torch.randn(16, WIDTH, generator=generator)
    return rows, rows.flip(1)


def train_worker(config: dict[str, Any]) -> None:
    """Train on one rank. Ray calls it on every worker, and again on all after a failure."""
    device = train.torch.get_device()
    torch.manual_seed(0)
    layers = nn.Sequential(*(Block() for _ in range(4)))
    model = ZeRO3(layers, auto_wrap_policy={Block}, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    folder = Path(config["storage"], "layerzero")
    first = 0
    if (folder / "latest").exists():
        first = checkpoint.load(folder, model, optimizer)["step"]
    for step in range(first + 1, config["steps"] + 1):
        rows, wanted = (tensor.to(device) for tensor in batch_of(step, dist.get_rank()))
        loss = (model(rows) - wanted).square().mean()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % config["checkpoint_every"] == 0 or step == config["steps"]:
            checkpoint.save(folder, model, optimizer, step=step, extra={"step": step}, keep=2)
        if config["fail_at"] == step and first == 0 and dist.get_rank() == 0:
            raise RuntimeError(f"asked to fail at step {step}")
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        metrics = {"step": step, "loss": mean.item() / dist.get_world_size(), "resumed_from": first}
        if dist.get_rank() == 0:
            (folder.parent / "metrics.json").write_text(json.dumps(metrics))
        train.report(metrics)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train on Ray's workers; returns the last metrics."""
    storage = Path(options.storage).resolve()
    on_gpu = torch.cuda.is_available()
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={**vars(options), "storage": str(storage)},
        torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
        scaling_config=train.ScalingConfig(num_workers=options.workers, use_gpu=on_gpu),
        run_config=train.RunConfig(
            name="layerzero",
            storage_path=str(storage / "ray"),
            failure_config=train.FailureConfig(max_failures=1),
        ),
    )
    trainer.fit()  # Raises a worker's error. Returns metrics only with Ray's own checkpoints.
    metrics: dict[str, Any] = json.loads((storage / "metrics.json").read_text())
    return metrics


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint-every", type=int, default=5)
    parser.add_argument("--storage", default="out/ray", help="a folder that all see")
    parser.add_argument("--fail-at", type=int, help="fail once at this step, to see it resume")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    metrics = run(parse())
    ray.shutdown()
    print(
        f"step {metrics['step']}: loss {metrics['loss']:.4f}, "
        f"resumed from step {metrics['resumed_from']}"
    )
