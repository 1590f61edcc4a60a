"""Checks the arguments of `plan_memory`, and turns them into a wrapping plan of a hollow copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.build.arguments import Arguments, check, check_arguments, named_device
from layerzero.build.device import check_device_type, current_accelerator
from layerzero.build.plan import AnyGroup, Ranks, WrapPlan, plan_wrapping, ranks_of
from layerzero.build.topology import Topology, check_sizes, place
from layerzero.build.wrap import make_chooser
from layerzero.flat.groups import DEFAULT_TIMEOUT
from layerzero.flat.parameter_info import copy_attributes
from layerzero.flat.placement import Placement, ShardGroup
from layerzero.flat.tensor_parallel import local_of, split_of
from layerzero.step.module_guards import is_compiled
from layerzero.step.unit import get_unit
from layerzero.zero3 import find_features, in_our_terms

_CPU = torch.device("cpu")
_MODULES = ("ignored_modules", "ignored_parameters", "optional_modules")
"""Arguments that list modules or parameters."""


class PlanRequest(NamedTuple):
    """What is to be planned, checked."""

    module: nn.Module
    given: dict[str, Any]
    """The arguments of `ZeRO3` by name."""
    world_size: int
    device: torch.device

    @property
    def on_accelerator(self) -> bool:
        return self.device.type != "cpu"


class Prepared(NamedTuple):
    """A copy of the module without memory, ready to be built for one rank."""

    module: nn.Module
    plan: WrapPlan
    arguments: Arguments


def check_request(
    given: dict[str, Any], unknown: Mapping[str, Any], world_size: int
) -> PlanRequest:
    """Refuse what `ZeRO3` refuses, and what cannot be planned. Changes nothing.

    Raises:
        TypeError, ValueError, RuntimeError: as `ZeRO3`; or a bad `world_size`.
        NotImplementedError: `ZeRO3` takes it, but its memory cannot be planned yet.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size: expected an int, got {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size: expected at least 1 rank, got {world_size}")
    if "process_group" in unknown:
        raise TypeError("plan_memory: process_group: pass world_size and zero3_size instead")
    check(outer=given["outer"], zero3_size=given["zero3_size"])
    device = _device(given["device"])
    # They are read several times.
    given = {**given, **{k: tuple(given[k]) for k in _MODULES if isinstance(given[k], Iterator)}}
    given = {**given, "process_group": None, "device": _CPU}
    given = dict(in_our_terms(given, unknown))
    request = PlanRequest(given["module"], given, world_size, device)
    _checked(given, world_size)
    _refuse_unplanned(request)
    policy = given["auto_wrap_policy"]
    if policy is not None:
        ignored = tuple(given["ignored_modules"]), tuple(given["ignored_parameters"])
        given["auto_wrap_policy"] = _with_ranks(make_chooser(policy, request.module, *ignored))
    return request


def prepare(request: PlanRequest) -> Prepared:
    """Copy the module without memory, and plan its units.

    Raises:
        ValueError: the module cannot be copied; and as `check_request`.
    """
    module, given = request.module, request.given
    copies = _hollow_tensors(module)
    try:
        lists = {name: tuple(given[name]) for name in _MODULES}
        copied, lists = copy.deepcopy((module, lists), copies)
    except Exception as error:
        raise ValueError(
            f"plan_memory: this {type(module).__name__} cannot be copied, and the plan runs a copy "
            f"of it: {type(error).__name__}: {error}"
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
    given = {
        **given,
        **lists,
        **{name: on_original(given[name]) for name in functions if callable(given[name])},
        # Values are not read: nothing has to be initialised or made equal.
        **{"module": copied, "param_init_fn": None, "sync_module_states": False},
    }
    arguments = _checked(given, request.world_size)
    everyone = tuple(range(request.world_size))
    plan = plan_wrapping(copied, arguments, find_features, lambda: everyone)
    return Prepared(copied, plan, arguments)


def topology_of(request: PlanRequest, prepared: Prepared, rank: int) -> Topology:
    """The groups and placements of one rank."""
    _, plan, arguments = prepared
    backend = "nccl" if request.on_accelerator else "gloo"
    everyone = planned_group(rank, range(request.world_size), backend)
    size = arguments.zero3_size or request.world_size
    table = [list(range(at, at + size)) for at in range(0, request.world_size, size)]

    def group_of(ranks: Sequence[int]) -> ShardGroup:
        if len(ranks) == request.world_size:
            return everyone
        ranks = sorted(ranks)
        return planned_group(ranks.index(rank), ranks, backend)

    def make(table: Sequence[Sequence[int]]) -> Placement:
        rows = [list(row) for row in table]
        made = place(rows, rank, arguments.outer, arguments.deterministic, group_of)
        if arguments.reduction.separate_groups:
            made = replace(made, reduce_lane=made.reduce_groups)
        return made

    placement = make(table)
    placements = {id(unit): placement for unit in plan.units}
    for feature in plan.features:
        placements |= feature.place(placement, lambda group: make(group.table), plan.device)
    return Topology(
        placement=placement,
        placements=placements,
        tensor_parallel_groups=planned_axes(plan.mesh, backend),
    )


def _checked(given: dict[str, Any], world_size: int) -> Arguments:
    everyone = planned_group(0, range(world_size), "gloo")
    arguments = check_arguments(given, lambda *_: everyone.process_group)
    check_sizes([everyone], arguments, is_first=True)
    return arguments


def _device(device: object) -> torch.device:
    if device is None:
        return current_accelerator() or _CPU
    found = named_device(device)
    if found.type == "meta":
        check_device_type(found, f"device={device!r}")
    return found


def _refuse_unplanned(request: PlanRequest) -> None:
    for inner in request.module.modules():
        name = type(inner).__name__
        if get_unit(inner) is not None:
            raise NotImplementedError(
                f"plan_memory: a {name} inside is wrapped by ZeRO3 already; plan the module as it "
                "was before, with auto_wrap_policy"
            )
        if is_compiled(inner):
            raise NotImplementedError(
                f"plan_memory: a {name} is compiled by torch.compile, which keeps other "
                "activations; plan it without"
            )
        if isinstance(inner, nn.RNNBase) and (request.on_accelerator or isinstance(inner, nn.LSTM)):
            raise NotImplementedError(
                f"plan_memory: {name} on {request.device.type}: the workspace that its library "
                "keeps for backward is not known without running it; measure a step there"
            )
    offload = request.given["offload"]
    if request.on_accelerator and offload is not None:
        raise NotImplementedError(
            f"plan_memory: offload on {request.device.type} cannot be planned, because the plan "
            "has one memory; leave it out, or measure a step there"
        )


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
    names to them. It may return a sequence of global ranks for a `process_group`."""

    def choose(module: nn.Module, fqn: str) -> Any:
        choice = policy(module, fqn)
        if not isinstance(choice, Mapping) or choice.get("process_group") is None:
            return choice
        where = f"plan_memory: process_group of {fqn!r}"
        table = _table(choice["process_group"], where)
        return {**choice, "process_group": Ranks(table), "expert_numbers": None}

    return choose


def _table(group: Any, where: str) -> tuple[tuple[int, ...], ...]:
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        return tuple(map(tuple, group.mesh.tolist()))
    if isinstance(group, (DeviceMesh, dist.ProcessGroup)):
        return (ranks_of(group),)
    is_list = isinstance(group, Sequence) and not isinstance(group, str)
    if not is_list or any(isinstance(r, bool) or not isinstance(r, int) for r in group):
        raise TypeError(
            f"{where}: expected the global ranks that have the same experts, or a ProcessGroup or "
            f"DeviceMesh of them, got {group!r}"
        )
    if not group or len(set(group)) < len(group):
        raise ValueError(f"{where}: expected different ranks, at least one, got {list(group)}")
    return (tuple(sorted(group)),)


def with_all_experts(experts: Mapping[int, AnyGroup], world_size: int) -> Collection[int]:
    """The ranks that have all of these experts; rising.

    Raises:
        ValueError: there is none.
    """
    common = set(range(world_size)).intersection(*map(ranks_of, experts.values()))
    if not common:
        raise ValueError(
            "plan_memory: no rank is in the process_group of all experts; plan the module of one "
            "rank, with its own experts"
        )
    return range(world_size) if len(common) == world_size else sorted(common)


class _Sent:
    """A `dist.Work` that is over."""

    def wait(self, *_: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Nowhere:
    """A process group whose collectives send nothing."""

    def __getattr__(self, name: str) -> Callable[..., _Sent]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: _Sent()


def planned_group(rank: int, ranks: Sequence[int], backend: str) -> ShardGroup:
    """A group of these global ranks, of which this process is the one at place `rank`."""
    group = cast("dist.ProcessGroup", _Nowhere())
    return ShardGroup(group, rank, tuple(ranks), backend, DEFAULT_TIMEOUT)


def planned_axes(mesh: DeviceMesh | None, backend: str) -> tuple[ShardGroup, ...]:
    """A group for each axis of the mesh of DTensor parameters."""
    if mesh is None:
        return ()
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    return tuple(
        planned_group(mesh.get_local_rank(axis), dist.get_process_group_ranks(group), backend)
        for axis, group in enumerate(groups)
    )
