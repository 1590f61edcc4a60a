"""How fast is the fused pad-copy, compared with a plain copy of the same bytes and plain torch?

For each case: the kernel through `layerzero.ops`, a memory copy that moves the same number of bytes
(half read, half written: the upper bound), and the fastest way in plain torch. All three take turns
in each round; ratios are medians of the ratios within a round.

    L   a layer of a 1 B Llama: 9 tensors, 60.8 M elements
    S   2000 tensors of 4 KB, where the allocator puts them; with --gap, that many bytes between
        the end of one and the start of the next: the time depends on them
        (docs/internals/pad_copy.md)

On a GPU, times come from CUDA events, with 20 warm-up rounds and 100 that count.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from common import Spread, interleave, options, print_result, print_table, ratio

from layerzero.ops import Segments, native_status, ordered_sum_, pack_

WIDTH, HIDDEN, KEY_VALUE = 2048, 8192, 512
LAYER = [
    *(WIDTH * WIDTH, KEY_VALUE * WIDTH, KEY_VALUE * WIDTH, WIDTH * WIDTH),
    *(WIDTH * HIDDEN, WIDTH * HIDDEN, WIDTH * HIDDEN, WIDTH, WIDTH),
]
ALIGNMENT, RANKS = 32, 8
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Target:
    """Ratios that a case must reach on a CPU; None: no target."""

    memcpy_ratio: float | None = None
    torch_speedup: float | None = None


@dataclass
class Case:
    name: str
    kernel: Callable[[], object]
    torch_way: Callable[[], object]
    nbytes: int
    """Bytes moved: those read plus those written."""
    target: Target = Target()


def concatenate(numels: Sequence[int], alignment: int, multiple: int) -> Segments:
    """Whole sources one after another, at multiples of `alignment`, padded to `multiple`."""
    starts = [0, *itertools.accumulate(-(-numel // alignment) * alignment for numel in numels)]
    rows = [(i, 0, starts[i], numel) for i, numel in enumerate(numels)]
    return Segments.build(rows, -(-starts[-1] // multiple) * multiple)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = options(__doc__, rounds=100 if on_gpu else 21)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--gap", type=int, help="bytes between the tensors of S, a multiple of 64")
    args = parser.parse_args()
    if args.gap is not None and (args.gap < 0 or args.gap % 64):
        parser.error(f"--gap takes a multiple of 64, as allocations are aligned, got {args.gap}")
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    print(f"{device}, {args.threads} threads, native: {native_status()}")
    results = []
    for make in cases(args.gap):
        case = make(device)
        if args.only in case.name:
            results.append(measure(case, device, args.rounds))
        # A layer's buffers take several 100 MB, so only one case is kept at a time.
        del case
    print_table(
        ["case", "ms", "memcpy ms", "/ memcpy", "bar", "torch / kernel", "bar"],
        [
            [
                result["case"],
                f"{result['ms']:.3f}",
                f"{result['memcpy_ms']:.3f}",
                Spread(**result["memcpy_ratio_spread"]).text(),
                str(result["target"]["memcpy_ratio"] or ""),
                Spread(**result["torch_speedup_spread"]).text(),
                str(result["target"]["torch_speedup"] or ""),
            ]
            for result in results
        ],
    )
    print_result(args, native=asdict(native_status()), cases=results)


def measure(case: Case, device: torch.device, rounds: int) -> dict[str, Any]:
    half = case.nbytes // 2
    source = torch.ones(half, dtype=torch.uint8, device=device)
    target = torch.zeros(half, dtype=torch.uint8, device=device)
    ways: dict[str, Callable[[], object]] = {
        "kernel": case.kernel,
        "memcpy": lambda: target.copy_(source),
        "torch": case.torch_way,
    }
    # Short cases repeat within a round, so that timer overhead and wake-ups do not dominate.
    repeats = 10 if case.nbytes < 64 << 20 and device.type == "cpu" else 1
    timed = _event_ms if device.type == "cuda" else _wall_ms
    times = interleave(
        list(ways),
        lambda name: timed(ways[name], repeats),
        rounds,
        warmup=20 if device.type == "cuda" else 3,
    )
    memcpy_ratio = ratio(times["kernel"], times["memcpy"])
    torch_speedup = ratio(times["torch"], times["kernel"])
    return {
        "case": case.name,
        "ms": round(Spread.of(times["kernel"]).median, 4),
        "memcpy_ratio": round(memcpy_ratio.median, 3),
        "torch_speedup": round(torch_speedup.median, 3),
        "memcpy_ms": round(Spread.of(times["memcpy"]).median, 4),
        "torch_ms": round(Spread.of(times["torch"]).median, 4),
        "memcpy_ratio_spread": memcpy_ratio.as_dict(),
        "torch_speedup_spread": torch_speedup.as_dict(),
        "nbytes": case.nbytes,
        "target": asdict(case.target),
    }


def _wall_ms(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) * 1e3 / repeats


def _event_ms(run: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def cases(gap_nbytes: int | None = None) -> list[Callable[[torch.device], Case]]:
    small = [1024] * 2000

    def pack_case(name: str, numels: Sequence[int], *args: Any, **named: Any) -> Any:
        gap = None if numels is LAYER else gap_nbytes
        return lambda device: _pack_case(device, gap, name, numels, *args, **named)

    return [
        pack_case("flatten L float32 -> bfloat16", LAYER, FLOAT32, BFLOAT16, target=Target(1.15)),
        pack_case("flatten L float32 -> float32", LAYER, FLOAT32, FLOAT32),
        pack_case(
            "gradients L bfloat16 -> float32, scaled",
            LAYER,
            BFLOAT16,
            FLOAT32,
            scale=1 / RANKS,
            target=Target(1.0, 1.5),
        ),
        pack_case("gradients L float32 -> bfloat16, scaled", LAYER, FLOAT32, BFLOAT16, scale=1 / 3),
        pack_case("gradients L float16 -> float32, scaled", LAYER, FLOAT16, FLOAT32, scale=1 / 3),
        pack_case(
            "flatten S float32 -> bfloat16", small, FLOAT32, BFLOAT16, target=Target(None, 2.0)
        ),
        pack_case(
            "flatten S float32 -> float32", small, FLOAT32, FLOAT32, target=Target(None, 2.0)
        ),
        pack_case(
            "gradients S bfloat16 -> float32, 1 in 9 missing",
            [2048] * 2000,
            BFLOAT16,
            FLOAT32,
            scale=1 / RANKS,
            missing=9,
            target=Target(None, 2.0),
        ),
        _shard_case,
        lambda device: _sum_case(device, 2, FLOAT32),
        lambda device: _sum_case(device, 8, BFLOAT16),
    ]


def _pack_case(
    device: torch.device,
    gap_nbytes: int | None,
    name: str,
    numels: Sequence[int],
    src_dtype: torch.dtype,
    dtype: torch.dtype,
    scale: float = 1.0,
    missing: int = 0,
    target: Target = Target(),
) -> Case:
    """Each source tensor is a separate allocation, like parameters, unless a gap is given."""
    segs = concatenate(numels, ALIGNMENT, RANKS * ALIGNMENT)
    out = torch.zeros(segs.numel, dtype=dtype, device=device)
    if gap_nbytes is None:
        srcs = [torch.randn(numel, device=device).to(src_dtype) for numel in numels]
    else:
        srcs = _spaced(numels, src_dtype, device, gap_nbytes)
    if missing:
        srcs = [src[:0] if index % missing == 0 else src for index, src in enumerate(srcs)]
    views = [
        out[start : start + numels[source]].view(srcs[source].shape)
        if srcs[source].numel()
        else out[start : start + numels[source]]
        for source, _, start in segs.table.tolist()
        if source >= 0
    ]
    filled = [view for view, src in zip(views, srcs, strict=True) if src.numel()]
    present = [src for src in srcs if src.numel()]
    empty = [view for view, src in zip(views, srcs, strict=True) if not src.numel()]

    def torch_way() -> None:
        torch._foreach_copy_(filled, present)
        if empty:
            torch._foreach_zero_(empty)
        if scale != 1.0:
            out.mul_(scale)

    nbytes = sum(src.nbytes for src in srcs) + out.nbytes
    return Case(name, lambda: pack_(out, srcs, segs, scale), torch_way, nbytes, target)


def _spaced(
    numels: Sequence[int], dtype: torch.dtype, device: torch.device, gap_nbytes: int
) -> list[torch.Tensor]:
    gap = gap_nbytes // dtype.itemsize
    ends = list(itertools.accumulate(numel + gap for numel in numels))
    memory = torch.randn(ends[-1], device=device).to(dtype)
    return [memory[end - gap - numel : end - gap] for end, numel in zip(ends, numels, strict=True)]


def _shard_case(device: torch.device) -> Case:
    numel = sum(LAYER) // RANKS
    shard = torch.randn(numel, device=device)
    segs = concatenate([numel], ALIGNMENT, ALIGNMENT)
    out = torch.zeros(segs.numel, dtype=BFLOAT16, device=device)
    view = out[:numel]
    return Case(
        "shard cast L / 8 float32 -> bfloat16",
        lambda: pack_(out, [shard], segs),
        lambda: view.copy_(shard),
        shard.nbytes + out.nbytes,
    )


def _sum_case(device: torch.device, count: int, dtype: torch.dtype) -> Case:
    numel = sum(LAYER) // RANKS
    parts = [torch.randn(numel, device=device).to(dtype) for _ in range(count)]
    out = torch.empty(numel, device=device)

    def torch_way() -> None:
        if dtype == FLOAT32:
            torch.add(parts[0], parts[1], out=out)
            rest = parts[2:]
        else:
            out.copy_(parts[0])
            rest = parts[1:]
        for part in rest:
            out.add_(part)
        out.mul_(1 / count)

    return Case(
        f"ordered sum of {count} shards {str(dtype).removeprefix('torch.')} -> float32",
        lambda: ordered_sum_(out, parts, 1 / count),
        torch_way,
        sum(part.nbytes for part in parts) + out.nbytes,
    )


if __name__ == "__main__":
    main()
