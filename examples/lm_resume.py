"""Saves a run while it trains, and resumes it as if it had never stopped.

At the same number of ranks, every loss is bit for bit that of a run without interruption. For this,
`extra` holds what is needed besides weights, optimizer and schedule: the position in the data, the
states of random generators, and the losses so far, for the curve.
"""

import random
import sys
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from lm_options import Options, Place, has_checkpoints, refuse_on_rank
from torch import nn


class HasState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class Run(NamedTuple):
    """Everything that changes from step to step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    data: HasState
    device: torch.device


def identity(options: Options, corpus: bytearray) -> dict[str, Any]:
    """Options that must not change when a run is resumed.

    Without the model's shape, which loading compares itself, `--batch`, which may change with the
    number of ranks, and `--steps`, which may grow.
    """
    data = f"{len(corpus)} bytes with CRC-32 {zlib.crc32(corpus):08x}"
    return {"seq": options.seq, "seed": options.seed, "lr": options.lr, "data": data}


def random_states(device: torch.device) -> dict[str, Any]:
    """States of this rank's random generators. A run that uses numpy's adds them here."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"torch": torch.get_rng_state(), "device": on_device, "python": random.getstate()}


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if device.type == "cuda" and states["device"] is not None:
        torch.cuda.set_rng_state(states["device"], device)


class Checkpoints:
    """The checkpoints of one run. Its methods are collective."""

    def __init__(self, options: Options, place: Place, corpus: bytearray, run: Run) -> None:
        self._options = options
        self._place = place
        self._identity = {} if options.checkpoint_dir is None else identity(options, corpus)
        self._run = run

    def resume(self) -> list[float]:
        """Restore the run from the latest checkpoint; returns the losses up to there."""
        from layerzero.checkpoint import CheckpointError, load

        folder, run = self._options.checkpoint_dir, self._run
        if folder is None or not self._options.resume:
            return []
        if not has_checkpoints(folder):
            self._say(f"no checkpoint in {folder}, starting from scratch")
            return []
        try:
            extra = load(folder, run.model, run.optimizer, scheduler=run.schedule)
        except CheckpointError as error:
            refuse_on_rank(f"argument --resume: {error}", self._place)
        self._check(extra)
        run.data.load_state_dict(extra["data"])
        if extra["num_ranks"] == self._place.world_size:
            restore_random_states(extra["random"], run.device)
        losses: list[float] = extra["losses"]
        self._say(
            f"resuming {folder} after step {len(losses)}, saved by {extra['num_ranks']} ranks"
        )
        return losses

    def save_if_due(self, losses: Sequence[float]) -> None:
        """Call it after each step. Training continues while files are written."""
        from layerzero.checkpoint import save

        options, run = self._options, self._run
        step, every = len(losses), options.checkpoint_every
        is_due = step == options.steps or (every is not None and step % every == 0)
        if options.checkpoint_dir is None or not is_due:
            return
        extra = {
            "identity": self._identity,
            "num_ranks": self._place.world_size,
            "losses": list(losses),
            "data": run.data.state_dict(),
            "random": random_states(run.device),
        }
        handle = save(
            options.checkpoint_dir,
            run.model,
            run.optimizer,
            step=step,
            scheduler=run.schedule,
            extra=extra,
            keep=options.keep,
            blocking=False,
        )
        if step == options.steps:
            handle.wait()

    def _check(self, extra: Any) -> None:
        """Exit if the checkpoint belongs to another run."""
        if not isinstance(extra, dict) or "identity" not in extra:
            reason = "was not written by this program"
        elif extra["identity"] != self._identity:
            saved, own = extra["identity"], self._identity
            reason = "was saved with " + ", ".join(
                f"--{key} {saved.get(key)}, not {own[key]}"
                for key in own
                if saved.get(key) != own[key]
            )
        elif len(extra["losses"]) > self._options.steps:
            reason = f"is of step {len(extra['losses'])}, beyond --steps {self._options.steps}"
        else:
            return
        refuse_on_rank(
            f"argument --resume: the checkpoint in {self._options.checkpoint_dir} {reason}",
            self._place,
        )

    def _say(self, text: str) -> None:
        if self._place.rank == 0:
            print(f"train_lm.py: {text}", file=sys.stderr, flush=True)
