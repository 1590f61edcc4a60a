"""What `layerzero.join` costs: exchanges and bytes of one step, counted, and waits for a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import layerzero
from layerzero import ZeRO3
from layerzero.optional.exchange import Exchange
from tests.harness.internals import inner_units
from tests.harness.models import Block, Mlp
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import run_ranks
from tests.harness.simulated_device import simulated_device
from tests.harness.traffic import SentBytes

TIMEOUT = timedelta(seconds=20)
STEPS = (7, 3)
"""Of each rank: the second one is out after step 2."""


class Exchanges:
    """Counts exchanges, and the bytes that this rank gives to them."""

    def __init__(self) -> None:
        self.count = 0
        self.nbytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        call = Exchange.__call__

        def counting(exchange: Exchange, row: Sequence[int]) -> list[list[int]]:
            self.count += 1
            self.nbytes += 8 * len(row)
            return call(exchange, row)

        Exchange.__call__ = counting  # type: ignore[method-assign]
        try:
            yield
        finally:
            Exchange.__call__ = call  # type: ignore[method-assign]


def _made(**settings: Any) -> tuple[ZeRO3, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ZeRO3(Mlp(), auto_wrap_policy={Block}, timeout=TIMEOUT, **settings)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _batch(step: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def _calls(
    model: ZeRO3, optimizer: torch.optim.Optimizer, step: int
) -> list[tuple[str, Callable[[], Any]]]:
    """The calls of one step, in order."""
    losses: list[torch.Tensor] = []
    return [
        ("forward", lambda: losses.append(model(_batch(step)).square().mean())),
        ("backward", lambda: losses[0].backward()),
        ("clip", lambda: model.clip_grad_norm_(1.0)),
        ("step", optimizer.step),
        ("zero_grad", optimizer.zero_grad),
    ]


def _exchanges_of_each_call() -> None:
    model, optimizer = _made()
    found = Exchanges()
    counts: list[Counter[str]] = []
    num_units = len(inner_units(model))
    with found.counted(), layerzero.join(model, optimizer):
        for step in range(STEPS[dist.get_rank()]):
            counts.append(Counter())
            for name, call in _calls(model, optimizer, step):
                before = found.count
                call()
                counts[-1][name] += found.count - before
        if dist.get_rank() == 1:
            found.count = 0
    together = {"forward": 1, "backward": 1, "clip": 1, "step": 1, "zero_grad": 0}
    # Before each gather and reduction, and at the end; in backward also which gradients exist.
    followed = {"forward": num_units + 2, "backward": 2 * num_units - 1 + 3}
    for step, count in enumerate(counts):
        expected = together if step < STEPS[1] else {**together, **followed}
        assert count == expected, f"step {step}: {count}"
    if dist.get_rank() == 1:
        num_shadowed = STEPS[0] - STEPS[1]
        # One finds that the other rank is out, too, and one ends the join.
        assert found.count == (sum(followed.values()) + 2) * num_shadowed + 2


def _bytes_of_a_step() -> None:
    """A step sends what it does outside of a join, and the exchanges' integers."""
    sent: dict[str, list[int]] = {}
    for name in ("plain", "joined"):
        model, optimizer = _made()
        exchanges = Exchanges()
        steps = sent.setdefault(name, [])
        is_joined = name == "joined"
        with (
            exchanges.counted(),
            SentBytes() as counter,
            layerzero.join(model, optimizer) if is_joined else nullcontext(),
        ):
            for step in range(STEPS[0] if is_joined and dist.get_rank() == 0 else STEPS[1]):
                before = counter.nbytes - exchanges.nbytes
                for _, call in _calls(model, optimizer, step):
                    call()
                steps.append(counter.nbytes - exchanges.nbytes - before)
            before = counter.nbytes - exchanges.nbytes
        if is_joined and dist.get_rank() == 1:
            steps += [(counter.nbytes - exchanges.nbytes - before) // (STEPS[0] - STEPS[1])]
    presence = sum(1 for parameter in model.parameters() if parameter.requires_grad)
    together, followed = sent["joined"][: STEPS[1]], sent["joined"][STEPS[1] :]
    assert together == sent["plain"], sent
    assert followed == [sent["plain"][-1] - presence] * len(followed), (sent, presence)


def _counts() -> None:
    _exchanges_of_each_call()
    _bytes_of_a_step()


def test_a_step_has_four_exchanges_and_more_once_ranks_follow() -> None:
    run_ranks(2, _counts, timeout=60)


def _waits_of_steps() -> None:
    """A join adds no wait for the device, and no access that is not ordered."""
    waits: dict[str, set[str]] = {}
    for joins in (False, True):
        with simulated_device(on_current_stream=joins) as device:
            model, optimizer = _made(process_group=make_plain_group(TIMEOUT))
            own = waits.setdefault("joined" if joins else "plain", set())
            with layerzero.join(model, optimizer) if joins else nullcontext():
                for step in range(STEPS[dist.get_rank()] if joins else STEPS[1]):
                    device.host_waits.clear()
                    for _, call in _calls(model, optimizer, step):
                        call()
                    if step:
                        own.update(map(str, device.host_waits))
                device.host_waits.clear()
            own.update(map(str, device.host_waits))
            assert device.findings == [], device.findings
    assert waits["joined"] <= waits["plain"], waits


def test_a_device_is_not_waited_for() -> None:
    run_ranks(2, _waits_of_steps, timeout=60)
