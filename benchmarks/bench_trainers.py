"""What does a step cost in the trainer of Lightning or transformers, beside a plain loop?

One transformer on gloo ranks, sharded by the trainer's own adapter: one wrapped model and one
optimizer, because two equal models differ by more than is asked, by where their memory lies. The
trainer's own training loop runs; when it asks its data loader for a batch, steps of a plain loop
with the same model and optimizer are run there. So a step of the trainer lasts from the return of
one batch to the request for the next, and counts all that the trainer does in a step: its loop,
hooks, data loader, loss, clipping, optimizer. Logging and checkpoints are off. A step of the plain
loop fetches a batch from a torch DataLoader of the same data and ends like the trainer's. The
kinds, once in a round, in changing order:

    plain    the plain loop
    again    the same once more: its ratio to "plain" is the control, whose interval must hold 1,
             and which any ratio has to be compared with
    trainer  the trainer's step

A ratio is within one round, to the mean of "plain" and "again"; beside it the milliseconds that
the trainer's step takes more. Given are the median of the rounds and the interval that holds it
with 95 % (bootstrap). Time is that of the slowest rank; processor time, user and system, that of
all ranks.

The trainers run under their own DistributedDataParallel too, with a plain loop beside them: what
their steps take more there is the trainer's own, without the adapter.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from common import (
    SIZES,
    Interval,
    Spread,
    difference,
    keep_freed_memory,
    means,
    options,
    print_result,
    print_table,
    quotients,
    run_on_ranks,
)
from engines import LEARNING_RATE, Transformer, TransformerBlock, make_transformer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

TRAINERS = ("lightning", "transformers")
ENGINES = ("layerzero", "ddp")
BAR = 1.02
KINDS = ("plain", "again", "trainer")
_MAX_NORM = 1.0
_WARMUP_STEPS = 4  # of the trainer: batches fetched ahead, and the optimizer's first step
_WARMUP_ROUNDS = 2
_FETCHED_AHEAD = 2  # at most, so that the last counted step is followed by a request

Batch = dict[str, Tensor]


class Data(Dataset[Batch]):
    """Sequences of random bytes, [length + 1] each, equal for equal indices."""

    def __init__(self, num_batches: int, args: argparse.Namespace) -> None:
        self._num_sequences = num_batches * args.batch
        self._tokens = torch.randint(
            256, (64, args.length + 1), generator=torch.Generator().manual_seed(dist.get_rank())
        )

    def __len__(self) -> int:
        return self._num_sequences

    def __getitem__(self, index: int) -> Batch:
        return {"tokens": self._tokens[index % len(self._tokens)]}

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        return [self[index] for index in indices]


class WatchedData(Data):
    """The data that a trainer reads; calls `when_asked` before each batch."""

    def __init__(
        self, when_asked: Callable[[], None], num_batches: int, args: argparse.Namespace
    ) -> None:
        super().__init__(num_batches, args)
        self._when_asked = when_asked

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        self._when_asked()
        return super().__getitems__(indices)


class Rounds:
    """Times of the steps of each kind on this rank; runs the plain ones when asked for a batch."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.cpu_seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.plain_steps: Iterator[None]
        """Set when the trainer has made its model and optimizer."""
        self.num_forwards: Callable[[], int]
        """Forwards of the model so far."""
        self._asked = 0
        self._kinds: list[str] = []
        generator = random.Random(0)
        for _ in range(_WARMUP_ROUNDS + args.rounds):
            self._kinds += generator.sample(KINDS, len(KINDS))
        self._next_steps = iter(self._kinds)
        self._running: tuple[float, float, int] | None = None

    @property
    def num_batches(self) -> int:
        """Batches that the trainer needs."""
        counted = self._kinds.count("trainer")
        return _WARMUP_STEPS + counted + _FETCHED_AHEAD

    def asked(self) -> None:
        """The trainer asks for a batch: its step ends, plain ones are run, and its next begins."""
        self._end_trainers_step()
        self._asked += 1
        if self._asked <= _WARMUP_STEPS:
            return
        if self._asked == _WARMUP_STEPS + 1:
            gc.collect()
            gc.freeze()  # else each collection below looks at all that was imported
        for kind in self._next_steps:
            gc.collect()
            dist.barrier()
            if kind == "trainer":
                self._running = time.perf_counter(), time.process_time(), self.num_forwards()
                return
            start, cpu_start = time.perf_counter(), time.process_time()
            next(self.plain_steps)
            self._add(kind, start, cpu_start)

    def _end_trainers_step(self) -> None:
        if self._running is None:
            return
        start, cpu_start, forwards = self._running
        self._add("trainer", start, cpu_start)
        self._running = None
        if (done := self.num_forwards() - forwards) != 1:
            raise RuntimeError(f"between two batches the trainer ran {done} forwards, expected 1")

    def _add(self, kind: str, start: float, cpu_start: float) -> None:
        self.seconds[kind].append(time.perf_counter() - start)
        self.cpu_seconds[kind].append(time.process_time() - cpu_start)

    def result(self) -> dict[str, Any]:
        """Milliseconds of each round: of the slowest rank, and of all processors. Collective."""
        return {
            "elapsed": self._over_ranks(self.seconds, dist.ReduceOp.MAX),
            "processor": self._over_ranks(self.cpu_seconds, dist.ReduceOp.SUM),
        }

    def _over_ranks(self, of_kinds: dict[str, list[float]], op: Any) -> dict[str, list[float]]:
        values = torch.tensor([of_kinds[kind][_WARMUP_ROUNDS:] for kind in KINDS]).double() * 1e3
        dist.all_reduce(values, op=op)
        return dict(zip(KINDS, values.tolist(), strict=True))


def plain_steps(
    model: Any, optimizer: torch.optim.Optimizer, batches: Iterator[Batch], zero_first: bool
) -> Iterator[None]:
    """A plain loop; each `next` is one step.

    Args:
        model: wrapped by an engine; returns the loss, or a dict that has it.
        zero_first: free gradients before backward, not at the end of the step. It has to be what
            the trainer does, because its steps come between these.
    """
    for batch in batches:
        loss = model(**batch)
        if not isinstance(loss, Tensor):
            loss = loss["loss"]
        if zero_first:
            optimizer.zero_grad()
        loss.backward()
        if isinstance(model, nn.parallel.DistributedDataParallel):
            nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
        else:
            model.clip_grad_norm_(_MAX_NORM)
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
        yield


def _build(args: argparse.Namespace) -> Transformer:
    return make_transformer(SIZES[args.size], args.length)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def _endless(args: argparse.Namespace) -> Iterator[Batch]:
    while True:
        yield from DataLoader(Data(1000, args), batch_size=args.batch)


def _lightning(args: argparse.Namespace, engine: str, rounds: Rounds) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from layerzero.integrations.lightning import ZeRO3Strategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = _build(args)
            self.num_forwards = 0

        def forward(self, tokens: Tensor) -> Tensor:
            self.num_forwards += 1
            loss: Tensor = self.transformer(tokens)
            return loss

        def training_step(self, batch: Batch, _: int) -> Tensor:
            loss: Tensor = self(**batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _adamw(self)

        def on_train_start(self) -> None:
            (optimizer,) = self.trainer.optimizers
            wrapped = self.trainer.strategy.model
            rounds.plain_steps = plain_steps(wrapped, optimizer, _endless(args), zero_first=True)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module()
    rounds.num_forwards = lambda: module.num_forwards
    strategy: Any = ZeRO3Strategy(auto_wrap_policy={TransformerBlock})
    if engine == "ddp":
        strategy = DDPStrategy(process_group_backend="gloo")
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    trainer = pl.Trainer(
        barebones=True,
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=1,
        gradient_clip_val=_MAX_NORM,
        strategy=strategy,
        plugins=[LightningEnvironment()],
    )
    data = WatchedData(rounds.asked, rounds.num_batches * dist.get_world_size(), args)
    trainer.fit(module, DataLoader(data, batch_size=args.batch))


def _transformers(args: argparse.Namespace, engine: str, rounds: Rounds) -> None:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from layerzero.integrations.transformers import ZeRO3Trainer

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = _build(args)
            self.num_forwards = 0

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            self.num_forwards += 1
            return {"loss": self.transformer(tokens)}

    class Begin(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            wrapped, optimizer = trainer.model_wrapped, trainer.optimizer.optimizer
            rounds.plain_steps = plain_steps(wrapped, optimizer, _endless(args), zero_first=False)

    module = Module()
    rounds.num_forwards = lambda: module.num_forwards
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    kind: Any = Trainer
    options: dict[str, Any] = {}
    if engine == "layerzero":
        kind, options = ZeRO3Trainer, {"zero3": {"auto_wrap_policy": {TransformerBlock}}}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=args.batch,
            optim="adamw_torch",
            learning_rate=LEARNING_RATE,
            weight_decay=0.01,
            max_grad_norm=_MAX_NORM,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )
        data = WatchedData(rounds.asked, rounds.num_batches * dist.get_world_size(), args)
        trainer = kind(module, arguments, train_dataset=data, callbacks=[Begin()], **options)
        trainer.remove_callback(PrinterCallback)
        trainer.train()


_FITS = {"lightning": _lightning, "transformers": _transformers}


def measure(trainer: str, engine: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run on each rank: milliseconds of each kind and round."""
    warnings.filterwarnings("ignore")
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}
    rounds = Rounds(args)
    _FITS[trainer](args, engine, rounds)
    return rounds.result()


def compared(of_kinds: dict[str, list[float]]) -> dict[str, Interval]:
    """Trainer to plain loop and the control, as ratios; and what the trainer takes more, in ms."""
    plain, again, trainer = (of_kinds[kind] for kind in KINDS)
    base = means(plain, again)
    return {
        "ratio": Interval.of(quotients(trainer, base)),
        "control": Interval.of(quotients(again, plain)),
        "more_ms": Interval.of(difference(trainer, base)),
    }


def main() -> None:
    parser = options(__doc__, ENGINES, size="6m", batch=2, length=128, rounds=60)
    parser.add_argument("--trainers", default=",".join(TRAINERS), help="comma-separated")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    keep_freed_memory()
    rows, result, versions = [], {}, {}
    for trainer in args.trainers.split(","):
        if importlib.util.find_spec(trainer) is None:
            print(f"{trainer} is left out: it is not installed")
            continue
        versions[trainer] = version(trainer)
        for engine in args.engines:
            found = run_on_ranks(args.ranks, measure, trainer, engine, args)[0]
            result[f"{trainer} {engine}"] = {}
            for clock, of_kinds in found.items():
                plain, values = Spread.of(of_kinds["plain"]), compared(of_kinds)
                result[f"{trainer} {engine}"][clock] = {
                    "plain_ms": plain.as_dict(),
                    **{name: each._asdict() for name, each in values.items()},
                }
                cells = [values["ratio"].text(), values["control"].text(), values["more_ms"].text()]
                rows.append([trainer, engine, clock, plain.text(1), *cells])
    columns = ["trainer", "engine", "time", "plain, ms", "trainer / plain", "control", "more, ms"]
    print_table(columns, rows)
    print(f"the bar for trainer / plain, elapsed time, with layerzero: {BAR}")
    print_result(args, versions=versions, steps=result)


if __name__ == "__main__":
    main()
