"""How long is a step of Lightning, transformers and Megatron on layerzero?

Lightning and transformers train one transformer on the same data, each under its own
DistributedDataParallel strategy and with layerzero; a plain loop trains it with either engine. A
trainer's step against the plain loop's with the same engine is what the trainer costs, and the
adapter where the engine is layerzero. Megatron trains a GPTModel under its DistributedDataParallel,
the same with its distributed optimizer, and ZeRO3DataParallel; how much of the difference is the
engine's, and not its adapter's, shows in the plain loop with layerzero against that with DDP.

Every step clips the norm of all gradients. It lasts from one fetch of a batch to the next. The
contenders take turns in each round, so a ratio is within one round; the slowest rank counts. CPU
time is that of all threads of a rank; other processes disturb it less. Python calls are those of
one step on the first rank, counted in a run of their own. Contenders whose library is not installed
are left out.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from bench_step import LEARNING_RATE, SIZES
from common import (
    Spread,
    environment,
    interleave,
    max_over_ranks,
    print_json,
    print_table,
    ratio,
    run_on_ranks,
)
from engines import ENGINES, Transformer, TransformerBlock
from torch import Tensor, nn

LIBRARIES = {"plain": "torch", "lightning": "lightning", "transformers": "transformers"}
LIBRARIES["megatron"] = "megatron.core"
CONTENDERS = {
    "plain": ("ddp", "layerzero"),
    "lightning": ("ddp", "layerzero"),
    "transformers": ("ddp", "layerzero"),
    "megatron": ("ddp", "distributed", "layerzero"),
}
BARS = {"lightning": 1.02, "transformers": 1.02, "megatron": 1.05}
_MAX_NORM = 1.0
_WARMUP = 2  # batches fetched ahead, and a step that allocates the optimizer's state


@dataclass(frozen=True)
class Config:
    width: int
    layers: int
    heads: int
    batch: int
    length: int
    rounds: int
    steps: int


@dataclass(frozen=True)
class Name:
    """A contender: whose loop, and which engine."""

    loop: str
    engine: str

    def __str__(self) -> str:
        return f"{self.loop} {self.engine}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loops", default=",".join(CONTENDERS), help="comma-separated")
    parser.add_argument("--size", choices=SIZES, default="25m")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--length", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of each contender in a round")
    parser.add_argument("--ledger", action="store_true", help="why the Megatron step waits")
    args = parser.parse_args()
    loops = args.loops.split(",")
    if unknown := set(loops) - CONTENDERS.keys():
        parser.error(f"no loop {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    missing = [each for each in loops if not _is_installed(LIBRARIES[each])]
    for each in missing:
        print(f"{each} is left out: {LIBRARIES[each]} is not installed")
    names = [
        Name(loop, engine) for loop in loops if loop not in missing for engine in CONTENDERS[loop]
    ]
    width, layers = SIZES[args.size]
    config = Config(width, layers, args.heads, args.batch, args.length, args.rounds, args.steps)
    found = run_on_ranks(args.world_size, measure, config, names, args.ledger)[0]
    result = _summary(found, names)
    _show(args, found, result, names)
    print_json(
        {
            "benchmark": "integrations",
            "config": {**asdict(config), "world_size": args.world_size},
            "environment": environment() | _versions(),
            **result,
        }
    )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it would be in
        return False


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in ("lightning", "transformers", "megatron-core"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


# On the ranks ---------------------------------------------------------------------------------


class Feed:
    """Batches of one run; notes when each is fetched, and the Python calls of one step."""

    def __init__(self, config: Config, num_steps: int, seed: int, count_calls: bool) -> None:
        self.times: list[float] = []
        self.cpu_times: list[float] = []
        self.calls: Counter[str] = Counter()
        self._shape = (config.batch, config.length + 1)
        self._num_steps = num_steps
        self._generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        self._count_calls = count_calls

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self._num_steps):
            tokens = torch.randint(256, self._shape, generator=self._generator)
            if self._count_calls:
                sys.setprofile(self._count if number == _WARMUP else None)
            self.times.append(time.perf_counter())
            self.cpu_times.append(time.process_time())
            yield tokens
        sys.setprofile(None)

    def __len__(self) -> int:
        return self._num_steps

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self.calls[_owner(frame.f_code.co_filename)] += 1


def _owner(path: str) -> str:
    """Whose file it is: of the engine, its adapters, or others."""
    if "/layerzero/" not in path:
        return "others"
    return "adapter" if "/layerzero/integrations/" in path else "engine"


Run = Callable[[Feed], list[Tensor]]
"""Trains with all batches of a feed, with a new optimizer; returns the losses."""


def measure(config: Config, names: list[Name], with_ledger: bool) -> dict[str, Any]:
    """Run on each rank: step times of every contender (slowest rank), calls, and losses."""
    _quiet()
    runs = {name: _MAKERS[name.loop](config, name.engine) for name in names}
    losses: dict[Name, list[float]] = {name: [] for name in names}
    cpu_times: dict[Name, list[float]] = {name: [] for name in names}
    seeds = dict.fromkeys(names, 0)

    def run(name: Name, num_steps: int, count_calls: bool = False) -> Feed:
        seeds[name] += 1
        feed = Feed(config, num_steps, seeds[name], count_calls)
        losses[name] += [loss.item() for loss in runs[name](feed)]
        return feed

    def step_ms(name: Name) -> float:
        gc.collect()
        dist.barrier()
        feed = run(name, _WARMUP + config.steps + 1)
        cpu_times[name].append(max_over_ranks(_mean_ms(feed.cpu_times)))
        return max_over_ranks(_mean_ms(feed.times))

    times = interleave(names, step_ms, config.rounds)  # type: ignore[arg-type, type-var]
    calls = {name: dict(run(name, _WARMUP + 2, count_calls=True).calls) for name in names}
    return {
        "num_parameters": sum(p.numel() for p in _build(config).parameters()),
        "times": times,
        "cpu_times": {name: values[-config.rounds :] for name, values in cpu_times.items()},
        "losses": losses,
        "calls": calls,
        "ledger": _ledger(config, runs) if with_ledger else "",
    }


def _mean_ms(fetched: list[float]) -> float:
    """Milliseconds of a step, without the first ones."""
    counted = fetched[_WARMUP:]
    return (counted[-1] - counted[0]) / (len(counted) - 1) * 1e3


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}
    for name in ("lightning.pytorch", "lightning.fabric", "megatron", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _build(config: Config) -> Transformer:
    torch.manual_seed(0)
    return Transformer(config.width, config.layers, config.heads, config.length)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def _plain(config: Config, engine: str) -> Run:
    model: Any = ENGINES[engine](_build(config), TransformerBlock)

    def run(feed: Feed) -> list[Tensor]:
        optimizer = _adamw(model.parameters())
        losses = []
        for tokens in feed:
            loss = model(tokens)
            loss.backward()
            if engine == "layerzero":
                model.clip_grad_norm_(_MAX_NORM)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    return run


def _lightning(config: Config, engine: str) -> Run:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from layerzero.integrations.lightning import ZeRO3Strategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = _build(config)
            self.losses: list[Tensor] = []

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            loss: Tensor = self.transformer(tokens)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _adamw(self.parameters())

    module = Module()

    def strategy() -> Any:
        if engine == "ddp":
            return DDPStrategy(process_group_backend="gloo")
        return ZeRO3Strategy(auto_wrap_policy={TransformerBlock})

    def run(feed: Feed) -> list[Tensor]:
        os.environ["LOCAL_RANK"] = str(dist.get_rank())
        module.losses = []
        trainer = pl.Trainer(
            barebones=True,
            accelerator="cpu",
            devices=dist.get_world_size(),
            max_steps=len(feed),
            gradient_clip_val=_MAX_NORM,
            strategy=strategy(),
            plugins=[LightningEnvironment()],
            use_distributed_sampler=False,
        )
        trainer.fit(module, feed)
        return module.losses

    return run


def _transformers(config: Config, engine: str) -> Run:
    from transformers import Trainer, TrainingArguments

    from layerzero.integrations.transformers import ZeRO3Trainer

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = _build(config)
            self.losses: list[Tensor] = []

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            loss = self.transformer(tokens)
            self.losses.append(loss.detach())
            return {"loss": loss}

    module = Module()
    kind, options = Trainer, {}
    if engine == "layerzero":
        kind, options = ZeRO3Trainer, {"zero3": {"auto_wrap_policy": {TransformerBlock}}}

    def run(feed: Feed) -> list[Tensor]:
        module.losses = []
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= launched
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=len(feed),
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
            trainer = kind(module, arguments, **options)
            trainer.optimizer = _adamw(trainer.model.parameters())
            trainer.get_train_dataloader = lambda: _Named(feed)
            trainer.train()
        for name in launched:
            del os.environ[name]
        return module.losses

    return run


class _Named:
    """A data loader whose batches have names."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __len__(self) -> int:
        return len(self._feed)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for tokens in self._feed:
            yield {"tokens": tokens}


def _megatron(config: Config, engine: str) -> Run:
    return _MegatronRun(config, engine)


class _MegatronRun:
    """Megatron's schedule, one micro-batch a step, on CPU ranks (examples/megatron_cpu.py)."""

    def __init__(self, config: Config, engine: str) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        import megatron_cpu
        import train_megatron_gpt as example
        from megatron.core import parallel_state

        self._example, self._emulation = example, megatron_cpu.emulation
        self._config, self._engine = config, engine
        self._options = example.parse(
            [
                *("--width", str(config.width), "--layers", str(config.layers)),
                *("--seq", str(config.length), "--batch", str(config.batch)),
                *("--micro-batches", "1"),
            ]
        )
        with self._emulation():
            if not parallel_state.model_parallel_is_initialized():
                example.join_groups(self._options)
            self.chunk, self._make_optimizer = self._make()
            self._forward_step = example.ForwardStep(self._options, torch.device("cpu"))

    def _make(self) -> tuple[Any, Callable[[], Any]]:
        from megatron.core import tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from layerzero.integrations.megatron import ZeRO3DataParallel, get_zero3_optimizer

        example = self._example
        transformer = example.transformer_config(self._options)
        module = example.MakeModel(self._options, transformer)()
        for parameter in module.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        distributed = self._engine == "distributed"
        overlap = self._engine != "layerzero"
        data_parallel = DistributedDataParallelConfig(
            gradient_reduce_div_fusion=False,
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=overlap,
            overlap_param_gather=distributed,
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            clip_grad=_MAX_NORM,
            use_distributed_optimizer=distributed,
            overlap_param_gather=distributed,
        )
        wrap, make = DistributedDataParallel, get_megatron_optimizer
        if self._engine == "layerzero":
            wrap, make = ZeRO3DataParallel, get_zero3_optimizer
        chunk = wrap(transformer, data_parallel, module)
        chunk.train()

        def make_optimizer() -> Any:
            optimizer = make(settings, [chunk])
            transformer.grad_scale_func = optimizer.scale_loss
            transformer.finalize_model_grads_func = finalize_model_grads
            if self._engine != "layerzero":
                transformer.no_sync_func = chunk.no_sync
                transformer.grad_sync_func = chunk.start_grad_sync
            if distributed:
                transformer.param_sync_func = chunk.start_param_sync
            return optimizer

        return chunk, make_optimizer

    def __call__(self, feed: Feed) -> list[Tensor]:
        with self._emulation():
            optimizer = self._optimizer()
            data = iter(feed)
            losses: list[Tensor] = []
            for _ in range(len(feed)):
                losses.append(self._step(optimizer, data))
            next(data, None)  # lets the feed end
        return losses

    def _optimizer(self) -> Any:
        # Megatron's own registers hooks with the chunk, so it is made once.
        if not hasattr(self, "_made"):
            self._made = self._make_optimizer()
        return self._made

    def _step(self, optimizer: Any, data: Iterator[Tensor]) -> Tensor:
        self.chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = self._example.get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=data,
            model=self.chunk,
            num_microbatches=1,
            seq_length=self._config.length,
            micro_batch_size=self._config.batch,
            forward_only=False,
        )
        optimizer.step()
        loss: Tensor = reports[0]["loss"]
        return loss


_MAKERS: dict[str, Callable[[Config, str], Run]] = {
    "plain": _plain,
    "lightning": _lightning,
    "transformers": _transformers,
    "megatron": _megatron,
}


def _ledger(config: Config, runs: dict[Name, Run]) -> str:
    """What the engine's ledger says of the Megatron steps. Collective."""
    import layerzero

    run = runs.get(Name("megatron", "layerzero"))
    if not isinstance(run, _MegatronRun):
        return ""
    with layerzero.ledger(run.chunk.engine) as ledger:
        run(Feed(config, config.steps + 1, 0, count_calls=False))
    return str(ledger)


# The result -----------------------------------------------------------------------------------


def _summary(found: dict[str, Any], names: list[Name]) -> dict[str, Any]:
    times, calls, losses = found["times"], found["calls"], found["losses"]
    cpu_times = found["cpu_times"]
    result: dict[str, Any] = {
        "num_parameters": found["num_parameters"],
        "step_ms": {str(name): Spread.of(times[name]).as_dict() for name in names},
        "cpu_ms": {str(name): Spread.of(cpu_times[name]).as_dict() for name in names},
        "calls": {str(name): calls[name] for name in names},
    }
    for name in names:
        plain = Name("plain", name.engine)
        if name.loop in ("lightning", "transformers") and plain in times:
            key = f"{name.loop}_vs_plain_loop_{name.engine}"
            result[key] = ratio(times[name], times[plain]).as_dict()
            result[f"cpu_{key}"] = ratio(cpu_times[name], cpu_times[plain]).as_dict()
            result[f"losses_equal_{name.loop}_{name.engine}"] = losses[name] == losses[plain]
    ours, other = Name("plain", "layerzero"), Name("plain", "ddp")
    if ours in times and other in times:
        result["plain_vs_ddp"] = ratio(times[ours], times[other]).as_dict()
        result["cpu_plain_vs_ddp"] = ratio(cpu_times[ours], cpu_times[other]).as_dict()
    ours = Name("megatron", "layerzero")
    for engine in ("ddp", "distributed"):
        other = Name("megatron", engine)
        if ours in times and other in times:
            result[f"megatron_vs_{engine}"] = ratio(times[ours], times[other]).as_dict()
            cpu = ratio(cpu_times[ours], cpu_times[other])
            result[f"cpu_megatron_vs_{engine}"] = cpu.as_dict()
            pairs = list(zip(losses[ours], losses[other], strict=True))
            result[f"largest_loss_difference_megatron_{engine}"] = max(abs(a - b) for a, b in pairs)
    return result


def _show(
    args: argparse.Namespace, found: dict[str, Any], result: dict[str, Any], names: list[Name]
) -> None:
    print(
        f"{result['num_parameters'] / 1e6:.1f} M parameters, {args.world_size} ranks, "
        f"batch {args.batch} x {args.length}; ms a step, median (quartiles)"
    )
    rows = []
    for name in names:
        calls = Counter(found["calls"][name])
        rows.append(
            [
                name.loop,
                name.engine,
                Spread.of(found["times"][name]).text(0),
                Spread.of(found["cpu_times"][name]).text(0),
                str(calls.total()),
                str(calls["engine"]),
                str(calls["adapter"]),
            ]
        )
    columns = ["loop", "engine", "step", "CPU", "Python calls", "of the engine", "of the adapter"]
    print_table(columns, rows)
    for key, value in result.items():
        if "_vs_" in key:
            bar = BARS.get(key.partition("_")[0])
            ours = "_layerzero" in key or key == "megatron_vs_ddp"
            print(f"{key}: {Spread(**value).text(3)}" + (f", bar {bar}" if bar and ours else ""))
        elif "loss" in key:
            print(f"{key}: {value}")
    if found["ledger"]:
        print(found["ledger"])


if __name__ == "__main__":
    main()
