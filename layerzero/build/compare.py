"""Compares ranks: what they are about to build, and then whether all could.

Note [Outline]
    All that must be the same on every rank of a model is text, of which ranks exchange a hash. Only
    if hashes differ, the first rank's text is sent, and each rank names its first difference. What
    may differ is left out: units that only some ranks have (experts), devices' indices, and values.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from layerzero.build.arguments import Arguments
from layerzero.build.materialize import Materializer
from layerzero.build.plan import WrapPlan
from layerzero.build.wrap import UnitPlan
from layerzero.comm.exchanges import broadcast_from_first, gather_along, gather_texts
from layerzero.comm.pending import Operation
from layerzero.config import MixedPrecision, OffloadPolicy
from layerzero.flat.groups import own_rank
from layerzero.flat.placement import Placement, ShardGroup
from layerzero.flat.tensor_parallel import local_of
from layerzero.notices import some_ranks
from layerzero.version import __version__

REFUSED = -1
"""Sent in place of a hash by a rank that refuses the module or an argument."""
Rows = Mapping[str, Sequence[str]]
"""Lines of text that must be the same on all ranks, by section, in the order of comparison."""
_ADVICE = {
    "experts": "every rank needs equally many experts of equal size",
    "positions": "its ranks have different parts of the DTensor parameters: take both groups from "
    'one mesh: mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp")), '
    'parallelize_module(..., mesh["tp"]), ZeRO3(..., process_group=mesh["dp"])',
    "optional modules": "which of these modules a rank skips is its own choice in each forward",
}
"""Advice on ranks that differ in a section of an outline, where it is not to give all the same."""


class Exchange:
    """Messages between all ranks at construction. Each method is collective; blocks the host."""

    def __init__(self, axes: Sequence[ShardGroup], device: torch.device, what: str) -> None:
        """
        Args:
            axes: groups that together connect the ranks, inner first.
            device: one that their backends serve.
            what: the subject, which the error names if a rank does not take part.
        """
        self._axes = [axis for axis in axes if axis.size > 1]
        self._device = device
        self._operation = Operation("exchange", what, 0)

    def bounds(self, number: int) -> tuple[int, int]:
        """The lowest and the highest `number` of a rank."""
        own = torch.tensor([number], device=self._device)
        numbers = gather_along(own, self._axes, lambda _: self._operation)
        low, high = torch.stack(numbers.aminmax()).tolist()
        return low, high

    def first(self, own: object) -> Any:
        """The first rank's `own`: Python values that JSON has."""
        data = torch.tensor([*json.dumps(own).encode()], dtype=torch.uint8, device=self._device)
        size = torch.tensor([data.numel()], device=self._device)
        broadcast_from_first(size, self._axes, lambda _: self._operation)
        received = torch.zeros(int(size), dtype=torch.uint8, device=self._device)
        received[: data.numel()] = data[: received.numel()]
        broadcast_from_first(received, self._axes, lambda _: self._operation)
        return json.loads(bytes(received.tolist()))

    def refuse_difference(self, what: str, rows: Rows) -> NoReturn:
        """Raise ValueError on every rank: how rows, of which the hashes differ, differ from the
        first rank's. `what`: what was given them, such as "ZeRO3"."""
        rank, first = self.first([own_rank(), rows])
        texts = self.texts(_difference(rows, first, rank))
        text = next(iter(texts.values()))
        ranks = [number for number, each in texts.items() if each == text]
        section, row = text.split("\0", 1)
        has = f"{some_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {row}"
        advice = _ADVICE.get(section, "give every rank the same")
        raise ValueError(f"{what}: {section} differ between ranks: {has}; {advice}")

    def texts(self, text: str | None) -> dict[int, str]:
        """The texts of the ranks that have one, by global rank."""
        return gather_texts(text, self._axes, self._device, self._operation.unit)


def hash_of(value: object) -> int:
    """A number from 0 to 2**62 that is equal in all processes for equal JSON."""
    digest = hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def _difference(rows: Rows, first: Rows, first_rank: int) -> str | None:
    for section in {**first, **rows}:
        own, theirs = rows.get(section, ()), first.get(section, ())
        nothing = f"no other {section.removesuffix('s')}"
        for one, other in itertools.zip_longest(own, theirs, fillvalue=nothing):
            if one != other:
                return f"{section}\0{one}, where rank {first_rank} has {other}"
    return None


def outline(plan: WrapPlan, given: Arguments, num_inner: int) -> Rows:
    """The model and arguments of one rank; see Note [Outline].

    Args:
        num_inner: size of the first axis of `process_group`, the default of `zero3_size`.
    """
    dense = [unit for unit in plan.units if id(unit) not in plan.groups]
    names = {id(visit.module): visit.fqn for visit in plan.visits}
    mesh = plan.mesh
    rows: dict[str, Sequence[str]] = {
        "versions": [f"torch {torch.__version__}", f"layerzero {__version__}"]
    }
    for feature in plan.features:
        rows.update(feature.compared())
    return {
        **rows,
        "positions": [] if mesh is None else [f"position {mesh.get_coordinate()}"],
        "arguments": list(_arguments(plan, given, num_inner)),
        # Those of units wrapped before were compared then.
        "parameters": [row for unit in dense for row in _parameters(unit, plan, names)],
        "units": list(_units(dense, plan)),
        "modules": list(_modules(plan)),
        "buffers": list(_buffers(plan)),
    }


_ALIKE = (
    *("outer", "forward_prefetch", "backward_prefetch", "limit_all_gathers", "sync_module_states"),
    *("timeout", "verify", "on_nonfinite", "memory_budget", "arena"),
    *("gradient_reduction", "accumulation", "deterministic"),
)
_OF_UNITS = (
    *("mixed_precision", "reshard_after_forward", "gradient_reduction", "offload", "hook_module"),
)
"""Arguments of a model, and of its units, that are compared as they are."""


def _arguments(plan: WrapPlan, given: Arguments, num_inner: int) -> Iterator[str]:
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


_WAITS = "\0"


def settle(made: Materializer, placement: Placement, device: torch.device) -> bool:
    """Make construction succeed or fail on all ranks together. Collective over the model's ranks.

    Args:
        placement: placement of the whole model.

    Returns:
        Whether any rank has parameters or buffers without values; the same on every rank.

    Raises:
        Exception: `made.failure`; a rank without one raises ValueError with that of another rank.
    """
    failure, text = made.failure, _WAITS if made.waits else None
    if failure is not None:
        text = f"{type(failure).__name__}: {failure}"
    texts = Exchange(placement.groups, device, "initial values").texts(text)
    if failure is not None:
        raise failure
    for rank, each in texts.items():
        if each != _WAITS:
            raise ValueError(f"rank {rank} could not initialise the model: {each}")
    return bool(texts)
