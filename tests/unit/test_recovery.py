"""What other threads see of a message while it is waited for."""

from __future__ import annotations

import functools
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import torch

from layerzero.comm.pending import Operation, Pending


class _Looked(set[Pending]):
    """Messages in flight; what the lookout's thread sees before one leaves, and after."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, int]] = []

    def discard(self, message: Pending) -> None:
        self.seen.append((message.is_posted, len(message.sizes)))
        super().discard(message)


def test_a_message_in_flight_counts_as_posted_until_it_has_left_and_after() -> None:
    in_flight = _Looked()
    lookout = SimpleNamespace(
        waiting=set(),
        begin_wait=lambda _: None,
        recovery=SimpleNamespace(in_flight=in_flight, reason=None),
    )
    limit = timedelta(seconds=1)
    group = SimpleNamespace(rank=0, size=2, ranks=(0, 1), backend="gloo", limit=limit)
    operation = Operation("all-gather", "unit", 1, None, cast("Any", lookout), 0)
    pending = Pending(operation, cast("Any", group))
    in_flight.add(pending)
    assert not pending.is_posted
    work, part = SimpleNamespace(wait=lambda *_: True), torch.zeros(2)
    post = functools.partial(lambda: cast("Any", work))
    pending.post([post], [1], [True], [([part] * 2, [part] * 2)])
    pending.wait()
    assert in_flight.seen == [(True, 2)]
    assert pending.is_posted and not pending.sizes and not in_flight
