"""A small LightningModule, its data and Trainers whose ranks are those of `run_ranks`."""

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from layerzero.integrations.lightning import ZeRO3Strategy
from tests.harness.models import WIDTH, Block

REPOSITORY = Path(__file__).resolve().parents[2]
BATCH_SIZE = 4
NUM_BATCHES = 4  # on each of two ranks
RANKS = 2


class Regression(pl.LightningModule):
    """Blocks between two layers of the root; remembers its losses."""

    def __init__(self, depth: int = 2, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.make_layers()
        self.losses: list[float] = []

    def make_layers(self) -> None:
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(self.hparams["depth"]))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))
        self.head = nn.Linear(WIDTH, 2)

    def reset_parameters(self) -> None:
        """Of what is this module's own, where it was made without storage."""
        self.num_calls.zero_()

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=dist.is_initialized())

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self(batch[0])

    def loss(self, batch: list[Tensor]) -> Tensor:
        # A parameter of the root, used without calling its module.
        return (self(batch[0]) - batch[1] + 0.1 * self.stem.bias[:2]).square().mean()

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


def seeded(cls: type[Regression] = Regression, seed: int = 0, **arguments: Any) -> Any:
    torch.manual_seed(seed)
    return cls(**arguments)


def rows() -> DataLoader[Any]:
    """Dealt out to ranks row by row, so that together they take what one process takes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(RANKS * NUM_BATCHES * BATCH_SIZE, WIDTH, generator=generator)
    targets = inputs[:, :2].sin() + 0.1 * torch.randn(len(inputs), 2, generator=generator)
    data = TensorDataset(inputs, targets)
    if not dist.is_initialized():
        return DataLoader(data, BATCH_SIZE * RANKS)
    return DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data, shuffle=False))


def zero3_strategy(**arguments: Any) -> ZeRO3Strategy:
    if "plan" not in arguments:
        arguments.setdefault("auto_wrap_policy", {Block})
    return ZeRO3Strategy(**arguments)


def trainer(strategy: Any = None, **arguments: Any) -> pl.Trainer:
    """Quiet, on the CPU; on all ranks of the group, or on this process alone without one."""
    quiet()
    options: dict[str, Any] = dict(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    if dist.is_initialized():
        os.environ["LOCAL_RANK"] = str(dist.get_rank())
        options |= {"devices": dist.get_world_size(), "plugins": [LightningEnvironment()]}
        strategy = strategy or zero3_strategy()
    return pl.Trainer(strategy=strategy or SingleDeviceStrategy("cpu"), **{**options, **arguments})


def ddp(**arguments: Any) -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo", **arguments)


def quiet() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "finetuning_scheduler"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run_example(name: str, folder: Path) -> None:
    """The main function of a program in examples/, on the ranks of a test."""
    sys.path.insert(0, str(REPOSITORY / "examples"))
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    quiet()
    importlib.import_module(name).main(["--folder", str(folder)])


class Overflow(Callback):
    """Makes a gradient of one rank infinite in one step; records the scales after each."""

    def __init__(self, rank: int, step: int, choose: Callable[[Any], nn.Parameter]) -> None:
        self.place, self.choose = (rank, step), choose
        self.scales: list[float] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if (trainer.global_rank, len(self.scales)) == self.place:
            self.choose(pl_module).grad.fill_(torch.inf)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


def wrapper_of(model: nn.Module) -> Any:
    """The `ZeRO3` module that a strategy has made of it; None: none has."""
    return model.__dict__.get("_layerzero_lightning_wrapper")


def full(model: nn.Module) -> dict[str, Tensor]:
    """Full parameters, of a sharded module or of a plain one. Collective."""
    wrapper = wrapper_of(model)
    with nullcontext() if wrapper is None else wrapper.summon_full_params(writeback=False):
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }
