"""Models, steps and failed passes leave nothing; processes that a rank starts leave it alone."""

import contextlib
import gc
import multiprocessing
import os
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from layerzero import ReductionPolicy, ZeRO3
from layerzero.optim import AdamW
from layerzero.optim.waiting_gradients import WaitingGradient
from tests.harness.fault_at import FaultAt
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.ranks import on_ranks, run_ranks

OPTIONS = (
    {},
    {"zero3_size": 1},
    {"zero3_size": 1, "outer": "replicate"},
    {"reduction": ReductionPolicy(separate_groups=True)},
    {"reshard_after_forward": False},
    {"sync_module_states": True},
)


def trained(options: dict[str, object], steps: int = 2) -> list[float]:
    """Losses of a model that is gone afterwards."""
    torch.manual_seed(0)
    model = ZeRO3(Mlp(2), auto_wrap_policy={Block}, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return [step(model, optimizer, number) for number in range(steps)]


def step(model: ZeRO3, optimizer: torch.optim.Optimizer, number: int) -> float:
    generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
    loss = model(torch.randn(3, WIDTH, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def tensor_nbytes() -> int:
    """Of all storages that a tensor refers to."""
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    tensors = [each for each in tensors if not isinstance(each, WaitingGradient)]  # No memory.
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def what_exists() -> Counter[str]:
    """Everything that a model could leave behind, apart from memory."""
    engine = (type(each) for each in gc.get_objects())
    found = Counter(f"object {t.__name__}" for t in engine if t.__module__.startswith("layerzero."))
    found["process groups"] = len(dist.distributed_c10d._world.pg_map)
    found["threads"] = threading.active_count()
    found["file descriptors"] = len(os.listdir("/proc/self/fd"))
    found["global module hooks"] = len(torch.nn.modules.module._global_forward_hooks)
    found["keys of the store"] = dist.distributed_c10d._get_default_store().num_keys()
    return found


@on_ranks(2, fresh=True, timeout=120)
def test_deleting_a_model_frees_all_at_once() -> None:
    for _ in range(2):
        for options in OPTIONS:
            trained(options)
    gc.collect()
    existed = what_exists()
    gc.disable()
    for options in OPTIONS:
        before = tensor_nbytes()
        trained(options)
        # At once, and not when garbage is collected.
        assert tensor_nbytes() == before, options
        model = ZeRO3(Mlp(2), auto_wrap_policy={Block}, **options)
        assert tensor_nbytes() > before
        model(torch.ones(2, WIDTH))  # Units may be full.
        del model
        assert tensor_nbytes() == before, options
    # Threads of waits end a moment after them.
    for thread in threading.enumerate():
        if thread.name.startswith("layerzero-"):
            thread.join(10.0)
    exists = what_exists()
    grown = {name: (existed[name], n) for name, n in exists.items() if n > existed[name]}
    assert not grown, grown


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), float(index))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@on_ranks(2, timeout=300.0, fresh=True)
def test_processes_that_a_rank_starts_leave_the_engine_alone(method: str) -> None:
    # Ranks of the harness are daemons, which Python forbids to have children.
    multiprocessing.current_process()._config["daemon"] = False
    expected = trained({}, steps=8)
    torch.manual_seed(0)
    model = ZeRO3(Mlp(2), auto_wrap_policy={Block})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = [step(model, optimizer, 0)]
    # Each spawned child imports all anew, so there each rank starts one kind of the two.
    is_first, both = dist.get_rank() == 0, method == "fork"
    if is_first or both:
        # It ends as Python does, with its exit handlers.
        child = multiprocessing.get_context(method).Process(target=time.sleep, args=(0,))
        child.start()
    losses.append(step(model, optimizer, len(losses)))
    if is_first or both:
        child.join(60.0)
        assert child.exitcode == 0
    if not is_first or both:
        for rows in DataLoader(Rows(), num_workers=1, multiprocessing_context=method):
            assert rows.shape == (1, WIDTH)
    losses.append(step(model, optimizer, len(losses)))
    # As a child of `os.fork` that holds the model, and drops it.
    pid = os.fork()
    if pid == 0:
        del model, optimizer
        gc.collect()
        os._exit(0)
    losses.append(step(model, optimizer, len(losses)))
    assert os.waitpid(pid, 0)[1] == 0
    losses.append(step(model, optimizer, len(losses)))
    assert losses == expected[: len(losses)]


def _counts() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    every = gc.get_objects()
    return {
        **{name: n for name, n in what_exists().items() if not name.startswith("object ")},
        "tensors": sum(isinstance(each, torch.Tensor) for each in every),
        "bytes of tensors": tensor_nbytes(),
        "objects": len(every),
        "resident MB": resident >> 20,
    }


def _trains(num_steps: int) -> list[dict[str, int]]:
    """Counts after a fifth of the steps, and at the end."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(Block() for _ in range(4)))
    model = ZeRO3(net, auto_wrap_policy={Block}, on_nonfinite="skip")
    optimizer = AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def run(syncs: bool = True, at: int = 0) -> None:
        x = torch.randn(2, WIDTH, generator=generator)
        fault = FaultAt(at) if at else contextlib.nullcontext()
        with fault, contextlib.nullcontext() if syncs else model.no_sync():
            model(x).square().sum().backward()

    found = []
    for step in range(num_steps):
        run(syncs=False)
        if step % 4 == 0:
            with pytest.raises(torch.OutOfMemoryError):
                run(syncs=step % 8 == 0, at=1 + step % 53)
        if step % 7 == 0:
            with torch.no_grad():
                model(torch.zeros(1, WIDTH))
        run()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in (num_steps // 5, num_steps - 1):
            dist.barrier()
            found.append(_counts())
            dist.barrier()
    return found


def _check(found: list[dict[str, int]]) -> dict[str, Any]:
    before, after = found
    # A few objects live a little longer; nothing grows with the number of steps.
    slack = {"objects": 300, "resident MB": 24, "keys of the store": 8, "tensors": 4}
    slack["bytes of tensors"] = 4096
    grown = {name: (before[name], after[name]) for name in before}
    assert all(after[name] <= before[name] + slack.get(name, 0) for name in before), grown
    return grown


def test_steps_and_failed_passes_leave_nothing(pytestconfig: pytest.Config) -> None:
    num_steps = 2000 if pytestconfig.getoption("--seeds") else 40
    for rank, found in enumerate(run_ranks(2, _trains, num_steps, timeout=900)):
        print(f"rank {rank}, {num_steps} steps: {_check(found)}")
