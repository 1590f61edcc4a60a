"""Programs that train with CUDA graphs, for the simulated device: each eager or captured.

A program is called with a model and `wrap`, which is `layerzero.capture`, makes an `OwnGraph`, or
leaves a step as it is, and the number of steps. It returns what is compared: losses of all steps,
and whatever else it reads.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from layerzero import ZeRO3, units
from layerzero.optim import AdamW
from tests.harness.models import WIDTH

Wrap = Callable[..., Callable[..., Any]]
Program = Callable[[ZeRO3, Wrap, int], list[Tensor]]
SAMPLE = torch.zeros(3, WIDTH)
CPU = torch.device("cpu")
"""The model's device, to the simulation; "cpu" as text, or none, is the host."""


MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
NATIVE = functools.partial(AdamW, lr=0.01)


class OwnGraph:
    """A step in a graph that the program makes, by torch's recipe: three calls on a side stream,
    then `torch.cuda.graph`; inputs and outputs keep their memory."""

    def __init__(
        self, module: Any, device: torch.device, step: Callable[..., Any], *sample: Any
    ) -> None:
        """`module`: `torch.cuda`, or what stands for it."""
        self.num_replays = 0
        self._module, self._device, self._step = module, device, step
        self._inputs = tree_map_only(Tensor, Tensor.clone, sample)
        self._num_calls = 0
        self._side = module.Stream(device)
        self._graph: Any = None

    def __call__(self, *args: Any) -> Any:
        pairs = [*zip(self._inputs, args, strict=True)]
        if any(isinstance(own, Tensor) and own.shape != given.shape for own, given in pairs):
            return self._step(*args)
        current = self._module.current_stream(self._device)
        self.order_warm_up()
        self._num_calls += 1
        if self._num_calls <= 3:
            with self._module.stream(self._side):
                self._outputs = self._step(*args)
            current.wait_stream(self._side)
        else:
            if self._graph is None:
                graph = self._module.CUDAGraph()
                with self._module.graph(graph):
                    self._outputs = self._step(*self._inputs)
                self._graph = graph
            for own, given in pairs:
                if isinstance(own, Tensor):
                    own.copy_(given)
            self._graph.replay()
            self.num_replays += 1
        return tree_map_only(Tensor, lambda each: each.detach().clone(), self._outputs)

    def order_warm_up(self) -> None:
        """Order the side stream after all uses of what it has made, which may be freed next."""
        self._side.wait_stream(self._module.current_stream(self._device))


def _batch(rows: int = 3) -> Tensor:
    return torch.randn(rows, WIDTH)


def _backward(model: ZeRO3, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def _step_of(
    model: ZeRO3, optimizer: torch.optim.Optimizer, then: Callable[[], object] = lambda: None
) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = _backward(model, x)
        optimizer.step()
        then()
        optimizer.zero_grad()
        return loss

    return step


def _waiting(model: ZeRO3) -> Tensor:
    """What a forward returned, whose backward is to come."""
    output = model(_batch()).sum()
    for unit in units(model):
        unit.reshard()  # The last one, which waits for the backward.
    return output


def _train(
    model: ZeRO3,
    wrap: Wrap,
    steps: int,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], Tensor] | None = None,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> list[Tensor]:
    """Losses, and norms where it clips."""

    def step(x: Tensor) -> dict[str, Tensor]:
        loss = _backward(model, x)
        norms = {} if clip is None else {"norm": clip()}
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, **norms}

    train = wrap(step, SAMPLE)
    found: list[Tensor] = []
    for _ in range(steps):
        found += train(_batch()).values()
        if schedule is not None:
            schedule.step()
    return found


def sgd_with_clipping(model: ZeRO3, wrap: Wrap, steps: int) -> list[Tensor]:
    """torch's norm clips, momentum has state, and a scheduler sets the rate of each step."""
    optimizer = MOMENTUM(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    clip = functools.partial(torch.nn.utils.clip_grad_norm_, [*model.parameters()], 0.1)
    return _train(model, wrap, steps, optimizer, clip, schedule)


def native_adamw(model: ZeRO3, wrap: Wrap, steps: int) -> list[Tensor]:
    """It clips in the pass of its step."""
    optimizer = NATIVE(model.parameters())
    return _train(model, wrap, steps, optimizer, lambda: optimizer.clip_grad_norm_(0.05))


def capturable_adamw(model: ZeRO3, wrap: Wrap, steps: int) -> list[Tensor]:
    """It is inside the graph, and its rate is a tensor that a scheduler writes."""
    rate = torch.full((), 0.01, device=CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    clip = functools.partial(model.clip_grad_norm_, 0.1)
    return _train(model, wrap, steps, optimizer, clip, schedule)


def an_option_that_is_a_number(model: ZeRO3, wrap: Wrap, steps: int) -> list[Tensor]:
    """A graph repeats the rate of the recording, so a step with another one is not replayed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5)
    return _train(model, wrap, steps, optimizer, schedule=schedule)


def a_graph_of_older_weights(model: ZeRO3, wrap: Wrap, steps: int) -> list[Tensor]:
    """torch refuses the backward of a forward whose weights were written since: also by a graph."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    optimizer.param_groups[0]["capturable"] = True
    train = wrap(_step_of(model, optimizer), SAMPLE)
    found = []
    for number in range(steps):
        found.append(train(_batch()))
        if number == 6:
            older = _waiting(model)
            found.append(train(_batch()))
            try:
                older.backward()
            except RuntimeError as error:
                found.append(torch.tensor("modified by an inplace operation" in str(error)))
    return found


def accumulation(
    model: ZeRO3, wrap: Wrap, steps: int, optimizer_of: Callable[..., Any] = ADAMW
) -> list[Tensor]:
    """Three micro-batches in one step."""
    optimizer = optimizer_of(model.parameters())

    def step(*batches: Tensor) -> list[Tensor]:
        losses = []
        for x in batches:
            with nullcontext() if x is batches[-1] else model.no_sync():
                losses.append(_backward(model, x))
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    train = wrap(step, SAMPLE, SAMPLE, SAMPLE)
    return [each for _ in range(steps) for each in train(_batch(), _batch(), _batch())]


def gradients_left(
    model: ZeRO3, wrap: Wrap, steps: int, optimizer_of: Callable[..., Any] = NATIVE
) -> list[Tensor]:
    """The next step clears what the last one leaves in `.grad`, and the program reads it."""
    optimizer = optimizer_of(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = _backward(model, x)
        optimizer.step()
        return loss

    train = wrap(step, SAMPLE)
    found = []
    for _ in range(steps):
        found.append(train(_batch()))
        found += [p.grad.sum() for p in model.parameters() if p.grad is not None]
    return found


def optimizer_outside(
    model: ZeRO3, wrap: Wrap, steps: int, set_to_none: bool = True
) -> list[Tensor]:
    """Passes alone are captured; weights change in between, by the optimizer and by hand."""
    optimizer = MOMENTUM(model.parameters())
    train = wrap(functools.partial(_backward, model), SAMPLE)
    found = []
    for number in range(steps):
        found.append(train(_batch()))
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        if number % 3 == 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
    return found


def train_and_evaluate(model: ZeRO3, wrap: Wrap, steps: int) -> list[Tensor]:
    """Two captures take turns, the second between a forward and its backward, with eager passes
    between them, also of other shapes."""
    optimizer = MOMENTUM(model.parameters())

    def evaluate(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x).sum()

    train, look = wrap(_step_of(model, optimizer), SAMPLE), wrap(evaluate, SAMPLE)
    found = []
    for number in range(steps):
        found.append(train(_batch()))
        older = _waiting(model)
        found.append(look(_batch()))
        older.backward()
        found += [p.grad.sum() for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        if number % 4 == 3:
            found += [train(_batch(2)), look(_batch(1))]
            with torch.no_grad():
                found.append(model(_batch()).sum())
    return found


def errors_in_recordings(
    model: ZeRO3, wrap: Wrap, steps: int, late: int | None = 5
) -> list[Tensor]:
    """The fourth call, which records, fails in its forward, the next one in its backward, and the
    one after that in what follows the optimizer: in the second of two graphs. A single graph has
    not run then, and an eager step would have stepped: None."""
    optimizer, fails_late = MOMENTUM(model.parameters()), False

    def fail(*_: Any) -> None:
        raise ArithmeticError

    train, found = wrap(_step_of(model, optimizer, lambda: fails_late and fail()), SAMPLE), []
    hooks = {3: fail, 4: lambda module, args, output: output.register_hook(fail) and None}
    for number in range(steps):
        fails_late = number == late
        handle = model.module.blocks[1].register_forward_hook(hooks.get(number, lambda *_: None))
        with suppress(ArithmeticError):
            found.append(train(_batch()))
        handle.remove()
        optimizer.zero_grad()
    return found


def two_towers(model: ZeRO3, wrap: Wrap, steps: int) -> list[Tensor]:
    """Steps with and without one of the blocks, each an order of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module = model.module
    skips = False

    def forward(x: Tensor) -> Tensor:
        x = module.stem(x)
        for block in module.blocks[1:] if skips else module.blocks:
            x = block(x)
        return module.head(x)

    module.forward = forward

    def step(x: Tensor, without: bool) -> tuple[Tensor]:
        nonlocal skips
        skips = without
        module.blocks[0].requires_grad_(not without)
        loss = _backward(model, x)
        optimizer.step()
        optimizer.zero_grad()
        return (loss,)

    plain, short = wrap(step, SAMPLE, False), wrap(step, SAMPLE, True)
    found = []
    for number in range(steps):
        without = number % 2 == 1
        module.blocks[0].requires_grad_(not without)
        found += (short if without else plain)(_batch(), without)
    return found


def recomputation_and_dropout(model: ZeRO3, wrap: Wrap, steps: int) -> list[Tensor]:
    """Each replay draws the numbers that an eager step would."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for block in model.module.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    model.module.stem.forward = functools.partial(_dropped, model.module.stem.forward)
    return _train(model, wrap, steps, optimizer)


def _dropped(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(F.dropout(x, 0.3))


_EITHER = (capturable_adamw, train_and_evaluate, two_towers, recomputation_and_dropout)
PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        *(sgd_with_clipping, native_adamw, an_option_that_is_a_number, a_graph_of_older_weights),
        *(accumulation, gradients_left, optimizer_outside, errors_in_recordings, *_EITHER),
    )
}
OWN_PROGRAMS: dict[str, Program] = {
    "accumulation in one graph": functools.partial(accumulation, optimizer_of=MOMENTUM),
    "gradients left by a graph": functools.partial(gradients_left, optimizer_of=MOMENTUM),
    "errors in one graph": functools.partial(errors_in_recordings, late=None),
    # A replay adds to `.grad` where the recording found it.
    "optimizer outside a graph": functools.partial(optimizer_outside, set_to_none=False),
} | {program.__name__: program for program in _EITHER}
"""Those that an `OwnGraph` can contain: nothing in a step depends on the host."""


def draw_alike() -> None:
    torch.manual_seed(1 + dist.get_rank())
