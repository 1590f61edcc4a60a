"""Runs training steps of a planned model and notes what its storages hold."""

from __future__ import annotations

import functools
import gc
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from layerzero.flat.parameter_info import get_info
from layerzero.memory_budget.storages import StorageCount, sums
from layerzero.memory_plan.arguments import Prepared, topology_of
from layerzero.memory_plan.engine import ROOT, PlannedModel
from layerzero.step.tensors import find_tensors

_YOUNG = 1
"""Generation of Python's collector with what a step leaves; older ones are large and not ours."""
Batch = tuple[tuple[Any, ...], dict[str, Any]]
Optimizer = str | int | float


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
        """Run a first step, then the one that is planned.

        Raises:
            ValueError: a bad optimizer; no parameter or no output requires grad.
            RuntimeError: the forward depends on values of tensors.
        """
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
        raise ValueError(
            "optimizer: expected 'adamw', 'sgd' or bytes of state for each element, at least 0, "
            f"got {self._optimizer!r}"
        )

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """One training step: forward, backward, the optimizer's step, `zero_grad()`."""
        count, model = self._count, self.model
        count.now_at(ROOT, "forward")
        with _one_sequence_a_row(kwargs):
            output = model(*args, **kwargs)
        for handle in model.handles:
            if handle.post_forward_shard is not None:
                count.mark([handle.post_forward_shard], "compute shards")
        loss = _scalar_of(output)
        loss.backward()
        parameters = list(model.parameters())
        count.mark((each.grad for each in parameters if each.grad is not None), "gradients")
        count.now_at("", "optimizer step")
        with count.of_kind("optimizer temporaries"):
            optimizer.step()
        state = (each for of in optimizer.state.values() for each in find_tensors(of))
        count.mark(state, "optimizer state")
        count.now_at("", "zero_grad")
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
            self._count.watching(),
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
    """What backward starts from.

    Raises:
        ValueError: nothing in `output` requires grad.
    """
    if isinstance(output, torch.Tensor) and output.requires_grad and not output.ndim:
        return output
    parts = {id(part): part for part in find_tensors(output) if part.requires_grad}
    if not parts:
        raise ValueError(
            "plan_memory: no floating-point tensor in the module's output requires grad; the plan "
            "is of a training step"
        )
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
