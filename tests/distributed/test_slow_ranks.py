"""A slow rank is not a dead one: a warning at half of the limit, and phases that wait longer."""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from layerzero import CollectiveError, ZeRO3, checkpoint
from layerzero.flat import groups
from layerzero.watch import slow_waits
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
    groups.BACKEND_GRACE = timedelta(seconds=3)
    group = make_plain_group(timedelta(seconds=limit_s) + groups.BACKEND_GRACE)
    return wrapped(limit_s, process_group=group)


def step(model: ZeRO3) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()


def pause(rank: int, seconds: float) -> None:
    if dist.get_rank() == rank:
        time.sleep(seconds)


warnings_logged = functools.partial(logged, slow_waits.__name__, logging.WARNING)


def limits(model: ZeRO3) -> set[float]:
    operations = root_state(model).operations
    return {group.limit.total_seconds() for group in operations.phases._groups.values()}


WARNED_LIMIT_S = 4.0
"""The timeout where a pause lasts until the warning: the rest of it is for a busy machine."""


@contextmanager
def _key_at_first_warning(key: str) -> Iterator[None]:
    """Inside, the store has the key from the first warning on."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda _: store().set(key, "")
    logger = logging.getLogger(slow_waits.__name__)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _is_slow(kind: str, folder: Path) -> list[list[str]]:
    wrap = wrapped_on_plain if kind.startswith("plain") else wrapped
    model = wrap(WARNED_LIMIT_S)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    found = []

    def caught(run: Callable[[], object]) -> None:
        """The second rank comes once the first has warned of it."""
        key = f"warning {len(found)}"
        with warnings_logged() as messages, _key_at_first_warning(key):
            if dist.get_rank() == 1:
                store().wait([key])
            run()
        found.append(messages)

    caught(lambda: step(model))
    if kind == "gloo":
        caught(lambda: checkpoint.save(folder, model, optimizer))
    if kind == "gloo, more":
        caught(lambda: model.clip_grad_norm_(1.0))
        caught(lambda: wrapped(WARNED_LIMIT_S))
    with warnings_logged() as messages:
        pause(1, 0.4)
        step(model)
    found.append(messages)
    return found


@pytest.mark.parametrize(
    "kind", ["gloo", "plain", pytest.param("gloo, more", marks=pytest.mark.slow)]
)
def test_a_slow_rank_is_warned_of_once_a_wait_and_the_run_goes_on(
    kind: str, tmp_path: Path
) -> None:
    first, second = run_ranks(2, _is_slow, kind, tmp_path)
    names = ["all-gather of the root unit"]
    names += {"gloo": ["exchange of"], "plain": []}.get(kind, ["gradient norm", "exchange of"])
    for index, name in enumerate(names):
        (message,) = first[index]
        assert name in message, message
        assert "rank 0 has waited" in message
        assert f"s for rank 1; after {WARNED_LIMIT_S:g} s this is an error" in message
        assert not second[index]
    assert not first[-1] and not second[-1]


def _two_slow_ranks() -> list[str]:
    model = wrapped()
    step(model)
    with warnings_logged() as messages:
        pause(2, 0.8 * LIMIT_S)
        pause(1, 1.5 * LIMIT_S)  # Rank 0 waits for it second.
        step(model)
    return messages


@pytest.mark.slow
def test_each_peer_waited_for_is_named() -> None:
    messages = run_ranks(3, _two_slow_ranks)[0]
    assert [text for text in messages if "for rank 1;" in text]
    assert [text for text in messages if "for rank 2;" in text]
    assert len(messages) == 2


@pytest.mark.slow
@on_ranks(2)
def test_no_thread_stays_without_waits() -> None:
    """The thread of the waits that belong to no model ends when they do."""

    def waits() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "layerzero-waits"]

    wrapped()
    (thread,) = waits()
    thread.join(5.0)
    assert not waits()
    wrapped()
    assert waits()


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
        pause(0, LONGER_S)
        model.clip_grad_norm_(1.0)
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
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        step(model)
    assert time.monotonic() - start < LIMIT_S + 7.0
    return str(caught.value)


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


def _checkpoint_outside(folder: Path) -> str | None:
    model = wrapped()
    if dist.get_rank() == 1:
        return None  # Its process lives on until the other ends.
    with pytest.raises(CollectiveError) as caught:
        checkpoint.save(folder, model)
    return str(caught.value)


@pytest.mark.slow
def test_a_checkpoint_outside_a_phase_has_the_models_timeout(tmp_path: Path) -> None:
    assert "rank 1" in run_ranks(2, _checkpoint_outside, tmp_path)[0]


@on_ranks(2)
def test_bad_phases_are_refused_and_backends_keep_their_timeouts() -> None:
    model = wrapped()
    for keywords, error in (
        ({}, ValueError),
        ({"seconds": 0}, ValueError),
        ({"minutes": -1}, ValueError),
        ({"days": 10**12}, ValueError),
        ({"days": 999_999_999}, ValueError),
        ({"seconds": float("nan")}, ValueError),
        ({"years": 1}, TypeError),
        ({"minutes": "30"}, TypeError),
    ):
        with pytest.raises(error, match="timeout: "):
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
