"""Units used outside their calls, and forwards that run while their results are consumed
(generators, `map`, `filter`, `zip`): no plain step needs these."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState
from layerzero.step.unit import Hold, Unit


@remembers_failure
def keep_returned(root: RootState, unit: Unit) -> None:
    """A call of `unit` returned one of its parameters: keep it as if unsharded explicitly."""
    keep(unit)
    unit.wait_for_unshard()


def keep(unit: Unit) -> None:
    """Unshard a unit whose parameters may be used outside its calls, and hold it."""
    unit.unshard()
    unit.hold(int(Hold.EXPLICIT))
    unit.watch_gradients()


def step_by_step(call: Callable[..., Any], lazy: Any) -> Generator[Any, Any, Any]:
    """Run each step of `lazy` by `call`, which takes a function and its arguments."""
    sent, has_ended = None, False

    def advance(sent: Any) -> Any:
        nonlocal has_ended
        try:
            return next(lazy) if sent is None else lazy.send(sent)
        except StopIteration as stop:
            has_ended = True
            return stop.value

    while True:
        value = call(advance, (sent,))
        if has_ended:
            return value
        sent = yield value
