"""How long is a Megatron step on layerzero, beside Megatron's own data parallelism?

A GPTModel of megatron-core on gloo ranks of this machine (examples/megatron_cpu.py), one
micro-batch a step, Adam, gradients clipped by their norm. Each engine has its own model, so where
its memory lies adds up to some percent: ranks are started several times, and the medians of each
start are given too. Single steps of each kind, once in a round, in changing order:

    ddp              Megatron's DistributedDataParallel
    ddp again        the same engine once more: its ratio to "ddp" is the control
    distributed      DistributedDataParallel with Megatron's distributed optimizer
    layerzero        ZeRO3DataParallel
    layerzero again  the same engine once more
    kept             ZeRO3DataParallel with reshard_after_forward=False: it sends as many bytes as
                     "ddp", where "layerzero" sends 1.5 times as many

A ratio is within one round, to the mean of "ddp" and "ddp again". Given are the median of the
rounds of all starts and the interval that holds it with 95 % (bootstrap). Time is that of the
slowest rank. Processor time, user and system, is that of all ranks; that of the threads beside
those that compute is gloo's, which copies messages on the same cores. Last comes the ledger of
steps of "layerzero": what they wait for.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from common import (
    SIZES,
    Interval,
    Spread,
    keep_freed_memory,
    means,
    options,
    print_result,
    print_table,
    quotients,
    run_on_ranks,
    spreads,
    take_turns,
)
from engines import LEARNING_RATE, random_batches
from torch import Tensor

BAR = 1.05
ENGINES = {
    "ddp": "ddp",
    "ddp again": "ddp",
    "distributed": "distributed",
    "layerzero": "layerzero",
    "layerzero again": "layerzero",
    "kept": "kept",
}
CLOCKS = ("elapsed", "processor", "gloo's threads")
_MAX_NORM = 1.0
_LEDGER_STEPS = 5

Times = dict[str, dict[str, list[float]]]
"""By clock and kind: milliseconds of each round."""


class Megatron:
    """A model in Megatron's schedule, under one engine. To be used inside `emulation()`."""

    def __init__(self, args: argparse.Namespace, engine: str) -> None:
        import train_megatron_gpt as example
        from megatron.core import parallel_state

        self._example, self._engine, self._args = example, engine, args
        width, layers = SIZES[args.size]
        self._options = example.parse(
            [
                *("--width", str(width), "--layers", str(layers)),
                *("--seq", str(args.length), "--batch", str(args.batch)),
                *("--micro-batches", "1"),
            ]
        )
        if not parallel_state.model_parallel_is_initialized():
            example.join_groups(self._options)
        self.chunk: Any
        self.chunk, self._optimizer = self._make()
        self._forward_step = example.ForwardStep(self._options, torch.device("cpu"))
        self._next_batch = random_batches(args.batch, args.length)

    def _make(self) -> tuple[Any, Any]:
        from megatron.core import tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from layerzero.integrations.megatron import ZeRO3DataParallel, get_zero3_optimizer

        transformer = self._example.transformer_config(self._options)
        module = self._example.MakeModel(self._options, transformer)()
        for parameter in module.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        distributed, ours = self._engine == "distributed", self._engine in ("layerzero", "kept")
        data_parallel = DistributedDataParallelConfig(
            gradient_reduce_div_fusion=False,
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=not ours,
            overlap_param_gather=distributed,
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            clip_grad=_MAX_NORM,
            use_distributed_optimizer=distributed,
            overlap_param_gather=distributed,
        )
        if ours:
            options = {"reshard_after_forward": False} if self._engine == "kept" else {}
            chunk = ZeRO3DataParallel(transformer, data_parallel, module, **options)
            optimizer = get_zero3_optimizer(settings, [chunk])
        else:
            chunk = DistributedDataParallel(transformer, data_parallel, module)
            optimizer = get_megatron_optimizer(settings, [chunk])
            transformer.no_sync_func = chunk.no_sync
            transformer.grad_sync_func = chunk.start_grad_sync
        chunk.train()
        transformer.grad_scale_func = optimizer.scale_loss
        transformer.finalize_model_grads_func = finalize_model_grads
        if distributed:
            transformer.param_sync_func = chunk.start_param_sync
        return chunk, optimizer

    def step(self) -> float:
        """Train on the next batch; returns the loss."""
        self.chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        reports = self._example.get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter(self._next_batch, None),
            model=self.chunk,
            num_microbatches=1,
            seq_length=self._args.length,
            micro_batch_size=self._args.batch,
            forward_only=False,
        )
        self._optimizer.step()
        loss: Tensor = reports[0]["loss"]
        return loss.item()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run on each rank: milliseconds of each clock, kind and round; losses; and a ledger."""
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import megatron_cpu

    import layerzero

    with megatron_cpu.emulation():
        models = {engine: Megatron(args, engine) for engine in dict.fromkeys(ENGINES.values())}
        losses: dict[str, list[float]] = {engine: [] for engine in models}

        def noting(engine: str) -> Callable[[], None]:
            return lambda: losses[engine].append(models[engine].step())

        steps = {kind: noting(engine) for kind, engine in ENGINES.items()}
        times = dict(zip(CLOCKS, take_turns(steps, args.rounds, warmup=3), strict=True))
        with layerzero.ledger(models["layerzero"].chunk.engine) as ledger:
            for _ in range(_LEDGER_STEPS):
                models["layerzero"].step()
        numel = sum(p.numel() for p in models["ddp"].chunk.parameters())
    return {"times": times, "losses": losses, "ledger": str(ledger), "num_parameters": numel}


def ratios(of_kinds: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Of each round: to Megatron's DistributedDataParallel; and the control."""
    bases = means(of_kinds["ddp"], of_kinds["ddp again"])
    ours = means(of_kinds["layerzero"], of_kinds["layerzero again"])
    contenders = {"layerzero": ours, "kept": of_kinds["kept"]}
    contenders["distributed"] = of_kinds["distributed"]
    found = {name: quotients(values, bases) for name, values in contenders.items()}
    return {**found, "control": quotients(of_kinds["ddp again"], of_kinds["ddp"])}


def _joined(starts: list[Times]) -> Times:
    """All rounds of all starts."""
    return {
        clock: {kind: [ms for times in starts for ms in times[clock][kind]] for kind in ENGINES}
        for clock in CLOCKS
    }


def _largest_difference(starts: list[dict[str, Any]], engine: str) -> float:
    """Of the losses of the same step, to those under "ddp".

    Both "ddp" and "layerzero" take two steps in a round, the others one.
    """
    pairs = [
        pair
        for each in starts
        for pair in zip(each["losses"]["ddp"], each["losses"][engine], strict=False)
    ]
    return max(abs(a - b) for a, b in pairs)


def main() -> None:
    parser = options(__doc__, size="6m", batch=2, length=128)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--starts", type=int, default=4, help="of the ranks")
    parser.add_argument("--rounds", type=int, default=22, help="of each start")
    args = parser.parse_args()
    if importlib.util.find_spec("megatron") is None:
        print("megatron-core is not installed")
        return
    keep_freed_memory()
    starts = [run_on_ranks(args.ranks, measure, args)[0] for _ in range(args.starts)]
    times = [each["times"] for each in starts]
    joined = _joined(times)
    result: dict[str, Any] = {
        "step_ms": {clock: spreads(joined[clock]) for clock in CLOCKS},
        "ratios": {clock: _intervals(joined[clock], times, clock) for clock in CLOCKS[:2]},
        "largest_loss_difference": {
            engine: _largest_difference(starts, engine) for engine in starts[0]["losses"]
        },
    }
    _show(args, starts, joined, result)
    print_result(args, **{"megatron-core": version("megatron-core")}, **result)


def _intervals(
    joined: dict[str, list[float]], starts: list[Times], clock: str
) -> dict[str, dict[str, Any]]:
    of_starts = [ratios(times[clock]) for times in starts]
    return {
        name: {
            **Interval.of(values)._asdict(),
            "starts": [round(statistics.median(each[name]), 4) for each in of_starts],
        }
        for name, values in ratios(joined).items()
    }


def _show(
    args: argparse.Namespace, starts: list[dict[str, Any]], joined: Times, result: dict[str, Any]
) -> None:
    print(
        f"{starts[0]['num_parameters'] / 1e6:.1f} M parameters, {args.ranks} ranks, "
        f"batch {args.batch} x {args.length}; ms a step, median (quartiles)"
    )
    rows = [
        [kind, *(Spread.of(joined[clock][kind]).text(0) for clock in CLOCKS)] for kind in ENGINES
    ]
    print_table(["kind", *CLOCKS], rows)
    print()
    rows = []
    for clock, of_names in result["ratios"].items():
        for name, found in of_names.items():
            interval = Interval(found["median"], found["low"], found["high"])
            medians = " ".join(f"{each:.3f}" for each in found["starts"])
            rows.append([f"{name}, {clock} time", interval.text(), medians])
    print_table(["to ddp", "ratio (95 %)", "of each start"], rows)
    print(f"the bar for layerzero, elapsed time: {BAR}")
    for engine, difference in result["largest_loss_difference"].items():
        print(f"largest difference of a loss to ddp, {engine}: {difference:.1e}")
    print(starts[-1]["ledger"])


if __name__ == "__main__":
    main()
