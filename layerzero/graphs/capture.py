"""CUDA graphs of passes, and capture: a whole step as graphs, replayed without Python.

Calls 1 to 3 run eagerly, on the stream of the capture; call 4 records, and replays what it has
recorded; later ones replay. Each is one step on its own inputs: nothing trains on the sample.

Note [Nothing says when a graph ends]
    Neither that nor a replay runs code of the engine. So compute waits for the side streams as each
    recorded pass ends; and in a model that was recorded they wait for compute before each pass: a
    replay writes main shards and an arena, and events of a graph that has ended order nothing.

Note [A step is cut where an optimizer steps]
    A graph repeats the numbers that Python gave to kernels, such as a learning rate. An optimizer
    with `capturable=True` has them in tensors, and is recorded. Any other steps between two graphs,
    eagerly, in each replay. The graphs share a pool, in which gradients keep their addresses.

Note [The host after a replay]
    A replay leaves on the host what an eager step leaves: `.grad` are tensors whose memory it has
    written, and versions of parameters that a graph writes grow (not of one that the program
    made). Handles are sharded before and after, so the next forward gathers the main shards.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_flatten, tree_map_only

from layerzero.comm.pending import Pending
from layerzero.flat.parameter_hooks import kind_of_hooks
from layerzero.notices import warn_once
from layerzero.optim.sharded_params import live_roots
from layerzero.step.extension import Extension
from layerzero.step.root import RootState
from layerzero.step.unit import ShardState, Unit

WARM_UP_CALLS = 3
_logger = logging.getLogger(__name__)
_put_grad: Callable[[Any, Any], Any] = vars(torch._C.TensorBase)["grad"].__set__
_Optimizer = torch.optim.Optimizer


def capture(step: Callable[..., Any], *sample: Any) -> CapturedStep:
    """Make CUDA graphs of a step, which are replayed for inputs like `sample`.

    `step` is all that a step does: forward, backward, clipping, `optimizer.step()`, `zero_grad()`;
    or a part that leaves the model between passes, such as an evaluation. The first three calls
    with inputs like the sample run eagerly, the fourth records, and later ones replay. Calls with
    other inputs run eagerly, and so do all on a device without graphs, such as the CPU. What Python
    computes inside `step` is computed once; see docs/howto/cuda_graphs.md.

    Collective as `step` is; at each call, inputs are like the sample on every rank or on none.

    Args:
        step: called with arguments like the sample; returns tensors, in nested tuples, lists and
            dicts, or nothing. On a device with graphs its tensors are copies on that device.
        sample: tensors, numbers, strings and None, in nested tuples, lists and dicts. Inputs are
            like it if tensors have its shapes and dtypes, and all else is equal.

    Returns:
        A function with the arguments of `step`, which returns what `step` does, detached. It raises
        RuntimeError in the first call if a graph cannot contain what the step, or its model, has.

    Raises:
        ValueError: no sharded model is alive; or the sample contains anything else, or a tensor
            that requires grad.
    """
    return CapturedStep(step, sample)


class CapturedStep:
    """A step that `capture` was given."""

    def __init__(self, step: Callable[..., Any], sample: tuple[Any, ...]) -> None:
        self.num_replays = 0
        """Calls that replayed graphs, the one that recorded them included."""
        self._step = step
        self._name: str = getattr(step, "__name__", type(step).__name__)
        self._sample = _signature(sample)
        self._num_calls = 0
        self._roots: list[RootState] = []
        self._optimizers: dict[_Optimizer, None] = {}
        if self._sample is None:
            raise ValueError(
                f"capture({self._name}): expected a sample of tensors that require no grad, "
                "numbers, strings and None, in tuples, lists and dicts"
            )
        roots = list(live_roots)
        if not roots:
            raise ValueError(f"capture({self._name}): no sharded model is alive; wrap it first")
        self._device = device = roots[0].device
        self._module: Any = torch.get_device_module(device)
        self._has_graphs = hasattr(self._module, "CUDAGraph")
        if self._has_graphs:
            self._stream = self._module.Stream(device=device)
        else:
            _logger.info("capture(%s): no graphs on %s, calls are eager", self._name, device.type)

    def __call__(self, *args: Any) -> Any:
        if not self._has_graphs:
            return tree_map_only(Tensor, Tensor.detach, self._step(*args))
        if _signature(args) == self._sample:
            if not self.num_replays:
                return self._warm_up_or_record(args)
            now = self._state()
            changed = next((name for name, each in self._found.items() if now[name] != each), None)
            if changed is None:
                return _copies(self._replay(args))
            warn_once(
                f"capture({self._name}): {changed} is not as it was recorded, so the step runs "
                "eagerly while that is so",
                f"{id(self)}: {changed}",
            )
        return tree_map_only(Tensor, Tensor.detach, self._step(*self._moved_in(args)))

    def _moved_in(self, args: Any) -> Any:
        return tree_map_only(
            Tensor, lambda each: torch.empty_like(each, device=self._device).copy_(each, True), args
        )

    def _warm_up_or_record(self, args: tuple[Any, ...]) -> Any:
        """Run the step on the stream of the capture: the default one cannot be recorded, and nodes
        of autograd that the program keeps run on the stream that they were made on."""
        stream, current = self._stream, self._module.current_stream(self._device)
        stream.wait_stream(current)  # Which uses what the last call left: it is freed only now.
        self._keepalive: Any = None
        with ExitStack() as stack:
            stack.callback(current.wait_stream, stream)  # Also after an error: inputs are freed.
            stack.enter_context(self._module.stream(stream))
            given = self._moved_in(args)
            outputs = (self._warm_up if self._num_calls < WARM_UP_CALLS else self._record)(given)
        self._keepalive = given, outputs, self._grads()
        return _copies(outputs)

    def _warm_up(self, args: tuple[Any, ...]) -> Any:
        """Run the step, and find the models and optimizers that have a part in it."""
        self._num_calls += 1
        clocks = {root: root.clock for root in list(live_roots)}
        scaled: list[str] = []

        def note(optimizer: _Optimizer, args: Any, kwargs: Any) -> None:
            self._optimizers[optimizer] = None
            if getattr(optimizer, "found_inf", None) is not None:
                scaled.append("a GradScaler")

        handle = register_optimizer_step_pre_hook(note)
        try:
            outputs = self._step(*args)
        finally:
            handle.remove()
        self._roots = [root for root, before in clocks.items() if root.clock != before]
        for reason in (*scaled, *(each for root in self._roots for each in _refused(root))):
            raise RuntimeError(f"capture({self._name}): a graph cannot contain {reason}")
        wrappers = [wrapper for root in self._roots if (wrapper := root.wrapper_ref()) is not None]
        groups = [group["params"] for each in self._optimizers for group in each.param_groups]
        groups += [wrapper.parameters() for wrapper in wrappers]
        self._params: list[nn.Parameter] = [*dict.fromkeys(chain.from_iterable(groups))]
        self._modules = [module for wrapper in wrappers for module in wrapper.modules()]
        self._units = [unit for root in self._roots for unit in root.units]
        return outputs

    def _grads(self) -> list[Tensor | None]:
        return [*map(attrgetter("grad"), self._params)]

    def _put(self, grads: Sequence[Tensor | None]) -> None:
        all(map(is_, map(_put_grad, self._params, grads), repeat(None)))  # In C.

    def _state(self) -> dict[str, list[Any]]:
        """State on the host by which the engine and torch decide."""
        kind = self._device.type
        casts = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return {
            ".grad of a parameter": [*map(id, self._grads())],
            "requires_grad of a parameter": [*map(attrgetter("requires_grad"), self._params)],
            "the memory of a parameter": [*map(Tensor.data_ptr, self._params)],
            "the training mode of a module": [*map(attrgetter("training"), self._modules)],
            "grad mode or autocast": [torch.is_grad_enabled(), *casts],
            "what a model keeps between passes": [
                *map(attrgetter("state"), self._units),
                *((each.reducer.requires_sync, each.shown.is_any) for each in self._roots),
            ],
            # Tensors by identity: a graph reads what they hold.
            "an option of a capturable optimizer (pass one that changes as a tensor)": [
                id(value) if isinstance(value, Tensor) else value
                for group in chain.from_iterable(o.param_groups for o in self._recorded)
                for name, value in group.items()
                if name != "params"
            ],
        }

    def _record(self, inputs: tuple[Any, ...]) -> Any:
        self._stepping: _Optimizer | None = None
        self._pool: Any = None
        self._parts: list[tuple[Any, Callable[[], None] | None]] = []
        """Graphs, each with what follows it: Note [A step is cut where an optimizer steps]."""
        self._recorded = [
            each for each in self._optimizers if all(g.get("capturable") for g in each.param_groups)
        ]
        self._inputs, self._before, self._found = inputs, self._grads(), self._state()
        versions = [*map(attrgetter("_version"), self._params)]
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            self._open = stack.enter_context(ExitStack())
            self._begin()
            self._outputs = self._step(*inputs)
            self._end(None)
        pairs = zip(self._params, versions, strict=True)
        self._written = [each for each, version in pairs if each._version != version]
        # Gradients that a step leaves go where the next one finds them.
        both = [*zip(self._before, self._grads(), strict=True)]
        self._after = [new if old is None or new is None else old for old, new in both]
        moved = [(o, n) for o, n in both if o is not None and n is not None and o is not n]
        self._moved = [old for old, _ in moved], [new for _, new in moved]
        self._leave()
        self.num_replays = 1
        _logger.info("capture(%s): recorded as %d graphs", self._name, len(self._parts))
        return self._outputs

    def _begin(self) -> None:
        self._graph = self._module.CUDAGraph()
        # "thread_local": a thread that loads data may pin memory meanwhile.
        options = {"stream": self._stream, "capture_error_mode": "thread_local"}
        self._open.enter_context(self._module.graph(self._graph, pool=self._pool, **options))
        self._mark = torch.zeros((), device=self._device)  # torch warns of an empty graph.

    def _end(self, step: Callable[[], None] | None) -> None:
        """End a graph, which `step` follows, and run it."""
        self._open.close()
        self._pool = self._graph.pool()
        self._parts.append((self._graph, step))
        self._graph.replay()

    def _before_step(self, optimizer: _Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping is not None or optimizer in self._recorded:
            return  # The first: a step inside another one, as of whole tensors.
        self._stepping = optimizer
        grads, factor = self._grads(), getattr(optimizer, "next_factor", None)

        def step() -> None:
            self._put(grads)
            if factor is not None:
                optimizer.next_factor = factor  # type: ignore[attr-defined]
            optimizer.step(*args[1:], **kwargs)

        self._end(step)

    def _after_step(self, optimizer: _Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self._stepping:
            self._stepping = None
            self._begin()

    def _replay(self, args: tuple[Any, ...]) -> Any:
        """Run the recorded step on other inputs. Returns what it returned then, written anew."""
        self.num_replays += 1
        watched = [*self._watch()]
        for own, given in zip(tree_flatten(self._inputs)[0], tree_flatten(args)[0], strict=True):
            if isinstance(own, Tensor):
                own.copy_(given, non_blocking=True)
        for graph, step in self._parts:
            graph.replay()
            if step is not None:
                step()
        self._leave()
        torch.autograd.graph.increment_version(self._written)
        for pending in watched:
            pending.start(lambda: None)
        return self._outputs

    def _leave(self) -> None:
        """See Note [The host after a replay]."""
        if self._moved[0]:
            with torch.no_grad():
                torch._foreach_copy_(*self._moved)
        self._put(self._after)

    def _watch(self) -> Iterator[Pending]:
        """Let the watchdog of each group wait for a replay as for one collective, by its name."""
        for root in self._roots:
            groups = {g.process_group: g for p in root.placements for g in p.all_groups}
            for group in groups.values():
                pending = Pending(root.operations.next("replay", self._name, group), group)
                if pending.operation.watchdog is not None:
                    pending.operation.watchdog.issued.append(pending)
                yield pending


class Recording(Extension):
    """Takes part in the graphs that record passes of one model: those of `capture`, and those that
    the program makes itself. See Note [Nothing says when a graph ends]."""

    def __init__(self, root: RootState) -> None:
        self._root: RootState = weakref.proxy(root)
        self._was_recorded = self._records = False
        self._tables: dict[int, Any] = {}
        """Tables that recorded kernels read, and the engine replaces where flags change."""

    def before_forward(self, unit: Unit, forward_pass: Any) -> None:
        self._begin(unit)

    def before_backward(self, forward_pass: Any) -> None:
        self._begin()

    def between_passes(self, what: str) -> None:
        self._begin()

    def _begin(self, unit: Unit | None = None) -> None:
        """`unit`: a forward begins with it."""
        root, streams = self._root, self._root.streams
        self._records = streams.is_capturing()
        if self._records:
            with streams.unshard:
                if streams.is_capturing():
                    return
            for reason in () if unit is None else _refused(root, unit):
                raise RuntimeError(f"{root.units[0].label}: a graph cannot contain {reason}")
        elif not self._was_recorded:
            return
        if self._records or not root.operations.is_watched:
            root.scheduler.end_step()  # A graph's pool has its own compute shards.
        self._was_recorded, root.operations.is_watched = True, not self._records
        streams.fork()
        root.context.note_weights()

    def before_delivery(self, forwards: Any) -> None:
        for each in self._root.reducer.undelivered() if self._records else ():
            gradients = each.handle.gradients
            self._tables[id(gradients.segments)] = gradients.segments
            has_all = each.present.issuperset(gradients.trainable)
            if each.handle.placement.num_ranks > 1 and not has_all:
                raise RuntimeError(
                    f"{each.unit.label}: a graph cannot contain a backward in which parameters get "
                    "no gradient, because it would ask other ranks: freeze them. (They get none in "
                    "make_graphed_callables: use layerzero.capture, or torch.cuda.graph)"
                )

    def end_backward(self, forwards: Any = None) -> None:
        if self._records:
            self._root.streams.join()

    after_forward = after_abort = end_backward


def _copies(outputs: Any) -> Any:
    """Copies on the current stream: the next replay writes the outputs again."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), outputs)


def _signature(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Properties of inputs that one recording serves; None: none does."""
    leaves, spec = tree_flatten(args)
    kinds: list[tuple[Any, ...]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not leaf.requires_grad:
            kinds.append((leaf.shape, leaf.dtype))
        elif leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes)):
            kinds.append((type(leaf), leaf))
        else:
            return None
    return spec, kinds


_ALLOWED = tuple(f"layerzero.{each}" for each in ("guards", "graphs", "module_tree", "optim.steps"))
"""Features whose extensions a graph may contain."""


def _refused(root: RootState, unit: Unit | None = None) -> Iterator[str]:
    """Reasons why a graph cannot contain a step, or a forward that begins with `unit`."""
    handles = [handle for unit in root.units for handle in unit.handles]
    for module in (type(each).__module__ for each in root.extensions.of(Extension)):
        # Guards, and what awaits values, read nothing of the device once the model has trained;
        # memory of an arena stays.
        if not module.startswith(_ALLOWED):
            yield f"what {module} does"
    if any(handle.params_on or handle.gradients.sums_on for handle in handles):
        yield "offload"
    if root.tensor_parallel_groups:
        yield "tensor-parallel parameters"
    if any(kind_of_hooks(each) for handle in handles for each in handle.sharded_params):
        yield "hooks on sharded parameters"
    if root.shown.is_any:
        yield "gradients of no_sync that wait for the next call"
    if any(unit.state is not ShardState.SHARDED for unit in root.units):
        yield "units that stay unsharded between two calls"
    if unit is not None:
        kind = "forward", unit.index, torch.is_grad_enabled(), unit.module.training
        if not root.scheduler.recorder.orders(kind):
            yield "a pass that has not run yet; run it three times before, on a side stream"
