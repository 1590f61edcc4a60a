"""What the tests of this folder run in processes of their own; each function returns plain data.

Functions that take `device_type` run on the CPU as well, where nothing can be late.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerzero import MixedPrecision, ZeRO3
from tests.gpu.mirror import Mirror, Wires, fake_world, one_rank_group
from tests.gpu.mirror_runs import Pair, build
from tests.harness.internals import ShardGroup, collectives, root_state
from tests.harness.models import Block

LONG_SLEEP = 1_000_000_000
"""Cycles: about half a second of a busy stream."""
USES = ("float32", "bfloat16", "clipping", "accumulation")
BFLOAT16 = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}


def _device(device_type: str) -> torch.device:
    if dist.is_initialized():  # The ranks of run_ranks have a default group already.
        dist.destroy_process_group()
    return torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")


def _group(device: torch.device) -> ShardGroup:
    backend = "nccl" if device.type == "cuda" else "fake"
    return ShardGroup(one_rank_group(device), 0, (0,), backend, timedelta(seconds=60))


def verbs(device_type: str) -> dict[str, bool]:
    """The engine's own calls on a real group: whether values came, and whether there is a Work."""
    device = _device(device_type)
    group = _group(device)
    average = dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        source = torch.arange(1, 65, device=device).to(dtype)
        full = torch.zeros_like(source)
        work = collectives._issue_all_gather(full, source, group)
        if work is not None:
            work.wait()
        found[f"all-gather {dtype}"] = torch.equal(full, source)
        found[f"all-gather {dtype}: work as the engine expects"] = (work is None) == (
            device.type == "cuda"
        )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name, op in (("sum", dist.ReduceOp.SUM), ("average", average)):
            source = torch.randn(64, device=device).to(dtype)
            out = torch.zeros_like(source)
            work = collectives._issue_reduce_scatter(out, source, op, group)
            if work is not None:
                work.wait()
            found[f"reduce-scatter {dtype} {name}"] = torch.equal(out, source)
    return found


def on_the_current_stream(device_type: str) -> dict[str, bool]:
    """A collective without a Work runs behind its stream; one with a Work orders the waiter."""
    device = _device(device_type)
    group = _group(device)
    stream = torch.cuda.Stream(device, priority=-1)
    source, full = torch.zeros(1 << 16, device=device), torch.zeros(1 << 16, device=device)
    collectives._issue_all_gather(full, source, group)  # The communicator is made at first use.
    found = {}
    # Without a sleep at first: what loads a kernel waits for the device.
    for is_async, cycles in ((False, 1), (True, 1), (False, LONG_SLEEP), (True, LONG_SLEEP)):
        torch.cuda.synchronize()
        options = collectives.AllgatherOptions()
        options.asyncOp = is_async
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            source.fill_(3 + is_async)
            work = getattr(group.process_group, collectives._ALL_GATHER)(full, source, options)
            if work is not None:
                work.wait()
            after = full + 1
        name = "with a work" if is_async else "without a work"
        found[f"{name}: the host goes on"] = not stream.query()
        found[f"{name}: a work comes back"] = (work is not None) == is_async
        stream.synchronize()
        found[f"{name}: the stream waits"] = bool((after == 4 + is_async).all())
    return found


def abort_behind_a_busy_stream() -> float:
    """Seconds until `abort` returns while a collective waits behind a sleep."""
    device = _device("cuda")
    group = _group(device)
    full = torch.zeros(1 << 16, device=device)
    collectives._issue_all_gather(full, full.clone(), group)
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * LONG_SLEEP)
    collectives._issue_all_gather(full, full.clone(), group)
    began = time.monotonic()
    group.process_group._get_backend(device).abort()
    return time.monotonic() - began


class _OneStuck(Wires):
    """Wires of which one gather, once asked for, takes far longer than the model's timeout."""

    is_due = False

    def _before(self, output: Tensor) -> None:
        if self.is_due:
            self.is_due = False
            torch.cuda._sleep(30 * LONG_SLEEP)


def a_stuck_stream_is_reported() -> dict[str, Any]:
    """The error, the seconds until it came, and the longest the host was held up meanwhile."""
    device = _device("cuda")
    wires = _OneStuck(device)
    with fake_world(3, 8), wires.installed():
        timeout = timedelta(seconds=2)
        model = ZeRO3(build(24, 7, 3).to(device), auto_wrap_policy={Block}, timeout=timeout)
        batch = torch.randn(8, 24, device=device)
        for _ in range(2):
            model(batch).sum().backward()
        torch.cuda.synchronize()
        wires.is_due = True
        began = last = time.monotonic()
        model(batch)
        longest = time.monotonic() - began
        while root_state(model).operations.failure is None and last - began < 25:
            time.sleep(0.05)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        failure = root_state(model).operations.failure
        return {
            "error": None if failure is None else str(failure),
            "seconds": last - began,
            "longest_pause_s": longest,
        }


def another_device(index: int) -> dict[str, int]:
    """Elements that differ on a device that is not the current one (no `set_device`)."""
    _device("cuda")
    mirror = Mirror(torch.device("cuda", index), 20_000_000)
    with fake_world(3, 8), mirror.installed():
        pair = Pair(mirror, BFLOAT16)
        for _ in range(3):
            pair.backward()
            pair.step()
        assert torch.cuda.current_device() != index
        return mirror.wrong()


def one_of_two(device_type: str, rank: int, folder: str) -> int:
    """Train as one of two real ranks, each with a batch of its own; elements that differ.

    The mean of two gradients is half of each, added: exact, in whatever order.
    """
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=45),
        )
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    replica = build(24, 7, 3).to(device)
    model = ZeRO3(build(24, 7, 3).to(device), auto_wrap_policy={Block})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (replica, model)]
    for _ in range(3):
        batches = torch.randn(2, 8, 24, device=device)
        model(batches[rank]).square().mean().backward()
        for batch in batches:
            (replica(batch).square().mean() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with model.summon_full_params():
        wrong = sum(
            int((expected != got).sum())
            for expected, got in zip(replica.parameters(), model.module.parameters(), strict=True)
        )
    dist.barrier()
    return wrong


def empty_cache_between(
    device_type: str, setting: dict[str, Any], steps: int, width: int = 1024
) -> dict[str, int]:
    """Elements that differ when cached memory is given back between forward and backward.

    With segments that can be unmapped, or with memory that leaves its pool when it is freed
    (PYTORCH_CUDA_ALLOC_CONF), that is memory under running kernels if its stream has not waited.
    """
    device = _device(device_type)
    mirror = Mirror(device, 20_000_000)
    options = BFLOAT16 if setting.get("bfloat16") else {}
    with fake_world(3, 8), mirror.installed():
        pair = Pair(mirror, options, width, 2 * width, num_spare=2 * steps + 2)
        pair.between = torch.cuda.empty_cache if device.type == "cuda" else pair.between
        for _ in range(steps):
            pair.backward()
            pair.step()
        return mirror.wrong()


def steady(device: torch.device, width: int, **options: Any) -> tuple[ZeRO3, Callable[[], None]]:
    """A sharded model on `Wires` and one step of it with fused AdamW; nothing is compared."""
    model = ZeRO3(build(width, 2 * width, 4).to(device), auto_wrap_policy={Block}, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = torch.randn(8, width, device=device)

    def step() -> None:
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def allocations(device_type: str, steps: int) -> list[int]:
    """Calls of cudaMalloc so far, after each step."""
    device = _device(device_type)
    wires = Wires(device)
    with fake_world(3, 8), wires.installed():
        _, step = steady(device, 512, **BFLOAT16)
        counts = []
        for _ in range(steps):
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
                counts.append(torch.cuda.memory_stats(device)["num_device_alloc"])
            else:
                counts.append(0)
        return counts


def host_goes_on(device_type: str, use: str) -> dict[str, bool]:
    """Whether the stream is still busy when a steady step has been issued behind a sleep.

    torch raises at the synchronizations that it knows of; the busy stream shows any other.
    """
    device = _device(device_type)
    wires = Wires(device)
    with fake_world(3, 8), wires.installed():
        options = {} if use == "float32" else BFLOAT16
        model, step = steady(device, 256, **options)
        uses: dict[str, Callable[[], None]] = {
            "float32": step,
            "bfloat16": step,
            "clipping": lambda: _clipped(model, step),
            "accumulation": lambda: _accumulated(model, step),
        }
        for _ in range(3):
            uses[use]()
        if device.type != "cuda":
            return {"busy": True}
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(4 * LONG_SLEEP)
            uses[use]()
            return {"busy": not torch.cuda.current_stream().query()}
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _clipped(model: ZeRO3, step: Callable[[], None]) -> None:
    step()
    model(torch.ones(8, 256, device=next(model.parameters()).device)).float().sum().backward()
    model.clip_grad_norm_(1.0)


def _accumulated(model: ZeRO3, step: Callable[[], None]) -> None:
    with model.no_sync():
        model(torch.ones(8, 256, device=next(model.parameters()).device)).float().sum().backward()
    step()
