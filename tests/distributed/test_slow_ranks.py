"""A slow rank is not a dead one: a warning at half of the limit, and phases that wait longer."""

import functools
import logging
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from layerzero import ZeRO3, checkpoint
from layerzero.flat import groups
from layerzero.watch import diagnosis
from tests.harness.checks import error_in_time
from tests.harness.internals import root_state
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import on_ranks, run_ranks
from tests.harness.recording import logged

LIMIT_S = 2.0
"""The timeout of the models here."""
LONGER_S = 2.6
"""A pause of a rank that is an error outside `model.timeout`."""


def wrapped(limit_s: float = LIMIT_S, **options: object) -> ZeRO3:
    torch.manual_seed(0)
    timeout = timedelta(seconds=limit_s)
    return ZeRO3(Mlp(2), auto_wrap_policy={Block}, timeout=timeout, **options)


def wrapped_on_plain(limit_s: float = LIMIT_S) -> ZeRO3:
    # Gloo cannot be aborted, so a rank blocked in it comes back when gloo itself gives up.
    groups.BACKEND_GRACE, diagnosis.REPORT_SECONDS = timedelta(seconds=3), 0.5
    group = make_plain_group(timedelta(seconds=limit_s) + groups.BACKEND_GRACE)
    return wrapped(limit_s, process_group=group)


def step(model: ZeRO3) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()


def pause(rank: int, seconds: float) -> None:
    if dist.get_rank() == rank:
        time.sleep(seconds)


warnings_logged = functools.partial(logged, diagnosis.__name__, logging.WARNING)


def limits(model: ZeRO3) -> set[float]:
    operations = root_state(model).operations
    return {group.limit.total_seconds() for group in operations.phases._groups.values()}


WARNED_LIMIT_S = 4.0
"""The timeout where a pause lasts until the warning: the rest of it is for a busy machine."""


def _is_slow(kind: str) -> list[list[str]]:
    """Messages of a step in which the second rank comes once the first has warned of it, and of one
    in which it is late."""
    model = (wrapped if kind == "gloo" else wrapped_on_plain)(WARNED_LIMIT_S)
    store = dist.distributed_c10d._get_default_store()
    step(model)
    with warnings_logged() as messages:
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda _: store.set("warned", "")
        logging.getLogger(diagnosis.__name__).addHandler(handler)
        if dist.get_rank() == 1:
            store.wait(["warned"])
        step(model)
    with warnings_logged() as later:
        pause(1, 0.4)
        step(model)
    return [messages, later]


@pytest.mark.parametrize("kind", ["gloo", "plain"])
def test_a_slow_rank_is_warned_of_once_and_the_run_goes_on(kind: str) -> None:
    first, second = run_ranks(2, _is_slow, kind)
    ((message,), later) = first
    assert "all-gather of the root unit" in message, message
    assert "rank 0 has waited" in message
    assert f"s for rank 1; after {WARNED_LIMIT_S:g} s this is an error" in message
    assert not later and second == [[], []]


def _phases(kind: str, folder: Path) -> str | None:
    model = wrapped_on_plain() if kind.startswith("plain") else wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
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
        step(model)
    if kind.endswith("briefly"):
        return None
    with model.timeout(seconds=40):
        pause(1, LONGER_S)
        checkpoint.save(folder, model, optimizer)
    assert limits(model) == given
    # Only the rank that waits has to be in it.
    if dist.get_rank() == 0:
        with model.timeout(seconds=40):
            step(model)
    else:
        time.sleep(LONGER_S)
        step(model)
    # And outside it is an error, in time.
    if dist.get_rank() == 1:
        return None  # Its process lives on until the other ends.
    return error_in_time(lambda: step(model), LIMIT_S + 7.0)


@pytest.mark.parametrize(
    "kind",
    [
        "gloo, briefly",
        pytest.param("plain", marks=pytest.mark.slow),
    ],
)
def test_a_longer_pause_passes_in_a_phase_and_is_an_error_outside(
    kind: str, tmp_path: Path
) -> None:
    message = run_ranks(2, _phases, kind, tmp_path)[0]
    if not kind.endswith("briefly"):
        assert "rank 0" in message and "within the timeout of 2 s" in message


@on_ranks(2)
def test_bad_phases_are_refused_and_backends_keep_their_timeouts() -> None:
    model = wrapped()
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
    other = wrapped(process_group=group)
    own = group._get_backend(torch.device("cpu")).options
    with other.timeout(minutes=2):
        assert own._timeout >= timedelta(minutes=2)
        step(other)
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
        model = wrapped(**options)
        with model.timeout(seconds=20):
            assert limits(model) == {20.0}
            step(model)
        assert limits(model) == {LIMIT_S}
    module = Mlp(2)
    module.blocks[0] = ZeRO3(module.blocks[0], timeout=timedelta(seconds=7))
    model = ZeRO3(module, timeout=timedelta(seconds=LIMIT_S))
    with model.module.blocks[0].timeout(seconds=20):
        assert limits(model) == {20.0}, "of the whole model"
    assert limits(model) == {LIMIT_S, 7.0}
