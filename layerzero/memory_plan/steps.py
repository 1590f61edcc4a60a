"""Runs training steps of a planned model and notes what its storages hold.

The model is the real engine around a module without memory, on one rank of a planned world.
Everything that allocates is the engine's own code: units, handles, the scheduler, the reducer.
Replaced is what would leave the process, and what needs values of other ranks. Nothing is sent: a
group (arguments.py) has the size, this rank's number and the backend of the planned one, so the
engine allocates what it would allocate there.
"""

from __future__ import annotations

import functools
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from layerzero.build.build import Builder
from layerzero.build.materialize import Materializer, Place
from layerzero.build.topology import Topology
from layerzero.comm.gloo.threads import FinishingStream
from layerzero.comm.streams import ChainedCollectives, InlineStream, Streams, Waitable
from layerzero.flat.parameter_info import get_info
from layerzero.flat.placement import ShardGroup
from layerzero.memory_budget.storages import CountingMode, StorageCount, sums
from layerzero.memory_plan.arguments import Prepared, topology_of
from layerzero.step.extension import Extension
from layerzero.step.handle import FlatParamHandle
from layerzero.step.operations import Operations
from layerzero.step.reduction import Reduction
from layerzero.step.root import RootState
from layerzero.step.tensors import find_tensors
from layerzero.step.unit import Unit
from layerzero.watch.watchdog import Watchdog
from layerzero.wrapping.zero3 import ZeRO3

ROOT = "the root"
_YOUNG = 1
"""Generation of Python's collector with what a step leaves; older ones are large and not ours."""
Batch = tuple[tuple[Any, ...], dict[str, Any]]
Optimizer = str | int | float


class PlannedModel(ZeRO3):
    """A `ZeRO3` made of a plan, without an exchange between ranks."""

    def __init__(self, prepared: Prepared, topology: Topology, count: StorageCount) -> None:
        nn.Module.__init__(self)
        module, plan, arguments, *_ = prepared
        materializer = _WithoutValues(plan.device, None)
        make = functools.partial(_PlannedRoot, count=count)
        builder = Builder(plan, topology, arguments, materializer)
        root = builder.join(builder.build_units(), make)
        materializer.fill_the_rest(module)
        self._become(module, root)
        root.extensions.add(_Moments(root.units, count))

    @property
    def handles(self) -> Iterator[FlatParamHandle]:
        return (handle for unit in self._root_state.units for handle in unit.handles)


class _WithoutValues(Materializer):
    """Allocates meta tensors; nobody looks at their values."""

    def _initialise(
        self, label: str, module: nn.Module, metas: Mapping[Place, torch.Tensor]
    ) -> None:
        for place, meta in metas.items():
            self._allocate(place, meta)

    def fill_the_rest(self, module: nn.Module) -> None:
        """Allocate what the engine leaves alone: tensors of ignored modules."""
        for inner in module.modules():
            for tensors in (inner._parameters, inner._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and tensor.is_meta:
                        self._allocate(Place(tensors, name), tensor)


class _Moments(Extension):
    """Notes which unit is at work, and what its gradients and reductions hold; asks no rank."""

    def __init__(self, units: Sequence[Unit], count: StorageCount) -> None:
        self._units = weakref.WeakValueDictionary({unit.label: unit for unit in units})
        self._count = count
        self._before = ("", ""), ""
        """Moment and kind before a reduction."""

    def begin_call(self, unit: Unit) -> None:
        self._count.moment = unit.fqn or ROOT, "forward"

    def end_call(self, unit: Unit) -> None:
        self._count.moment = ROOT, "forward"

    def begin_backward(self, unit: Unit) -> None:
        self._count.moment = unit.fqn or ROOT, "backward"

    def exchange_presence(self, reductions: Sequence[Reduction]) -> Callable[[], Any]:
        """Every rank has the gradients that this one has."""
        return lambda: [(reduction, reduction.present) for reduction in reductions]

    def resized(self, storage: torch.UntypedStorage) -> None:
        self._count.resized(storage)

    def begin_action(self, action: str, unit: str) -> None:
        if action == "reduce":
            count, reduced = self._count, self._units[unit]
            unsharded = (each for handle in reduced.handles for each in handle.unsharded_params)
            count.mark((each.grad for each in unsharded if each.grad is not None), "gradients")
            self._before = count.moment, count.kind
            count.moment = reduced.fqn or ROOT, "reduction"
            count.kind = "reduction buffers"

    def end_action(self, action: str, unit: str) -> None:
        if action == "reduce":
            self._count.moment, self._count.kind = self._before


class _Unwatched(Operations):
    """Names collectives; counts no models on groups and starts no watchdog."""

    def __init__(self, *given: Any) -> None:
        device, streams, extensions = given[:3]
        super().__init__(device, streams, extensions, ())

    def _watchdog_of(self, group: ShardGroup) -> Watchdog | None:
        return None


class _PlannedRoot(RootState):
    _operations = _Unwatched

    def __init__(self, *arguments: Any, count: StorageCount, **named: Any) -> None:
        self._count = count
        super().__init__(*arguments, **named)

    def _make_streams(self, on_gloo: bool) -> Streams:
        if on_gloo:
            return Streams(self.device, reduce=_Reducing(self._count))
        return _DeviceStreams(self.device)


class _Reducing(FinishingStream):
    """The reduce stream on gloo, each reduction of which is done at the latest time that it is by
    the thread of a real model."""

    def __init__(self, count: StorageCount) -> None:
        super().__init__()
        self._count, self.is_late = count, True

    def _enqueue(self, work: Callable[[], Waitable | None]) -> Waitable:
        def counted() -> Waitable | None:
            with self._count.of_kind("reduction buffers"):
                return work()

        return super()._enqueue(counted)


class _OnDevice(InlineStream):
    """A stream of a device, as the host sees it: memory counts as free when the host frees it."""

    def run(self, collectives: ChainedCollectives, input_done: Callable[[], None]) -> Waitable:
        collectives(lambda: None)
        return self.drain_handle()

    def enqueue_wait(
        self, pending: Waitable, on_done: Callable[[], None] | None = None
    ) -> Waitable:
        pending.wait()
        return self.drain_handle()


class _DeviceStreams(Streams):
    """The streams of a planned accelerator, whose tensors seem to be on the CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pre_unshard = self.unshard = self.reduce = self.offload = _OnDevice()

    @property
    def are_apart(self) -> bool:
        return True


class PlannedRank:
    """One rank of a planned world: its model, and the count of what it holds."""

    resting: dict[str, int]
    """Bytes between steps, by kind."""
    peak: dict[str, int]
    """Bytes at the moment of the peak, by kind."""
    moment: tuple[str, str]
    """The unit and the part of the step of the peak."""

    def __init__(self, prepared: Prepared, rank: int, optimizer: Optimizer) -> None:
        self._count = StorageCount()
        self._optimizer = optimizer
        self._on_accelerator = prepared.on_accelerator
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._hollow(), self._count.of_kind("other"):
            self.model = PlannedModel(prepared, topology_of(prepared, rank), self._count)
            self._mark_engine()

    def run(self, batch: Batch) -> None:
        with self._hollow():
            args, kwargs = _allocated(batch)
            optimizer = self._make_optimizer()
            self._step(optimizer, args, kwargs)
            gc.collect(_YOUNG)
            self._count.restart()
            self._step(optimizer, args, kwargs)
            self.peak, self.moment = sums(self._count.at_peak()), self._count.peak_moment
            del args, kwargs
            gc.collect(_YOUNG)
            self.resting = self._count.by_kind()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        # Elsewhere torch chooses its multi-tensor implementation, which has larger temporaries.
        foreach = True if self._on_accelerator else None
        if self._optimizer == "adamw":
            return torch.optim.AdamW(parameters, foreach=foreach)
        if self._optimizer == "sgd":
            return torch.optim.SGD(parameters, foreach=foreach)
        if isinstance(self._optimizer, (int, float)) and self._optimizer >= 0:
            return _StateOnly(parameters, self._optimizer)
        raise ValueError(f"optimizer: expected 'adamw', 'sgd' or bytes, got {self._optimizer!r}")

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """One training step: forward, backward, the optimizer's step, `zero_grad()`."""
        count, model = self._count, self.model
        count.moment = ROOT, "forward"
        with _one_sequence_a_row(kwargs):
            output = model(*args, **kwargs)
        for handle in model.handles:
            if handle.post_forward_shard is not None:
                count.mark([handle.post_forward_shard], "compute shards")
        loss = _scalar_of(output)
        loss.backward()
        parameters = list(model.parameters())
        count.mark((each.grad for each in parameters if each.grad is not None), "gradients")
        count.moment = "", "optimizer step"
        with count.of_kind("optimizer temporaries"):
            optimizer.step()
        state = (each for of in optimizer.state.values() for each in find_tensors(of))
        count.mark(state, "optimizer state")
        count.moment = "", "zero_grad"
        optimizer.zero_grad()

    @contextmanager
    def _hollow(self) -> Iterator[None]:
        """Tensors made inside have no memory; whatever the caller has switched on is off."""
        with (
            warnings.catch_warnings(),
            torch.device("cpu"),
            torch.inference_mode(False),
            torch.enable_grad(),
            self._mode,
            CountingMode(self._count),
        ):
            # Engine and torch compare addresses, of which hollow tensors have none.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield

    def _mark_engine(self) -> None:
        mark, model = self._count.mark, self.model
        for handle in model.handles:
            mark([handle.full], "compute shards" if handle.is_whole else "full buffers")
            if handle.has_compute_shard:
                mark([handle.compute_shard], "compute shards")
            mark([handle.main_shard], "shards")
            mark(handle.gradients.buffers, "reduction buffers")
        mark(model.buffers(), "module buffers")
        mark((each for each in model.parameters() if get_info(each) is None), "whole parameters")

    def padding(self) -> int:
        """Bytes of the main shards beyond an even split of the parameters."""
        return sum(
            handle.main_shard.nbytes
            - sum(handle.layout.numels) * handle.main_shard.itemsize // handle.layout.group_size
            for handle in self.model.handles
        )


class _StateOnly(torch.optim.Optimizer):
    """Holds so many bytes for each element, and needs nothing else."""

    def __init__(self, parameters: list[nn.Parameter], nbytes: float) -> None:
        super().__init__(parameters, {})
        self._nbytes = nbytes

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    nbytes = round(parameter.numel() * self._nbytes)
                    self.state[parameter]["state"] = torch.empty(
                        nbytes, dtype=torch.uint8, device="cpu"
                    )


def _scalar_of(output: Any) -> torch.Tensor:
    """What backward starts from."""
    if isinstance(output, torch.Tensor) and output.requires_grad and not output.ndim:
        return output
    parts = {id(part): part for part in find_tensors(output) if part.requires_grad}
    if not parts:
        raise ValueError("plan_memory: nothing in the module's output requires grad")
    return functools.reduce(torch.add, (part.sum() for part in parts.values()))


@contextmanager
def _one_sequence_a_row(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Let transformers find no packed sequences inside, unless the batch has positions.

    It looks at values of positions, and takes tensors without values for those of several sequences
    in a row, which need an explicit mask. Positions that the model makes itself are of one.
    """
    module, name = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    if not hasattr(module, name) or "position_ids" in kwargs:
        yield
        return
    found = getattr(module, name)
    setattr(module, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(module, name, found)


def _allocated(batch: Any) -> Any:
    """`batch` with each tensor replaced by a new one of its shape and dtype, on the CPU."""

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return made.requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, fresh, batch)
