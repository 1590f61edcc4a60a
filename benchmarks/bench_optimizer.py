"""What do a step, a clip and zero_grad cost: layerzero.optim.AdamW beside torch's optimizers?

Torch's foreach and fused AdamW run on the same sharded parameters and on `fully_shard`'s DTensors,
as rank 0 of a fake group of 8. "norm" is the pass over gradients that a clip takes. Two questions:

    bandwidth   --numel elements a rank, in units of the first of --counts parameters: the time of
                clip + step, and the bytes moved
    host        units so small that only the host's work counts: process time and Python calls

Ratios are of interleaved rounds.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from common import (
    STATE_NBYTES,
    Spread,
    interleave,
    join_fake_world,
    options,
    print_result,
    print_table,
    ratio,
    step_nbytes,
)
from engines import LOW
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from layerzero import MixedPrecision, ZeRO3
from layerzero.optim import AdamW
from layerzero.optim.norm import norms_of

WORLD_SIZE = 8
PARTS = ("norm", "clip", "step", "zero_grad")
TIMED = ("clip", "step")
BASE = "pieces, fused"


class Contender(NamedTuple):
    """One optimizer of one model whose gradients are there; each function times one part."""

    parts: dict[str, Callable[[], Any]]
    between: Callable[[], Any]
    """Makes the state before the next round, untimed."""


class Unit(nn.Module):
    """Parameters without compute."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((numel,), 0.01) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return x + sum((weight.sum() * 1e-3 for weight in self.weights), torch.zeros(()))


def main() -> None:
    parser = options(__doc__, units=24, rounds=9)
    parser.add_argument("--numel", type=int, default=25_000_000, help="elements of a rank; 0: none")
    parser.add_argument("--counts", type=int, nargs="+", default=[8, 64], help="parameters a unit")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    join_fake_world(WORLD_SIZE, args.threads)
    result: dict[str, Any] = {
        "bytes_per_element": _bytes(),
        "bandwidth": {},
        "host": {},
    }
    for count in args.counts[:1] if args.numel else ():
        per_rank = args.numel // (args.units * count)
        result["bandwidth"][count * args.units] = _bandwidth(args, count, per_rank)
    for count in args.counts:
        result["host"][count * args.units] = _host(args, count)
    print_result(args, **result)


def _bytes() -> dict[str, float]:
    """Counted: what clip and step read and write of memory for each element."""
    # The norm reads the gradient, the clip reads and writes it.
    torchs = 4 + 8 + (16 + 12)
    # The sum over ranks takes the norm along; the pass reads main, gradient and states.
    ours = {name: sum(step_nbytes(name)) for name in STATE_NBYTES}
    return {"torch": torchs, **ours}


def _contenders(units: int, count: int, per_rank: int) -> dict[str, Contender]:
    made = {f"layerzero {state}": _ours(units, count, per_rank, state) for state in STATE_NBYTES}
    for kind in ("fused", "foreach"):
        for where, shard in (("pieces", _sharded), ("DTensors", _fully_sharded)):
            model = shard(_build(units, count, per_rank))
            options: dict[str, Any] = {"lr": 1e-3, kind: True}
            optimizer = torch.optim.AdamW(model.parameters(), **options)
            made[f"{where}, {kind}"] = _contender(model, optimizer)
    return made


def _build(units: int, count: int, per_rank: int) -> nn.Sequential:
    return nn.Sequential(*(Unit(count, per_rank * WORLD_SIZE) for _ in range(units)))


def _sharded(module: nn.Sequential) -> ZeRO3:
    return ZeRO3(module, auto_wrap_policy={Unit}, mixed_precision=MixedPrecision(**LOW))


def _fully_sharded(model: nn.Sequential) -> nn.Module:
    policy = MixedPrecisionPolicy(**LOW)
    for module in (*model, model):
        fully_shard(module, mp_policy=policy)
    return model


def _contender(model: nn.Module, optimizer: torch.optim.Optimizer) -> Contender:
    """A first step makes the states; then gradients are there again."""

    own: Any = next((each for each in (optimizer, model) if hasattr(each, "clip_grad_norm_")), None)

    def clip() -> None:
        if own is not None:
            own.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    _backward(model)
    optimizer.step()
    parts: dict[str, Callable[[], Any]] = {
        "clip": clip,
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
    }
    return Contender(parts, _keeping_gradients(model))


def _backward(model: nn.Module) -> None:
    model(torch.zeros((), requires_grad=True)).backward()


def _ours(units: int, count: int, per_rank: int, state: Any) -> Contender:
    model = _sharded(_build(units, count, per_rank))
    optimizer = AdamW(model.parameters(), lr=1e-3, state=state)
    _backward(model)
    optimizer.step()
    optimizer.zero_grad()
    contender = _contender(model, optimizer)
    flats = optimizer._flats or []

    def norm() -> None:
        for flat in flats:
            norms_of(flat.gradients())

    return contender._replace(parts={"norm": norm, **contender.parts})


def _keeping_gradients(model: nn.Module) -> Callable[[], None]:
    """A function that puts back what zero_grad dropped: parts of one buffer, as delivered."""
    parameters = [*model.parameters()]
    kept = [parameter.grad for parameter in parameters]

    def between() -> None:
        buffers: dict[int, Tensor] = {}
        for parameter, gradient in zip(parameters, kept, strict=True):
            assert gradient is not None
            base = gradient._base
            if base is not None:
                if id(base) not in buffers:
                    buffers[id(base)] = base.detach().clone()
                buffer = buffers[id(base)]
                gradient = buffer.as_strided(
                    gradient.shape, gradient.stride(), gradient.storage_offset()
                )
            parameter.grad = gradient

    return between


def _bandwidth(args: argparse.Namespace, count: int, per_rank: int) -> dict[str, Any]:
    # Of one thread: other processes and waiting do not count.
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    made = _contenders(args.units, count, per_rank)
    times: dict[str, dict[str, list[float]]] = {name: {p: [] for p in PARTS} for name in made}

    def run(name: str) -> float:
        contender = made[name]
        contender.between()
        total = 0.0
        for part in PARTS:
            start = clock()
            contender.parts.get(part, _nothing)()
            spent = (clock() - start) * 1e3
            times[name][part].append(spent)
            total += spent if part in TIMED else 0.0
        return total

    totals = interleave(list(made), run, args.rounds, warmup=1)
    moved = _bytes()
    numel = per_rank * count * args.units
    result: dict[str, Any] = {}
    for name, values in totals.items():
        key = name.removeprefix("layerzero ") if name.startswith("layerzero") else "torch"
        median = Spread.of(values).median
        parts = {part: Spread.of(times[name][part][1:]).median for part in PARTS}
        result[name] = {
            "clip_step_ms": Spread.of(values).as_dict(),
            "parts_ms": parts,
            "over_fused_on_pieces": ratio(values, totals[BASE]).as_dict(),
            "gigabytes_per_second": moved[key] * numel / median / 1e6,
        }
    _show(f"{numel} elements in {count * args.units} parameters, ms", result, PARTS)
    return result


def _host(args: argparse.Namespace, count: int) -> dict[str, Any]:
    gc.collect()
    made = _contenders(args.units, count, 16)
    result: dict[str, Any] = {}

    def run_of(part: str) -> Callable[[str], float]:
        def run(name: str) -> float:
            made[name].between()
            start = time.process_time()
            for _ in range(3):
                made[name].parts.get(part, _nothing)()
            return (time.process_time() - start) / 3 * 1e3

        return run

    for part in PARTS:
        times = interleave(list(made), run_of(part), args.rounds, warmup=2)
        for name, values in times.items():
            own = result.setdefault(name, {"parts_ms": {}, "python_calls": {}})
            made[name].between()
            own["parts_ms"][part] = Spread.of(values).median
            own["python_calls"][part] = _calls(made[name].parts.get(part, _nothing))
            if part == "step":
                own["over_fused_on_pieces"] = ratio(values, times[BASE]).as_dict()
    _show(f"host, {count * args.units} parameters of 16 elements, ms", result, PARTS)
    return result


def _nothing() -> None:
    """A part that a contender does not have."""


def _calls(function: Callable[[], Any]) -> int:
    """Calls of Python functions, and from Python of functions in C."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def _show(title: str, result: dict[str, Any], parts: tuple[str, ...]) -> None:
    print(title)
    header = ["", *parts, "clip + step", "over fused on pieces", "calls"]
    rows = []
    for name, own in result.items():
        total = own.get("clip_step_ms", {}).get("median")
        calls = own.get("python_calls", {}).get("step")
        rows.append(
            [
                name,
                *(f"{own['parts_ms'][part]:.2f}" for part in parts),
                "" if total is None else f"{total:.1f}",
                f"{own['over_fused_on_pieces']['median']:.2f}",
                "" if calls is None else str(calls),
            ]
        )
    print_table(header, rows)


if __name__ == "__main__":
    main()
