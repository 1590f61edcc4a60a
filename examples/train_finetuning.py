"""See fine-tuning under Lightning thaw more parameters in each of three phases, and the loss fall.

    python examples/train_finetuning.py

Needs the extra: pip install layerzero[lightning]. The first phase trains the head, the second the
blocks as well, the third everything; the model is that of train_lightning.py. On two GPUs:
`--accelerator cuda`.
"""

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from finetuning_scheduler import FinetuningScheduler
from torch.utils.data import DataLoader
from train_lightning import Counting, NextNumber

from layerzero.integrations.lightning import ZeRO3Strategy

PHASES = {
    0: {"params": [r"head\..*"], "max_transition_epoch": 3},
    1: {"params": [r"blocks\..*"], "max_transition_epoch": 6, "lr": 3e-3},
    2: {"params": [r"embed\..*"], "max_transition_epoch": 9, "lr": 3e-3},
}
# Patterns of the modules that become units, with their options.
PLAN: dict[str, Any] = {r"blocks\.\d+": {"act_ckpt": "wrapped"}, "head": {}}
ADAPTER = "layerzero.integrations.finetuning_scheduler:ZeRO3StrategyAdapter"


class Pretrained(NextNumber):
    """Makes its layers in __init__, because the scheduler reads names before sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.configure_model()

    def on_train_epoch_end(self) -> None:
        thawed = sum(parameter.requires_grad for parameter in self.parameters())
        if self.trainer.is_global_zero:
            loss = self.trainer.callback_metrics["loss"]
            print(f"epoch {self.current_epoch}: {thawed} parameters, loss {loss:.3f}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args(arguments)
    logging.getLogger("finetuning_scheduler").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)
    scheduler = FinetuningScheduler(
        ft_schedule=PHASES,
        epoch_transitions_only=True,
        restore_best=False,
        allow_untested=True,  # Required for strategies that are not in its own list.
        custom_strategy_adapters={
            "layerzero": ADAPTER
        },  # Not needed if layerzero is installed: it has an entry point.
        strategy_adapter_cfg={"zero3_plan": PLAN},
    )
    trainer = pl.Trainer(
        strategy=ZeRO3Strategy(),
        accelerator=options.accelerator,
        devices=options.devices,
        max_epochs=9,
        callbacks=[scheduler],
        default_root_dir=options.folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Pretrained(), DataLoader(Counting(), batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
