"""After an exception in forward or backward the next step equals the one after a clean start; a
pass that failed changes nothing, and can be run again. Models, steps and failed passes leave
nothing; processes that a rank starts leave it alone."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from layerzero import BackwardPrefetch, MixedPrecision, ReductionPolicy, ZeRO3, units
from layerzero.optim import AdamW
from layerzero.optim.waiting_gradients import WaitingGradient
from tests.harness.checks import assert_same_on_all_ranks, named
from tests.harness.compare import assert_same_gradients, zero3
from tests.harness.fault_at import FaultAt, differences, snapshot
from tests.harness.internals import BackwardPass, Messages, root_state
from tests.harness.models import WIDTH, Block, Mlp, Parts
from tests.harness.ranks import KeptRanks, on_ranks, run_ranks
from tests.harness.recording import observed
from tests.harness.reference import own_batch, seeded
from tests.harness.saved_models import train


class Fragile(Mlp):
    """Raises in the backward of the block that it is told to."""

    fails_at = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            x.register_hook(lambda _, index=index: self._maybe_raise(index))
        return self.head(x)

    def _maybe_raise(self, index: int) -> None:
        if self.fails_at == index:
            raise ValueError(f"told to, at {index}")


def start() -> tuple[ZeRO3, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ZeRO3(Fragile(4), auto_wrap_policy={Block})
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def fail(model: ZeRO3, loss: torch.Tensor, index: int) -> None:
    """A backward that raises there."""
    model.module.fails_at = index
    with pytest.raises(ValueError, match="told to"):
        loss.backward()
    model.module.fails_at = -1


@on_ranks(2)
def test_a_signal_in_a_pass_leaves_no_message_in_flight_and_no_hold() -> None:
    """It comes when a message was posted, and before anything refers to its handle."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model, _ = start()
    units(model)[1].unshard()
    with observed(Messages, "post", after=interrupt), pytest.raises(KeyboardInterrupt):
        model(own_batch(0))
    assert not root_state(model).operations._detector.in_flight
    assert {(unit.state.name, unit.holds) for unit in units(model)} == {("SHARDED", 0)}
    model(own_batch(0)).sum().backward()
    clean, _ = start()
    clean(own_batch(0)).sum().backward()
    assert_same_gradients(model, clean)


@on_ranks(2)
def test_an_exception_caught_inside_the_model_is_the_models_business() -> None:
    def run(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Catches the exception of one of its units and goes on without it."""
        try:
            x = own.first(x.new_zeros(1, WIDTH + 1))
        except RuntimeError:
            x = own.second(x)
        return own.head(x)

    def build() -> nn.Module:
        return Parts(run, first=Block(), second=Block(), head=nn.Linear(WIDTH, 2))

    plain, model = seeded(build), zero3(build, Block)
    for number in range(3):
        x = own_batch(number)
        assert torch.equal(model(x), plain(x))
        model(x).sum().backward()
    assert model.second.up.weight.grad is not None


def outlived() -> contextlib.AbstractContextManager[None]:
    """As on a device, where a thread of autograd's drops the end of a failed pass, at some time."""
    alive: list[object] = []
    return observed(BackwardPass, "watch", lambda _, callback, react: alive.append(callback))


@on_ranks(2)
def test_zero_grad_gives_a_failed_step_up() -> None:
    ways = ("model", "optimizer", "flat", "zeros")
    for gives_up, context in itertools.product(ways, (contextlib.nullcontext, outlived)):
        model, optimizer = start()
        if gives_up == "flat":
            del optimizer
            optimizer = AdamW(model.parameters(), lr=0.01)
        clean, _ = start()
        with context():
            with model.no_sync():
                model(own_batch(0)).sum().backward()
            fail(model, model(own_batch(1)).sum(), 1)
            options = {"set_to_none": False} if gives_up == "zeros" else {}
            (model if gives_up == "model" else optimizer).zero_grad(**options)
        model(own_batch(5)).sum().backward()
        clean(own_batch(5)).sum().backward()
        with named(gives_up, context.__name__):
            assert_same_gradients(model, clean)


@on_ranks(2)
def test_hooks_of_a_failed_pass_leave_no_gradient() -> None:
    model, _ = start()
    model(own_batch(0)).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    parameters = [*model.parameters()]
    hooks = [parameters[1].register_post_accumulate_grad_hook(lambda _: None)]
    hooks += [parameters[3].register_hook(lambda _: exec("raise ValueError('in a hook')"))]
    with pytest.raises(ValueError, match="in a hook"):
        model(own_batch(1)).sum().backward()
    for parameter, grad in zip(parameters, before, strict=True):
        assert torch.equal(parameter.grad, grad)
    for hook in hooks:
        hook.remove()
    clean, _ = start()
    for number in range(2):
        clean(own_batch(number)).sum().backward()
    model(own_batch(1)).sum().backward()
    assert_same_gradients(model, clean)


@on_ranks(2)
def test_an_error_of_a_step_in_backward_says_what_has_stepped() -> None:
    model, optimizer = start()
    model.step_in_backward(optimizer)
    model(own_batch(0)).sum().backward()
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fail(model, model(own_batch(1)).sum(), 0)
    assert all(map(torch.equal, before, model.parameters())), "nothing has stepped"
    steps = []

    def fail_in_third(*_: object) -> None:
        steps.append(None)
        if len(steps) == 3:
            raise ValueError("told to, in the third step")

    hook = optimizer.register_step_pre_hook(fail_in_third)
    with pytest.raises(ValueError, match="told to") as caught:
        model(own_batch(1)).sum().backward()
    hook.remove()
    if hasattr(caught.value, "__notes__"):
        assert "had stepped by then, which cannot be undone" in caught.value.__notes__[0]
    assert not all(map(torch.equal, before, model.parameters()))


@on_ranks(2)
def test_another_backward_may_follow_a_failed_one() -> None:
    model, _ = start()
    good = model(own_batch(0)).square().sum()
    bad = model(own_batch(1)).square().sum()
    fail(model, bad, 2)
    good.backward()
    clean, _ = start()
    clean(own_batch(0)).square().sum().backward()
    assert_same_gradients(model, clean)


def net_of(reentrant: bool) -> nn.Module:
    """Blocks, the last of which is recomputed, a tied pair of layers, and the loss: outside of the
    model it would be in no pass, and an exception there unknown to the engine."""

    def run(own: Any, x: torch.Tensor) -> torch.Tensor:
        x = own.blocks[1](own.blocks[0](own.stem(x)))
        x = own.head(checkpoint(own.blocks[2], x, use_reentrant=reentrant))
        return x.float().square().sum()

    stem, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    head.weight = stem.weight
    return Parts(run, stem=stem, blocks=nn.ModuleList(Block() for _ in range(3)), head=head)


Settings = dict[str, Any]
_BFLOAT = MixedPrecision(param_dtype=torch.bfloat16)
SETTINGS: list[Settings] = [
    {"accumulation": "unsharded"},
    {"accumulation": "sharded"},
    {"accumulation": "unsharded", "mixed_precision": _BFLOAT},
    {"accumulation": "sharded", "mixed_precision": _BFLOAT, "deterministic": True},
    {"zero3_size": 1, "accumulation": "unsharded"},
    {"zero3_size": 1, "outer": "replicate", "accumulation": "sharded"},
    {"outer": "shard", "reshard_after_forward": False, "accumulation": "unsharded"},
    {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "accumulation": "unsharded"},
    {"reduction": ReductionPolicy(in_flight="1MB"), "accumulation": "unsharded"},
    {"optional_modules": 1, "accumulation": "unsharded"},
]


def build(settings: Settings, reentrant: bool = False) -> tuple[ZeRO3, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net, arguments = net_of(reentrant), dict(settings)
    if arguments.pop("optional_modules", None):
        arguments["optional_modules"] = [net.blocks[0]]
    model = ZeRO3(net, auto_wrap_policy={Block}, **arguments)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def micro_batch(
    model: ZeRO3, number: int, syncs: bool, after_forward: Callable[[], object] = lambda: None
) -> None:
    with contextlib.nullcontext() if syncs else model.no_sync():
        loss = model(own_batch(number))
        after_forward()
        loss.backward()


def _fails(
    model: ZeRO3, optimizer: torch.optim.Optimizer, number: int, syncs: bool, at: int
) -> bool:
    """Whether a micro-batch has an operation number `at`; it raises there, and changes nothing."""
    root_state(model).backward.clear_abandoned()
    before, of_forward = snapshot(model, optimizer), []
    reached = False
    try:
        with FaultAt(at) as fault:
            micro_batch(model, number, syncs, lambda: of_forward.append(fault.count))
    except torch.OutOfMemoryError:
        reached = True
    # A rank that is alone in a failure, or without one, would wait for the others in vain.
    assert_same_on_all_ranks(reached, "whether it failed")
    if reached:
        root_state(model).backward.clear_abandoned()
        wrong = differences(before, snapshot(model, optimizer))
        if of_forward == [at - 1]:  # Between the two: no pass of the model's failed.
            wrong = [each for each in wrong if not isinstance(before[each], dict)]
        assert not wrong, f"it changed {wrong}"
    return reached


def _sweep(settings: Settings, reentrant: bool, which: int, at: int, stride: int) -> int:
    """Steps of three micro-batches, of which the last reduces. One of them fails in each step, at a
    later operation each time, and runs again."""
    clean, model = (build(settings, reentrant) for _ in range(2))
    number, failures, reached = 0, 0, True
    while reached:
        for part in range(3):
            micro_batch(clean[0], number, part == 2)
            if part == which:
                with named(f"operation {at} of micro-batch {which}"):
                    reached = _fails(*model, number, part == 2, at)
                failures += reached
            if part != which or reached:
                micro_batch(model[0], number, part == 2)
            number += 1
        for _, optimizer in (clean, model):
            optimizer.step()
            optimizer.zero_grad()
        for mine, theirs in zip(model[0].parameters(), clean[0].parameters(), strict=True):
            assert torch.equal(mine, theirs), f"after operation {at} of micro-batch {which}"
        at += stride
    return failures


def _sweep_all(settings: list[Settings], reentrant: bool, stride: int) -> int:
    failures = 0
    for place, each in enumerate(settings):
        for which in range(3):
            with named(each):
                at = 1 + (place * 7 + which * 3) % stride
                failures += _sweep(each, reentrant, which, at, stride)
    return failures


@on_ranks(2, timeout=90)
def test_a_pass_that_runs_out_of_memory_changes_nothing() -> None:
    assert _sweep_all([SETTINGS[0], SETTINGS[5]], False, 211) > 4
    # In the first pass of a model the engine also looks for writes into full parameters.
    for place in (31, 40, 49):
        assert _sweep(SETTINGS[4], False, 0, place, 1000) == 1


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_may_run_out_of_memory_at_any_operation(
    ranks: KeptRanks, reentrant: bool, pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.getoption("--seeds"):
        half = SETTINGS[2 + reentrant :: 2]
        (failures, _) = ranks(2, _sweep_all, half, reentrant, 149, timeout=120)
        assert failures > 2 * len(half)
        return
    for place in range(len(SETTINGS)):
        settings = SETTINGS[place : place + 1]
        (failures, _) = ranks(2, _sweep_all, settings, reentrant, 3, timeout=1800)
        assert failures > 50


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
    return train(model, optimizer, steps)


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
    losses = train(model, optimizer, 1)
    # Each spawned child imports all anew, so there each rank starts one kind of the two.
    is_first, both = dist.get_rank() == 0, method == "fork"
    if is_first or both:
        # It ends as Python does, with its exit handlers.
        child = multiprocessing.get_context(method).Process(target=time.sleep, args=(0,))
        child.start()
    losses += train(model, optimizer, 1, len(losses))
    if is_first or both:
        child.join(60.0)
        assert child.exitcode == 0
    if not is_first or both:
        for rows in DataLoader(Rows(), num_workers=1, multiprocessing_context=method):
            assert rows.shape == (1, WIDTH)
    losses += train(model, optimizer, 1, len(losses))
    # As a child of `os.fork` that holds the model, and drops it.
    pid = os.fork()
    if pid == 0:
        del model, optimizer
        gc.collect()
        os._exit(0)
    losses += train(model, optimizer, 1, len(losses))
    assert os.waitpid(pid, 0)[1] == 0
    losses += train(model, optimizer, 1, len(losses))
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
