"""Checks before the first forward of a model, and the first after its parameters were moved: of
their device, and of the values that a load should have brought."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from layerzero.comm.exchanges import gather_texts
from layerzero.flat import unset_values
from layerzero.step.extension import Extension
from layerzero.step.unit import Unit


class AwaitedValues(Extension):
    """Runs the checks."""

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        """`units` is the root's list."""
        self._units = units
        self._device = device

    def before_first_forward(self) -> None:
        check_first_forward(self._units, self._device)


def check_first_forward(every: Sequence[Unit], device: torch.device) -> None:
    """Check the units of a model before a forward. Collective if any was built without values; what
    has none yet is an error on every rank."""
    for unit, handle in ((each, handle) for each in every for handle in each.handles):
        place = handle.main_shard.device
        is_there = (place.type, place.index or 0) == (device.type, device.index or 0)  # "cpu:0"
        if not is_there and handle.params_on is None:
            raise RuntimeError(
                f"{unit.label}: its parameters were moved to {place}, but the model was wrapped "
                f"for {device}: call model.to({str(device)!r}) on every rank before a forward, or "
                f"wrap a module that is on {place}"
            )
    waiting = [unit for unit in every if unit.awaits_values]
    # `to_empty`, too, leaves units without values, but may be called on some ranks alone.
    own = [handle.placement for unit in waiting if unit.was_built_empty for handle in unit.handles]
    placements = {id(each): each for each in (p.data_parallel or p for p in own)}
    missing = next(_missing(waiting), None)
    found = {} if missing is None else {dist.get_rank(): missing}
    for placement in placements.values():
        found |= gather_texts(missing, placement.groups, device, "values")
    if found:
        rank, text = min(found.items())
        raise RuntimeError(
            f"{text} has no value yet (rank {rank}): the model was sharded on the meta device, or "
            "emptied by to_empty. Before the next forward load a checkpoint that contains it, or, "
            "if checkpoints omit it, write its values yourself"
        )
    for unit in waiting:
        unit.mark_loaded()


def _missing(units: Sequence[Unit]) -> Iterator[str]:
    for unit in units:
        for handle in unit.handles:
            for fqn, sharded_param in zip(handle.fqns, handle.sharded_params, strict=True):
                if unset_values.is_left(sharded_param.detach()):
                    yield f"parameter {fqn!r}"
        for fqn, module_ref, name in unit.awaited_buffers:
            module = module_ref()
            buffer = None if module is None else module._buffers.get(name)
            if module is not None and buffer is not None and unset_values.is_left(buffer):
                full = f"{unit.fqn}.{fqn}" if unit.fqn else fqn
                is_saved = name not in module._non_persistent_buffers_set
                yield f"buffer {full!r}" + ("" if is_saved else ", which checkpoints omit,")
