"""Checks the arguments of `plan_memory`, and turns them into a wrapping plan of a hollow copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.build.arguments import Arguments, check, check_arguments
from layerzero.build.device import check_device_type, current_accelerator
from layerzero.build.plan import Ranks, WrapPlan, plan_wrapping, ranks_of
from layerzero.build.topology import Topology, check_sizes, place
from layerzero.build.wrap import make_chooser
from layerzero.flat.groups import DEFAULT_TIMEOUT
from layerzero.flat.parameter_info import copy_attributes
from layerzero.flat.placement import Placement, ShardGroup
from layerzero.flat.tensor_parallel import local_of, split_of
from layerzero.step.methods import is_compiled
from layerzero.step.unit import get_unit
from layerzero.wrapping.features import find_features
from layerzero.wrapping.fsdp_arguments import to_arguments
from layerzero.wrapping.refusals import check_module
from layerzero.wrapping.zero3 import KEYWORDS

_CPU = torch.device("cpu")
_LISTS = ("ignored_modules", "ignored_parameters")
_UNPLANNED = ("memory_budget", "optional_modules", "verify")


class Prepared(NamedTuple):
    """A copy of the module without memory, ready to be built for one rank."""

    module: nn.Module
    plan: WrapPlan
    arguments: Arguments
    world_size: int
    device: torch.device

    @property
    def on_accelerator(self) -> bool:
        return self.device.type != "cpu"


def prepare(module: nn.Module, world_size: int, arguments: Mapping[str, Any]) -> Prepared:
    """Copy the module without memory, and plan its units. Changes nothing of it. `arguments`:
    others of `ZeRO3` by name, or of FSDP."""
    check_module(module)
    if world_size < 1:
        raise ValueError(f"world_size: expected at least 1 rank, got {world_size}")
    if "process_group" in arguments:
        raise TypeError("plan_memory: process_group: pass world_size and zero3_size instead")
    unknown = {name: value for name, value in arguments.items() if name not in KEYWORDS}
    given = {name: arguments.get(name, default) for name, default in KEYWORDS.items()}
    check(outer=given["outer"], zero3_size=given["zero3_size"])
    device = _device(given["device"])
    # Iterators are read several times.
    given |= {name: tuple(given[name]) for name in _LISTS}
    given |= {"module": module, "process_group": None, "device": _CPU}
    given = to_arguments(given, unknown)
    _refuse_unplanned(module, given, device)
    if given["auto_wrap_policy"] is not None:
        ignored = (given[name] for name in _LISTS)
        chooser = make_chooser(given["auto_wrap_policy"], module, *ignored)
        given["auto_wrap_policy"] = _with_ranks(chooser)
    copied, given = _hollow_copy(module, given)
    checked = check_arguments(given)
    check_sizes([_planned_group(0, range(world_size), "gloo")], checked.zero3_size)
    plan = plan_wrapping(copied, checked, find_features, planned_for=tuple(range(world_size)))
    return Prepared(copied, plan, checked, world_size, device)


def _hollow_copy(module: nn.Module, given: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """A copy without memory, and arguments for it, whose functions are called with originals."""
    copies = _hollow_tensors(module)
    try:
        copied, lists = copy.deepcopy((module, {name: given[name] for name in _LISTS}), copies)
    except Exception as error:
        raise ValueError(
            f"plan_memory: cannot copy {type(module).__name__}: {type(error).__name__}: {error}"
        ) from error
    originals = {id(copies.get(id(inner))): inner for inner in module.modules()}

    def on_original(function: Callable[[nn.Module, str], Any]) -> Callable[[nn.Module, str], Any]:
        def ask(inner: nn.Module, fqn: str) -> Any:
            answer = function(originals.get(id(inner), inner), fqn)
            if isinstance(answer, Mapping) and "hook_module" in answer:
                hook = answer["hook_module"]
                return {**answer, "hook_module": copies.get(id(hook), hook)}
            return answer

        return ask

    functions = ("auto_wrap_policy", "reshard_after_forward")
    return copied, {
        **given,
        **lists,
        **{name: on_original(given[name]) for name in functions if callable(given[name])},
        # Values are not read: nothing has to be initialised or made equal.
        **{"module": copied, "param_init_fn": None, "sync_module_states": False},
    }


def planned_rank(prepared: Prepared) -> int:
    """The first rank that has all experts. No rank holds more: padding is at the end."""
    groups = prepared.plan.groups.values()
    common = set(range(prepared.world_size)).intersection(*map(ranks_of, groups))
    if not common:
        raise ValueError(
            "plan_memory: no rank has all experts; plan one rank's module, with its own experts"
        )
    return min(common)


def topology_of(prepared: Prepared, rank: int) -> Topology:
    _, plan, arguments, world_size, _ = prepared
    backend = "nccl" if prepared.on_accelerator else "gloo"
    everyone = _planned_group(rank, range(world_size), backend)
    size = arguments.zero3_size or world_size
    table = [list(range(at, at + size)) for at in range(0, world_size, size)]

    def group_of(ranks: Sequence[int]) -> ShardGroup:
        if len(ranks) == world_size:
            return everyone
        ranks = sorted(ranks)
        return _planned_group(ranks.index(rank), ranks, backend)

    def make(table: Sequence[Sequence[int]]) -> Placement:
        rows = [list(row) for row in table]
        made = place(rows, rank, arguments.outer, arguments.deterministic, group_of)
        if arguments.reduction.separate_groups:
            made = replace(made, reduce_lane=made.reduce_groups)
        return made

    placement = make(table)
    placements = {id(unit): placement for unit in plan.units}
    for place_units in plan.extensions.place:
        placements |= place_units(placement, lambda group: make(group.table), plan.device)
    axes = [] if plan.mesh is None else plan.mesh.get_all_groups()
    return Topology(
        placement=placement,
        placements=placements,
        tensor_parallel_groups=tuple(
            _planned_group(dist.get_rank(axis), dist.get_process_group_ranks(axis), backend)
            for axis in axes
        ),
    )


def _device(device: object) -> torch.device:
    found: torch.device | None = check(device=device)["device"]
    if found is None:
        return current_accelerator() or _CPU
    if found.type == "meta":
        check_device_type(found, f"device={device!r}")
    return found


def _refuse_unplanned(module: nn.Module, given: Mapping[str, Any], device: torch.device) -> None:
    for inner in module.modules():
        if get_unit(inner) is not None or is_compiled(inner):
            raise NotImplementedError(
                f"plan_memory: a {type(inner).__name__} inside is wrapped by ZeRO3 or compiled by "
                "torch.compile; plan the module as it was before, with auto_wrap_policy"
            )
    # The plan has one memory: on an accelerator it cannot tell the host's from the device's.
    for name in (*_UNPLANNED, *(("offload",) if device.type != "cpu" else ())):
        if given[name]:
            raise NotImplementedError(f"plan_memory: {name} cannot be planned on {device.type}")


def _hollow_tensors(module: nn.Module) -> dict[int, Any]:
    """What becomes of each parameter and buffer, keyed by its id: one on the meta device."""
    tensors = (
        tensor
        for inner in module.modules()
        for of in (inner._parameters, inner._buffers)
        for tensor in of.values()
        if tensor is not None
    )
    return {id(tensor): _hollow(tensor) for tensor in tensors}


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor)
    made = torch.empty_strided(local.size(), local.stride(), dtype=local.dtype, device="meta")
    split = split_of(tensor)
    if split is not None:
        made = split.wrap(made)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    copy_attributes(tensor, made)
    return made


def _with_ranks(policy: Callable[[nn.Module, str], Any]) -> Callable[[nn.Module, str], Any]:
    """`policy`, whose process groups are `Ranks`, and whose experts have no numbers, which give
    names to them."""

    def choose(module: nn.Module, fqn: str) -> Any:
        choice = policy(module, fqn)
        if not isinstance(choice, Mapping) or choice.get("process_group") is None:
            return choice
        group = choice["process_group"]
        has_rows = isinstance(group, DeviceMesh) and group.ndim == 2
        table = tuple(map(tuple, group.mesh.tolist())) if has_rows else (ranks_of(group),)
        return {**choice, "process_group": Ranks(table), "expert_numbers": None}

    return choose


class _Nowhere:
    """A process group whose collectives send nothing, and return no work to wait for."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _planned_group(rank: int, ranks: Sequence[int], backend: str) -> ShardGroup:
    """A group of these global ranks, of which this process is the one at place `rank`."""
    group = cast("dist.ProcessGroup", _Nowhere())
    return ShardGroup(group, rank, tuple(ranks), backend, DEFAULT_TIMEOUT)
