"""Outline: everything that must be the same on all ranks of a model, as text that is compared.

Ranks compare a hash of it in the first exchange of construction. Only if the hashes differ, the
first rank's text is sent, and each rank names its first difference. What may differ is left out:
units that only some ranks have (experts), devices' indices, and values (Note [Digests]).
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from layerzero.build.arguments import Arguments
from layerzero.build.compare_values import broadcast_text
from layerzero.build.plan import WrapPlan
from layerzero.build.wrap import UnitPlan
from layerzero.comm.gather_texts import gather_texts
from layerzero.comm.pending import Operation
from layerzero.config import MixedPrecision, OffloadPolicy
from layerzero.flat.groups import ShardGroup
from layerzero.flat.tensor_parallel import local_of
from layerzero.version import __version__

_EXCHANGE = Operation("exchange", "arguments and parameters of ranks", 0)
_ADVICE = {
    "versions": "ZeRO3: versions differ between ranks: {}; install the same on every rank",
    "arguments": "ZeRO3: arguments differ between ranks: {}; give every rank the same",
    "parameters": "process_group: parameters differ between its ranks: {}; every rank must wrap "
    "the same model; ranks may differ only in units that have their own process_group (experts)",
    "units": "ZeRO3: arguments of units differ between ranks: {}; give every rank the same, "
    "and an auto_wrap_policy that returns the same",
    "modules": "ZeRO3: modules differ between ranks: {}; every rank must wrap the same model",
    "buffers": "ZeRO3: buffers differ between ranks: {}; every rank must wrap the same model",
}
"""Sections in the order in which they are compared, and the error of each."""


class Outline:
    """The model and arguments of one rank, as text."""

    def __init__(self, plan: WrapPlan, given: Arguments, num_inner: int) -> None:
        """`num_inner`: size of the first axis of `process_group`, the default of `zero3_size`."""
        dense = [unit for unit in plan.units if id(unit) not in plan.experts]
        names = {id(visit.module): visit.fqn for visit in plan.visits}
        rows: dict[str, list[str]] = {
            "versions": [f"torch {torch.__version__}", f"layerzero {__version__}"],
            "arguments": list(_arguments(plan, given, num_inner)),
            "parameters": [row for unit in dense for row in _parameters(unit, plan, names)],
            "units": list(_units(dense, plan)),
            "modules": list(_modules(plan)),
            "buffers": list(_buffers(plan)),
        }
        self._rows: Mapping[str, list[str]] = rows
        self._text = json.dumps(rows)

    @property
    def number(self) -> int:
        """A hash below 2**62, equal on ranks that were given the same."""
        digest = hashlib.blake2b(self._text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 2

    def explain(self, first_rank: int, axes: Sequence[ShardGroup], device: torch.device) -> str:
        """Error message: how ranks differ from the first. Collective over `axes`, inner first."""
        first = json.loads(broadcast_text(self._text, axes, device, _EXCHANGE))
        text = self._difference(first, first_rank)
        texts = gather_texts(text, dist.get_rank(), axes, device, _EXCHANGE.unit)
        ranks_of: dict[str, list[int]] = {}
        for rank, each in texts.items():
            ranks_of.setdefault(each, []).append(rank)
        section = next(iter(ranks_of)).partition("\0")[0]
        listed = [f"{_name(ranks)} {_row(each)}" for each, ranks in ranks_of.items()]
        more = f" (and {len(listed) - 4} more differences)" if len(listed) > 4 else ""
        return _ADVICE[section].format("; ".join(listed[:4]) + more)

    def _difference(self, first: Mapping[str, list[str]], first_rank: int) -> str | None:
        for section, rows in self._rows.items():
            nothing = f"no other {section.removesuffix('s')}"
            pairs = itertools.zip_longest(rows, first[section], fillvalue=nothing)
            for own, other in pairs:
                if own != other:
                    counts = f"{len(rows)} {section} here, {len(first[section])} there"
                    counts = f" ({counts})" if section == "parameters" else ""
                    return f"{section}\0{own}, where rank {first_rank} has {other}{counts}"
        return None


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown} have" if len(ranks) > 1 else f"rank {shown} has"


def _row(difference: str) -> str:
    return difference.partition("\0")[2]


def _arguments(plan: WrapPlan, given: Arguments, num_inner: int) -> Iterator[str]:
    syncs = given.sync_module_states
    # Where all values come from the first rank, only that rank has to initialise.
    init = "..." if syncs and given.param_init_fn != "later" else plain(given.param_init_fn)
    values = {
        "zero3_size": num_inner if given.zero3_size is None else given.zero3_size,
        "outer": given.outer,
        "mixed_precision": given.mixed_precision or MixedPrecision(),
        "cast_forward_inputs of the root": given.root_precision,
        "forward_prefetch": int(given.prefetch.forward),
        "backward_prefetch": given.prefetch.backward,
        "limit_all_gathers": given.prefetch.limit,
        "offload": given.offload or OffloadPolicy(),
        "sync_module_states": syncs,
        "gradient_reduction": given.reduction.reduce,
        "accumulation": given.reduction.accumulation,
        "deterministic": given.reduction.deterministic,
        "separate_groups": given.reduction.separate_groups,
        "in_flight": given.reduction.in_flight,
        "timeout": given.timeout,
        "verify": given.verify,
        "on_nonfinite": given.on_nonfinite,
        "memory_budget": given.memory_budget,
        "layout": given.row_multiple,
        "device": plan.device.type,
    }
    yield from (f"{name}={plain(value)}" for name, value in values.items())
    yield f"param_init_fn={init}"


def _parameters(unit: UnitPlan, plan: WrapPlan, names: Mapping[int, str]) -> Iterator[str]:
    """A row for each parameter; `names` are those of modules, keyed by id."""
    if unit.existing is not None:
        for handle in unit.existing.handles:
            for fqn, shape, shown in zip(
                handle.fqns, handle.shapes, handle.unsharded_params, strict=True
            ):
                kind = "trainable" if shown.requires_grad else "frozen"
                dtype = handle.main_shard.dtype
                yield f"{fqn!r} {list(shape)} {dtype} {kind} in {unit.label}"
        return
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
        values = {
            "mixed_precision": arguments.mixed_precision,
            "reshard_after_forward": arguments.reshard_after_forward,
            "gradient_reduction": arguments.gradient_reduction,
            "offload": arguments.offload,
            "hook_module": arguments.hook_module,
        }
        for name, value in values.items():
            if id(value) not in texts:
                texts[id(value)] = plain(value)
            yield f"{name}={texts[id(value)]} in {unit.label}"


def _modules(plan: WrapPlan) -> Iterator[str]:
    """The class of each module; of wrappers with the name of what they wrap, of the innermost."""
    if plan.experts:
        return  # Placeholders of experts on other ranks are of other classes.
    classes = {visit.fqn: type(visit.module) for visit in plan.visits}
    for fqn, cls in classes.items():
        yield f"{fqn!r} of class {cls.__qualname__}" if fqn else f"a {cls.__qualname__} as root"


def _buffers(plan: WrapPlan) -> Iterator[str]:
    for visit in plan.visits:
        if id(visit.plan) in plan.experts or visit.plan.existing is not None:
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
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        kind: Any = type(value)
        default = kind()
        given = (
            f"{name}={plain(each)}"
            for name, each in fields.items()
            if each != getattr(default, name)
        )
        return f"{type(value).__name__}({', '.join(given)})"
    if isinstance(value, nn.Module):
        return type(value).__name__
    return "a function" if callable(value) else repr(value)
