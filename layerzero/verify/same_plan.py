"""SamePlan: what must be the same on all ranks before a model is built, as text.

What may differ is left out: units that only some ranks have (experts), devices' indices, and
values, which start_values.py compares.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from layerzero.build.arguments import Arguments
from layerzero.build.compare import Rows
from layerzero.build.plan import WrapPlan
from layerzero.build.wrap import UnitPlan
from layerzero.config import MixedPrecision, OffloadPolicy
from layerzero.flat.groups import resolve_process_groups
from layerzero.flat.tensor_parallel import local_of
from layerzero.step.extension import Extension
from layerzero.version import __version__

_ALIKE = (
    *("outer", "forward_prefetch", "backward_prefetch", "limit_all_gathers", "sync_module_states"),
    *("timeout", "verify", "on_nonfinite", "memory_budget", "arena"),
    *("gradient_reduction", "accumulation", "deterministic"),
)
_OF_UNITS = (
    *("mixed_precision", "reshard_after_forward", "gradient_reduction", "offload", "hook_module"),
)
"""Arguments of a model, and of its units, that are compared as they are."""


class SamePlan(Extension):
    """Versions, arguments and the model's outline, of which every rank of a model has the same."""

    def __init__(self, plan: WrapPlan, given: Arguments) -> None:
        self._plan = plan
        self._given = given

    def compared(self) -> Rows:
        plan = self._plan
        dense = [unit for unit in plan.units if id(unit) not in plan.groups]
        names = {id(visit.module): visit.fqn for visit in plan.visits}
        mesh = plan.mesh
        return {
            "versions": [f"torch {torch.__version__}", f"layerzero {__version__}"],
            "positions": [] if mesh is None else [f"position {mesh.get_coordinate()}"],
            "arguments": list(_arguments(plan, self._given)),
            # Those of units wrapped before were compared then.
            "parameters": [row for unit in dense for row in _parameters(unit, plan, names)],
            "units": list(_units(dense, plan)),
            "modules": list(_modules(plan)),
            "buffers": list(_buffers(plan)),
        }


def _arguments(plan: WrapPlan, given: Arguments) -> Iterator[str]:
    num_inner = dist.get_world_size(resolve_process_groups(given.process_group)[0])
    values = {
        "zero3_size": num_inner if given.zero3_size is None else given.zero3_size,
        "mixed_precision": given.mixed_precision or MixedPrecision(),
        "cast_forward_inputs of the root": given.root_precision,
        "offload": given.offload or OffloadPolicy(),
        **vars(given.reduction),
        **{name: getattr(given, name) for name in _ALIKE},
        "layout": given.row_multiple,
        "device": plan.device.type,
        # Where all values come from the first rank, only that rank has to initialise.
        "param_init_fn": None if given.sync_module_states else given.param_init_fn,
    }
    yield from (f"{name}={plain(value)}" for name, value in values.items())


def _parameters(unit: UnitPlan, plan: WrapPlan, names: Mapping[int, str]) -> Iterator[str]:
    """A row for each parameter; `names` are those of modules, keyed by id."""
    arguments, label = plan.arguments[id(unit)], unit.label
    for original in unit.originals:
        parameter = original.parameter
        kind = "trainable" if parameter.requires_grad else "frozen"
        row = f"{original.fqn!r} {list(local_of(parameter).shape)} {parameter.dtype} {kind}"
        row += f" in {label}"
        compute = arguments.compute_dtype(original)
        if compute != parameter.dtype:
            row += f" ({compute} in forward)"
        for slot in original.slots[1:]:
            row += f", tied to {'.'.join(filter(None, (names[id(slot.module)], slot.name)))!r}"
        yield row


def _units(dense: Sequence[UnitPlan], plan: WrapPlan) -> Iterator[str]:
    texts: dict[int, str] = {}
    """Texts of arguments, by id: units share most of these objects."""
    for unit in dense:
        if unit.existing is not None:
            yield f"wrapped before: {unit.label}"
            continue
        arguments = plan.arguments[id(unit)]
        for name in _OF_UNITS:
            value = getattr(arguments, name)
            if id(value) not in texts:
                texts[id(value)] = plain(value)
            yield f"{name}={texts[id(value)]} in {unit.label}"


def _modules(plan: WrapPlan) -> Iterator[str]:
    """The class of each module; of wrappers with the name of what they wrap, of the innermost."""
    if plan.groups:
        return  # Placeholders of experts on other ranks are of other classes.
    classes = {visit.fqn: type(visit.module) for visit in plan.visits}
    for fqn, cls in classes.items():
        yield f"{fqn!r} of class {cls.__qualname__}" if fqn else f"a {cls.__qualname__} as root"


def _buffers(plan: WrapPlan) -> Iterator[str]:
    for visit in plan.visits:
        if id(visit.plan) in plan.groups or visit.plan.existing is not None:
            continue
        for name, buffer in visit.module._buffers.items():
            if buffer is not None and not is_lazy(buffer):
                shape, fqn = list(local_of(buffer).shape), f"{visit.fqn}.{name}".lstrip(".")
                yield f"{fqn!r} {shape} {buffer.dtype}"


def plain(value: Any) -> str:
    """A value of an argument as text that is the same in every process: without addresses."""
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple):
        return f"({', '.join(map(plain, value))})"
    if dataclasses.is_dataclass(value):
        values = {field: getattr(value, field.name) for field in dataclasses.fields(value)}
        given = (f"{k.name}={plain(each)}" for k, each in values.items() if each != k.default)
        return f"{type(value).__name__}({', '.join(given)})"
    if isinstance(value, nn.Module):
        return type(value).__name__
    return "a function" if callable(value) else repr(value)
