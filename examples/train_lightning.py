"""See the loss under Lightning's Trainer after 4 epochs, and after 8 from a sharded checkpoint.

    python examples/train_lightning.py

Sharded over two ranks. Needs the extra: pip install layerzero[lightning]. Lightning starts the
second rank itself. On two GPUs: `--accelerator cuda`.
"""

import argparse
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from layerzero.integrations.lightning import ZeRO3Strategy

VOCABULARY = 16
WIDTH = 32


class Counting(Dataset[Tensor]):
    """Three numbers that go up by an equal step, modulo the vocabulary."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Tensor:
        start, step = index % VOCABULARY, index // VOCABULARY
        return (start + step * torch.arange(3)) % VOCABULARY


class Block(nn.Module):
    """Residual MLP; each block is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.up = nn.Linear(2 * WIDTH, 8 * WIDTH)
        self.down = nn.Linear(8 * WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NextNumber(pl.LightningModule):
    """Makes its layers on the meta device; sharding initialises them unit by unit."""

    def configure_model(self) -> None:
        if hasattr(self, "head"):
            return
        with torch.device("meta"):
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.Sequential(*(Block() for _ in range(3)))
            self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        seen, wanted = batch[:, :2], batch[:, 2]
        loss = F.cross_entropy(self.head(self.blocks(self.embed(seen).flatten(1))), wanted)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(options: argparse.Namespace, epochs: int, resume_from: Path | None = None) -> pl.Trainer:
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        strategy=ZeRO3Strategy({Block}, state_dict_type="sharded"),
        accelerator=options.accelerator,
        devices=options.devices,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    loader = DataLoader(Counting(), batch_size=8, shuffle=True)
    trainer.fit(NextNumber(), loader, ckpt_path=resume_from)
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["loss"]
        print(f"after {trainer.current_epoch} epochs: loss {loss:.3f}", flush=True)
    return trainer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args(arguments)
    checkpoint = options.folder / "train_lightning.ckpt"
    train(options, epochs=4).save_checkpoint(checkpoint)
    train(options, epochs=8, resume_from=checkpoint)


if __name__ == "__main__":
    main()
