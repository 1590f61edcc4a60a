"""JoinedBackward: a rank can take part in a backward that it does not run."""

from __future__ import annotations

from typing import Protocol, cast

from layerzero.step.backward import Backward
from layerzero.step.calls import BackwardPass, ForwardPass
from layerzero.step.exec_order import Order


class _Root(Protocol):
    def come_to_backward(self, order: Order) -> None: ...


class JoinedBackward(Backward):
    def _backward_pass(self, graph_task: int, order: Order) -> BackwardPass:
        self.clear_abandoned()
        if not self._passes and not self._scheduler.recorder.is_recording:
            root = cast(_Root, self._context.owner())
            root.come_to_backward(order)
        return super()._backward_pass(graph_task, order)

    def shadow(self, forward_pass: ForwardPass) -> None:
        """Take part in a backward, through a forward that this rank may not have run."""
        ended = BackwardPass(graph_task=-1, makes_graph=False, is_recorded=True)
        ended.forwards[forward_pass] = None
        self._reducer.begin_backward()
        self._scheduler.recorder.begin(("backward", forward_pass.order))
        self._passes.append(ended)
        self._context.set_in_backward(True)
        self._end_backward(ended)
