"""A dead, stopped or silent rank, or one that goes another way: the others get an error that says
who and where; a slow one is warned of. Backends whose messages carry no name have the same results,
and a watchdog that names what hangs."""

import functools
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import CollectiveError, ZeRO3, checkpoint
from tests.harness.checks import assert_bitwise, error_in_time
from tests.harness.internals import desync, diagnosis, groups, root_state
from tests.harness.models import WIDTH, Block, Mlp, Routed
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import of_all_ranks, on_ranks, run_ranks
from tests.harness.recording import logged
from tests.harness.served_store import serve_store
from tests.harness.stream_uses import train

TIMEOUT = timedelta(seconds=2)
GRACE_S = 30.0


class Chain(Routed):
    """Blocks of equal size and nothing else, in an order that a rank may change."""

    route = "0 1 2 3"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, self.route)


def wrapped(module: nn.Module, timeout: timedelta = TIMEOUT, **arguments) -> ZeRO3:
    # Gloo cannot be aborted, so a rank blocked in it comes back when gloo itself gives up: soon.
    groups.BACKEND_GRACE, diagnosis.REPORT_SECONDS = timedelta(seconds=3), 0.5
    group = make_plain_group(timeout + groups.BACKEND_GRACE)
    return ZeRO3(module, group, auto_wrap_policy={Block}, timeout=timeout, **arguments)


error_of = partial(error_in_time, within_s=TIMEOUT.total_seconds() + GRACE_S)


def _swaps() -> tuple[str, str]:
    torch.manual_seed(0)
    model = wrapped(Chain(4), forward_prefetch=False)
    train(model, 2)
    if dist.get_rank() == 1:
        model.module.route = "0 2 1 3"

    def keep_training() -> None:
        while True:
            train(model, 1)

    with logged("layerzero.watch.watchdog", logging.ERROR) as lines:
        message = error_of(keep_training)
        while not lines:  # The watchdog's thread logs after it has failed the model.
            time.sleep(0.01)
    return message, lines[0]


def test_gathers_of_equal_size_in_swapped_order_are_found() -> None:
    """Nothing hangs there: without the comparison two units would use each other's weights."""
    messages, lines = zip(*run_ranks(2, _swaps), strict=True)
    assert messages[0] == messages[1]
    assert all("rank 0 and rank 1 issued different collectives" in line for line in lines)
    assert "issued different collectives" in messages[0]
    assert "rank 0: all-gather of blocks.1" in messages[0]
    assert "rank 1: all-gather of blocks.2" in messages[0]


def _stays_away() -> str | None:
    model = wrapped(Mlp(3))
    train(model, 2)
    if dist.get_rank() == 1:
        return None
    return error_of(lambda: train(model, 1))


def test_a_silent_rank_is_named() -> None:
    message = run_ranks(2, _stays_away)[0]
    assert "all-gather of " in message
    assert "rank 0: waits for the group in all-gather of" in message
    assert "rank 1: no report" in message
    assert "within the timeout of 2 s" in message


def _raises_after_the_store_has_ended(folder: Path) -> float:
    """Seconds until a rank's own error came; rank 0 serves the store, and has the same a second
    before."""
    serve_store(0, folder)
    rank = dist.get_rank()

    def mistaken(*_: object) -> None:
        time.sleep(rank)
        raise ValueError("a mistake on every rank")

    model = ZeRO3(Mlp(3), auto_wrap_policy={Block}, timeout=TIMEOUT)
    train(model, 2)
    model.module.blocks[1].register_forward_pre_hook(mistaken)
    begun = time.monotonic()
    with pytest.raises(ValueError, match="a mistake on every rank"):
        train(model, 1)
    if rank == 0:
        os._exit(7)
    return time.monotonic() - begun


def test_an_error_is_not_held_back_where_the_store_has_ended(tmp_path: Path) -> None:
    found = run_ranks(2, _raises_after_the_store_has_ended, tmp_path, expect_exit={0: 7})
    assert found[1] < TIMEOUT.total_seconds() + GRACE_S


@on_ranks(2, fresh=True)
def test_pauses_between_collectives_and_two_models_are_no_alarm() -> None:
    torch.manual_seed(0)
    model = wrapped(Mlp(2), timeout=timedelta(seconds=1))
    other = wrapped(Mlp(2), timeout=timedelta(seconds=1))
    losses = train(model, 2) + train(other, 2)
    # Nothing to wait for, and then a gather that is there and that nobody asks about.
    time.sleep(1.6)
    handle = model.unshard(async_op=True)
    time.sleep(1.6)
    handle.wait()
    assert all(
        len(losses) == 8 for losses in of_all_ranks(losses + train(model, 2) + train(other, 2))
    )


def on_gloo(timeout: timedelta = TIMEOUT, **settings: Any) -> ZeRO3:
    if settings.get("zero3_size") is None:
        diagnosis.REPORT_SECONDS = 0.5  # Else a rank waits for reports of others than its peer.
    torch.manual_seed(0)
    return ZeRO3(Mlp(3), auto_wrap_policy={Block}, timeout=timeout, **settings)


def passes(model: ZeRO3, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.randn(3, WIDTH)).sum().backward()


def _exits() -> str | None:
    """The last rank exits in its third backward; then no optimizer steps on what that has left."""
    model = on_gloo(zero3_size=2)
    other = ZeRO3(nn.Linear(2, 2), dist.new_group([dist.get_rank()]))
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, other)]
    both = torch.optim.SGD([*other.parameters(), *model.parameters()], lr=1.0)
    passes(model, 2)
    other(torch.ones(2, 2)).sum().backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        loss = model(torch.randn(3, WIDTH)).sum()
        loss.register_hook(lambda _: os._exit(7))
        loss.backward()
    message = error_of(lambda: passes(model))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for optimizer in (optimizers[0], both):
        with pytest.raises(CollectiveError, match="an earlier collective") as caught:
            optimizer.step()
        assert message in str(caught.value)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    optimizers[1].step()  # Of a model that goes on.
    return message


def test_a_rank_that_exits_is_named_across_shard_groups_and_no_optimizer_steps() -> None:
    """Rank 0 shares no group with rank 3: it waits for others that wait for it."""
    for message in run_ranks(4, _exits, expect_exit={3: 7})[:3]:
        assert "rank 3: no report" in message, message
        assert "Look at the ranks without a report first" in message


def _waits_for_one_that_left(folder: str) -> str | None:
    """Each other rank shares a model with the last one, which is done early; its process lives on
    until the others end."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    groups = [dist.new_group([each, last]) for each in range(last)]
    for each, group in enumerate(groups):
        dist.barrier()  # Else the second waits while the last one is with the first.
        if rank in (each, last):
            model = on_gloo(process_group=group)
            passes(model)
    if rank == 0:
        first = error_of(lambda: passes(model))
        start = time.monotonic()
        again = error_of(lambda: passes(model))
        assert time.monotonic() - start < 1.0, "it does not wait a second time"
        assert first in again
        assert "restart the ranks" in again
        return first
    if rank == 1:
        return error_of(lambda: model.clip_grad_norm_(1.0))
    return None if rank == last else error_of(lambda: checkpoint.save(folder, model))


def test_a_rank_that_finished_early_is_named_and_a_later_use_repeats_it(tmp_path: Path) -> None:
    trains, clips, saves, _ = run_ranks(4, _waits_for_one_that_left, str(tmp_path))
    assert "rank 3: no report" in trains
    assert "Look at the ranks without a report first" in trains
    assert "gradient norm" in clips, "a small collective has the timeout, too"
    assert "exchange of the ranks that save or load together" in saves
    assert "every rank must, also to save or load (not under `if rank == 0:`)" in saves


# Ranks that part on gloo are told at once, long before the timeout; slow ones are left alone ------


PARTING_TIMEOUT = timedelta(seconds=55)
at_once = partial(error_in_time, within_s=20.0)
"""Far below the timeout, and far above the second or so that it takes on a quiet machine."""


class Summed(Chain):
    """With a head and pauses; the sum of what the first blocks, and the head, return."""

    used, pause_s = 1, 0.0

    def __init__(self) -> None:
        super().__init__(4)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for index in self.route.split():
            time.sleep(self.pause_s)
            x = self.blocks[int(index)](x)
            outputs.append(x.sum())
        return torch.stack([*outputs[: self.used], self.last(x).sum()]).sum()


def summed(group: dist.ProcessGroup | None = None, **options: Any) -> ZeRO3:
    desync.LONGEST_PAUSE_S = 0.1
    torch.manual_seed(0)
    options |= {"auto_wrap_policy": lambda part, fqn: isinstance(part, Block) or fqn == "last"}
    return ZeRO3(Summed(), group, timeout=PARTING_TIMEOUT, **options)


def _part() -> dict[str, str]:
    """Each case on a group of its own: a failure leaves the connections of a group unusable."""
    is_other = dist.get_rank() == 1

    def goes(route: str, steps: int) -> Callable[[dist.ProcessGroup], str]:
        def case(group: dist.ProcessGroup) -> str:
            model = summed(group)
            train(model, steps)
            if is_other:
                model.module.route = route
            return at_once(lambda: train(model, 2))

        return case

    def parts_in_backward(group: dist.ProcessGroup) -> str:
        model = summed(group)
        model.module.used = 0
        model.module.route = "0"
        if is_other:
            model.module.last.weight.requires_grad_()
            return at_once(lambda: train(model, 3))

        def without_last() -> None:
            for _ in range(3):
                hidden = []
                handle = model.module.blocks[0].register_forward_hook(
                    lambda module, args, output, hidden=hidden: hidden.append(output)
                )
                model(torch.randn(3, WIDTH))
                handle.remove()
                hidden[0].sum().backward()

        return at_once(without_last)

    def clips_alone(group: dist.ProcessGroup) -> str:
        model = summed(group)
        train(model, 1)
        if is_other:
            return at_once(lambda: model.clip_grad_norm_(1.0))
        return at_once(lambda: train(model, 1))

    cases = {
        "first forward": goes("1", 0),
        "later step": goes("0 1 3", 2),
        "swapped": goes("0 2 1 3", 2),
        "repeated": goes("0 1 2 1 3", 1),
        "backward": parts_in_backward,
        "clipping": clips_alone,
    }
    messages = {}
    for name, case in cases.items():
        group = dist.new_group(timeout=PARTING_TIMEOUT)
        try:
            messages[name] = case(group)
        except BaseException as error:
            raise AssertionError(name) from error
        # A rank that is ahead would break the next group's connections.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{name}/{dist.get_rank()}", "")
        store.wait([f"{name}/{rank}" for rank in range(2)])
    return messages


def test_ranks_that_diverge_fail_at_once() -> None:
    first, second = run_ranks(2, _part)
    for name, message in first.items():
        # One finds out, and both say the same.
        verdict = message.partition("(the ranks took ")[2].partition(").\n")[0]
        assert "rank 0" in verdict and "rank 1" in verdict, (name, message)
        assert verdict in second[name], (name, second[name])
        assert "rank 0 got no answer from rank 1" in message
        assert "Every rank must call the same units in the same order" in message
    ways = "rank 0 issued all-gather of blocks.0, rank 1 issued all-gather of blocks.1"
    assert f"at operation #1 of this model {ways}" in first["first forward"]
    assert "gradient norm of the model" in first["clipping"]


@on_ranks(4, fresh=True)
def test_all_ranks_of_layered_groups_report_the_two_that_diverged() -> None:
    model = summed(zero3_size=2)
    train(model, 2)
    if dist.get_rank() == 3:
        model.module.pause_s = 0.3  # that alone is no alarm
    train(model, 1)
    if dist.get_rank() == 3:
        model.module.route = "0 2 3"
    message = at_once(lambda: train(model, 2))
    # Ranks 1 and 2 both have a group with rank 3, which left the common path.
    assert re.search(r"took different paths: .* rank [12] issued .*, rank 3 issued ", message)


@on_ranks(2, fresh=True)
def test_what_one_rank_froze_alone_is_no_other_path() -> None:
    model = summed()
    train(model, 1)
    if dist.get_rank() == 1:
        model.module.last.bias.requires_grad_(False)
    message = at_once(lambda: train(model, 1))
    assert "(the ranks' models or requires_grad differ: rank " in message, message
    assert "different operations" not in message, message


def _pauses() -> int:
    models, checks = [summed(), summed()], []
    find_out = desync.DesyncDetector._find_out
    desync.DesyncDetector._find_out = lambda self, long: (checks.append(1), find_out(self, long))[1]
    for pause_s in (0.0, 0.3):
        for place, model in enumerate(models):
            model.module.pause_s = pause_s * (dist.get_rank() != place)
        assert_bitwise(*(train(model, 1)[0] for model in models))
    return len(checks)


def test_a_slow_rank_and_two_models_are_no_alarm() -> None:
    assert all(run_ranks(2, _pauses)), "no thread compared: pauses are too short to prove anything"


def _waits_beside_torch(folder: Path) -> None:
    """Rank 0 waits in a call of the model, rank 1 in one of torch; then as a launcher does it."""
    model = summed()
    if dist.get_rank() == 0:
        logging.getLogger("layerzero").addHandler(logging.FileHandler(folder / "log"))
        (folder / "pid").write_text(str(os.getpid()))
        with model.timeout(seconds=1):
            model.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="closed"):
        dist.all_reduce(torch.ones(1))
    time.sleep(0.5)  # The first process of a job has failed; the launcher notices it.
    os.kill(int((folder / "pid").read_text()), signal.SIGTERM)


def test_a_rank_that_a_launcher_ends_has_logged_what_it_waited_for(tmp_path: Path) -> None:
    run_ranks(2, _waits_beside_torch, tmp_path, expect_exit={0: -signal.SIGTERM})
    lines = (tmp_path / "log").read_text().splitlines()
    first = next(line for line in lines if "got no answer" in line)
    assert re.match(r"gradient norm of the model \(#\d+\): rank 0 got no answer from rank 1", first)
    assert "nothing arrived within the timeout of 1 s" in first


def _fails_beside(store_path: Path, is_second: bool) -> str | None:
    """Rank 1 leaves a report in the first run, and none in the second."""
    store = dist.FileStore(str(store_path), -1)
    dist.distributed_c10d._get_default_store = lambda: dist.PrefixStore("run", store)
    torch.manual_seed(0)
    model = ZeRO3(nn.Linear(4, 4), timeout=timedelta(seconds=2))
    if dist.get_rank() == 1 and is_second:
        os._exit(7)
    if dist.get_rank() == 1:
        with pytest.raises(CollectiveError):
            model.clip_grad_norm_(1.0)
        os._exit(7)
    with pytest.raises(CollectiveError) as caught:
        model(torch.ones(1, 4))
    assert len(diagnosis.run_names) == 1
    return str(caught.value)


def test_no_report_of_the_run_before_is_shown(tmp_path: Path) -> None:
    """A launcher that starts the ranks again may keep the store."""
    first = run_ranks(2, _fails_beside, tmp_path / "store", False, expect_exit={1: 7})[0]
    assert "rank 1: waits for rank 0 in gradient norm of the model" in first
    second = run_ranks(2, _fails_beside, tmp_path / "store", True, expect_exit={1: 7})[0]
    assert "rank 1: no report" in second, second


# A slow rank is not a dead one: a warning at half of the limit, and phases that wait longer -------


LIMIT_S = TIMEOUT.total_seconds()
LONGER_S = 2.6
"""A pause of a rank that is an error outside `model.timeout`."""


def pause(rank: int, seconds: float) -> None:
    if dist.get_rank() == rank:
        time.sleep(seconds)


warnings_logged = functools.partial(logged, diagnosis.__name__, logging.WARNING)


def limits(model: ZeRO3) -> set[float]:
    operations = root_state(model).operations
    return {group.limit.total_seconds() for group in operations.phases._groups.values()}


WARNED_LIMIT = timedelta(seconds=4)
"""The timeout where a pause lasts until the warning: the rest of it is for a busy machine."""


def _is_slow(kind: str) -> list[list[str]]:
    """Messages of a step in which the second rank comes once the first has warned of it, and of one
    in which it is late."""
    model = on_gloo(WARNED_LIMIT) if kind == "gloo" else wrapped(Mlp(2), WARNED_LIMIT)
    store = dist.distributed_c10d._get_default_store()
    passes(model)
    with warnings_logged() as messages:
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda _: store.set("warned", "")
        logging.getLogger(diagnosis.__name__).addHandler(handler)
        if dist.get_rank() == 1:
            store.wait(["warned"])
        passes(model)
    with warnings_logged() as later:
        pause(1, 0.4)
        passes(model)
    return [messages, later]


@pytest.mark.parametrize("kind", ["gloo", "plain"])
def test_a_slow_rank_is_warned_of_once_and_the_run_goes_on(kind: str) -> None:
    first, second = run_ranks(2, _is_slow, kind)
    ((message,), later) = first
    assert "all-gather of the root unit" in message, message
    assert "rank 0 has waited" in message
    assert "s for rank 1; after 4 s this is an error" in message
    assert not later and second == [[], []]


def _phases(kind: str, folder: Path) -> str | None:
    model = wrapped(Mlp(2)) if kind.startswith("plain") else on_gloo()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    passes(model)
    # Nested, with exceptions, out of order; equal limits afterwards.
    given = limits(model)
    assert LIMIT_S in given
    with model.timeout(minutes=1):
        assert limits(model) == {60.0}
        with pytest.raises(KeyError), model.timeout(minutes=1, seconds=30):
            assert limits(model) == {90.0}
            raise KeyError
        assert limits(model) == {60.0}
    assert limits(model) == given
    first, last = ExitStack(), ExitStack()
    first.enter_context(model.timeout(seconds=50))
    last.enter_context(model.timeout(seconds=40))
    first.close()
    assert limits(model) == {40.0}
    last.close()
    assert limits(model) == given
    # Longer waits pass, of whatever kind.
    with model.timeout(seconds=40):
        pause(1, LONGER_S)
        passes(model)
    if kind.endswith("briefly"):
        return None
    with model.timeout(seconds=40):
        pause(1, LONGER_S)
        checkpoint.save(folder, model, optimizer)
    assert limits(model) == given
    # Only the rank that waits has to be in it.
    if dist.get_rank() == 0:
        with model.timeout(seconds=40):
            passes(model)
    else:
        time.sleep(LONGER_S)
        passes(model)
    # And outside it is an error, in time.
    if dist.get_rank() == 1:
        return None  # Its process lives on until the other ends.
    return error_in_time(lambda: passes(model), LIMIT_S + 7.0)


@pytest.mark.parametrize("kind", ["gloo, briefly", pytest.param("plain", marks=pytest.mark.slow)])
def test_a_longer_pause_passes_in_a_phase_and_is_an_error_outside(
    kind: str, tmp_path: Path
) -> None:
    message = run_ranks(2, _phases, kind, tmp_path)[0]
    if not kind.endswith("briefly"):
        assert "rank 0" in message and "within the timeout of 2 s" in message


@on_ranks(2)
def test_bad_phases_are_refused_and_backends_keep_their_timeouts() -> None:
    model = on_gloo()
    for keywords, error in (
        ({}, ValueError),
        ({"seconds": 0}, ValueError),
        ({"minutes": -1}, ValueError),
        ({"days": 10**12}, OverflowError),
        ({"days": 999_999_999}, ValueError),
        ({"seconds": float("nan")}, ValueError),
        ({"years": 1}, TypeError),
        ({"minutes": "30"}, TypeError),
    ):
        with pytest.raises(error):
            model.timeout(**keywords)

    def enter(*_: object) -> None:
        with (
            pytest.raises(RuntimeError, match="inside forward or backward"),
            model.timeout(seconds=5),
        ):
            pass

    handle = model.module.blocks[0].register_forward_pre_hook(enter)
    out = model(torch.ones(2, WIDTH))
    handle.remove()
    out.register_hook(enter)
    out.sum().backward()
    with model.summon_full_params(), model.timeout(seconds=5):
        assert limits(model) == {5.0}
    # A backend's own timeout is raised for the phase only, and never lowered.
    group = make_plain_group(timedelta(seconds=30))
    other = on_gloo(process_group=group)
    own = group._get_backend(torch.device("cpu")).options
    with other.timeout(minutes=2):
        assert own._timeout >= timedelta(minutes=2)
        passes(other)
    assert own._timeout == timedelta(seconds=30)
    with other.timeout(seconds=1):
        assert own._timeout == timedelta(seconds=30)
    assert {LIMIT_S} == limits(other) and model is not other


@on_ranks(2)
def test_a_phase_covers_all_groups_of_the_model() -> None:
    """Layered groups and nested wrappers: all groups of the model, and it matters."""
    for options in (
        {"zero3_size": 1},
        {"zero3_size": 1, "outer": "replicate"},
        {"zero3_size": 1, "outer": "shard", "deterministic": True},
    ):
        model = on_gloo(**options)
        with model.timeout(seconds=20):
            assert limits(model) == {20.0}
            passes(model)
        assert limits(model) == {LIMIT_S}
    module = Mlp(2)
    module.blocks[0] = ZeRO3(module.blocks[0], timeout=timedelta(seconds=7))
    model = ZeRO3(module, timeout=timedelta(seconds=LIMIT_S))
    with model.module.blocks[0].timeout(seconds=20):
        assert limits(model) == {20.0}, "of the whole model"
    assert limits(model) == {LIMIT_S, 7.0}
