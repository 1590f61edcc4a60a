"""Experts: units whose parameters differ between data-parallel ranks.

Four ranks, four experts, two of them on each rank (ep = 2, neighbours):

    rank         0      1      2      3
    dense      one copy, sharded over 0 1 2 3
    experts    0, 1   2, 3   0, 1   2, 3     experts 0 and 1 are sharded over ranks 0 and 2

The ranks with the same experts are their *expert-data group*. The loss is a mean over all four
ranks, and the tokens that an expert sees come from all of them, through the model's own all-to-all.
So an expert's gradient is summed over its expert-data group and divided by four.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from layerzero.build.compare import hash_of
from layerzero.build.plan import AnyGroup, Group, Ranks, ranks_of
from layerzero.build.wrap import UnitPlan
from layerzero.comm.exchanges import gather_along
from layerzero.comm.pending import Operation
from layerzero.experts.names import Numbers, name_members
from layerzero.flat.groups import own_rank, resolve_process_groups
from layerzero.flat.placement import Placement
from layerzero.flat.tensor_parallel import local_of, split_of
from layerzero.step.extension import Extension


def _key(group: AnyGroup | None) -> object:
    """A key that compares equal for equal groups; each `mesh["edp"]` is a new object."""
    if isinstance(group, Ranks):
        return group
    shape = tuple(group.mesh.shape) if isinstance(group, DeviceMesh) else ()
    return (ranks_of(group), shape if len(shape) == 2 else ())


class Experts(Extension):
    """The expert units of one model."""

    def __init__(
        self,
        module: nn.Module,
        plans: Sequence[UnitPlan],
        everyone: tuple[int, ...],
    ) -> None:
        """Find the experts, and give those with `expert_numbers` global names. Not collective.

        Units inside an expert unit are experts as well. A unit whose group has all ranks of the
        model is not an expert. `everyone`: those ranks.
        """
        self._plans = plans
        self._groups = _find_groups(plans, everyone)
        self._lists = _find_lists(module, plans)

    def groups(self) -> dict[int, AnyGroup]:
        return self._groups

    def compared(self) -> dict[str, list[str]]:
        """A row for each unit, if any is an expert. With units of unequal sizes, ranks would
        prefetch different numbers of all-gathers ahead."""
        numbers: dict[object, int] = {}
        rows = []
        for index, plan in enumerate(self._plans if self._groups else ()):
            sizes = [local_of(original.parameter).numel() for original in plan.originals]
            is_expert = "no expert"
            if id(plan) in self._groups:
                key = ranks_of(self._groups[id(plan)])
                is_expert = f"an expert of group {numbers.setdefault(key, len(numbers))}"
            rows.append(f"unit {index}, {is_expert}, of {sizes} elements")
        return {"experts": rows}

    def place(
        self, placement: Placement, make: Callable[..., Placement], device: torch.device
    ) -> dict[int, Placement]:
        """Check which rank has which experts, and place them; name them globally in state dicts."""
        if not all(isinstance(group, Ranks) for group in self._groups.values()):
            self._check(placement, device)
        for module, numbers in self._lists.values():
            name_members(module, numbers)
        made: dict[object, Placement] = {}
        for group in self._groups.values():
            if _key(group) not in made:
                made[_key(group)] = dataclasses.replace(make(group), data_parallel=placement)
        return {plan: made[_key(group)] for plan, group in self._groups.items()}

    def _check(self, placement: Placement, device: torch.device) -> None:
        # Hashes of each expert parameter's group, and of its name and offset.
        own = [dist.get_rank()]
        experts = [plan for plan in self._plans if id(plan) in self._groups]
        for plan in experts:
            group_number = hash_of(ranks_of(self._groups[id(plan)]))
            for original in plan.originals:
                split = split_of(original.parameter)
                offset = None if split is None else split.offset
                own += group_number, hash_of([original.fqn, offset])
        values = torch.tensor(own, dtype=torch.int64, device=device)
        name = Operation("exchange", "experts", 0)
        values = gather_along(values, placement.groups, lambda _: name)
        groups_of_block: dict[int, set[int]] = {}
        blocks_of_group: dict[int, dict[int, set[int]]] = {}
        for rank, *numbers in values.view(-1, len(own)).tolist():
            for group_number, block in zip(numbers[::2], numbers[1::2], strict=True):
                groups_of_block.setdefault(block, set()).add(group_number)
                blocks_of_group.setdefault(group_number, {}).setdefault(rank, set()).add(block)
        names = sorted({original.fqn for plan in experts for original in plan.originals})[:2]
        for by_rank in blocks_of_group.values():
            if any(each != next(iter(by_rank.values())) for each in by_rank.values()):
                raise ValueError(
                    f"experts: ranks {sorted(by_rank)} are in one process_group of experts, but "
                    f"have experts with different names; rank {dist.get_rank()} has {names}...; a "
                    "unit's process_group must consist of the ranks that have the same experts "
                    "(the expert-data axis, not the expert-parallel one)"
                )
        if any(len(each) > 1 for each in groups_of_block.values()):
            raise ValueError(
                "experts: different expert-data groups have different parameters under the same "
                f"names; rank {dist.get_rank()} has {names}...; name experts by global numbers, "
                "pass expert_numbers with the process_group (in a plan: local_experts), or make a "
                "parameter that holds several experts a DTensor that is Shard(0) over the "
                "expert-parallel axis"
            )


def _find_groups(plans: Sequence[UnitPlan], everyone: tuple[int, ...]) -> dict[int, AnyGroup]:
    """The expert-data group of each expert unit, keyed by id(plan)."""
    found: dict[int, AnyGroup] = {}
    for plan in plans:
        given = (around.arguments.get("process_group") for around in plan.ancestors())
        group: AnyGroup | None = next((each for each in given if each is not None), None)
        if plan.existing is not None or group is None:
            continue
        try:
            if not isinstance(group, Ranks):
                resolve_process_groups(group)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{plan.label}: {error}") from None
        ranks = ranks_of(group)
        if not set(ranks) <= set(everyone):
            raise ValueError(
                f"{plan.label} (rank {own_rank()}): its process_group has ranks "
                f"{list(ranks)}; expected a subset of the ranks that share the model, "
                f"{list(everyone)}"
            )
        if ranks != everyone:
            found[id(plan)] = group
    for plan in plans:
        for owner in plan.tied_owners:
            of_plan, of_owner = found.get(id(plan)), found.get(id(owner))
            if _key(of_plan) != _key(of_owner):
                raise ValueError(
                    f"{plan.label} (rank {own_rank()}): one of its parameters is tied to a "
                    f"parameter outside, and would belong to {owner.label}, which has another "
                    "process_group; do not tie parameters of experts, or make one unit around all "
                    "uses"
                )
    of_experts, of_others = list[str](), list[str]()
    for plan in plans:
        if id(plan) in found:
            _check_dtensors(plan, ranks_of(found[id(plan)]))
        names = of_experts if id(plan) in found else of_others
        names += [each.fqn for each in plan.originals if isinstance(each.parameter, DTensor)]
    if of_experts and of_others:
        raise NotImplementedError(
            f"rank {own_rank()}: {of_experts[0]!r} of an expert and {of_others[0]!r} outside "
            "of experts are both DTensors; if the rest of the model is tensor-parallel, make each "
            "expert a module whose name contains its global number"
        )
    return found


def _check_dtensors(plan: UnitPlan, ranks: Sequence[int]) -> None:
    rank = own_rank()
    for original in plan.originals:
        parameter = original.parameter
        if not isinstance(parameter, DTensor):
            continue
        shared = set(parameter.device_mesh.mesh.flatten().tolist()) & set(ranks)
        if shared != {rank} or not all(type(p) is Shard for p in parameter.placements):
            raise ValueError(
                f"{plan.label} (rank {rank}): expert parameter {original.fqn!r} is a DTensor with "
                f"placements {parameter.placements} over ranks "
                f"{parameter.device_mesh.mesh.tolist()}, its process_group has ranks "
                f"{list(ranks)}; expected Shard(dim) over the ranks of the expert-parallel axis, "
                "of which only this rank is in the process_group"
            )


def _find_lists(root: nn.Module, plans: Sequence[UnitPlan]) -> dict[str, tuple[nn.Module, Numbers]]:
    """Modules, such as ModuleLists, whose members have local numbers (`expert_numbers`), by name,
    with the global numbers; gives the parameters inside global names."""
    found: dict[str, tuple[nn.Module, Numbers]] = {}
    for plan in plans:
        declaring = next(
            (p for p in plan.ancestors() if p.arguments.get("expert_numbers") is not None), None
        )
        if declaring is not None and plan.existing is None:
            found.update(_lists_of(root, plan, declaring))
    for plan in plans if found else ():
        for original in plan.originals:
            parts = original.fqn.split(".")
            around = (found.get(".".join(parts[:place])) for place in range(len(parts)))
            renamed = [
                part if each is None else each[1].get(part, part)
                for part, each in zip(parts, around, strict=True)
            ]
            original.fqn = ".".join(renamed)
    return found


def _lists_of(
    root: nn.Module, plan: UnitPlan, declaring: UnitPlan
) -> Iterator[tuple[str, tuple[nn.Module, Numbers]]]:
    where = f"{declaring.label} (rank {dist.get_rank()}): expert_numbers"
    given = declaring.arguments["expert_numbers"]
    group = declaring.arguments.get("process_group")
    if group is None:
        raise ValueError(f"{where} needs a process_group too: the ranks that have the same experts")
    paths = {_list_around(original.fqn, declaring.fqn) for original in plan.originals} - {None}
    if not paths and plan.originals:
        raise ValueError(
            f"{where}: the name {plan.originals[0].fqn!r} contains no number; expected a list "
            "of experts inside the unit, or a unit that is a member of one"
        )
    for path in sorted(filter(None, paths)):
        module = root.get_submodule(path)
        if numbers := _from_axis(where, path, given, group, module):
            yield path, (module, numbers)


def _list_around(fqn: str, unit: str) -> str | None:
    """Name of the list of experts that a parameter is in; None if there is none.

    The list that the unit is a member of, else the outermost one inside the unit.
    """
    path, _, last = unit.rpartition(".")
    if last.isdigit():
        return path
    parts = fqn.split(".")
    inside = len(unit.split(".")) if unit else 0
    for place in range(inside, len(parts)):
        if parts[place].isdigit():
            return ".".join(parts[:place])
    return None


def _from_axis(where: str, path: str, axis: Group, group: Group, module: nn.Module) -> Numbers:
    """Global numbers of the members, by name: consecutive along the ranks of the expert axis.

    Every rank has the same number of experts. Empty if the axis has one rank, which has them all.
    """
    if isinstance(axis, DeviceMesh) and axis.ndim > 1 and "ep" in (axis.mesh_dim_names or ()):
        axis = axis["ep"]
    try:
        groups = resolve_process_groups(axis)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{where}: {error}") from None
    if len(groups) != 1:
        raise ValueError(
            f"{where}: expected the expert axis only, got a mesh of {len(groups)} axes"
        )
    shared = set(ranks_of(axis)) & set(ranks_of(group))
    if shared != {dist.get_rank()}:
        raise ValueError(
            f"{where}: the expert axis has ranks {list(ranks_of(axis))} and the process_group has "
            f"ranks {list(ranks_of(group))}; only this rank may be in both: ranks of the axis have "
            "different experts, ranks of the process_group the same ones"
        )
    named = (*module._modules, *module._parameters)
    members = sorted({int(name) for name in named if name.isdigit()})
    if members != list(range(len(members))):
        raise ValueError(
            f"{where}: {path} has the experts {members}; expected local numbers from 0; if these "
            "are global numbers already, remove expert_numbers"
        )
    if groups[0].size() == 1:
        return {}
    first = groups[0].rank() * len(members)
    return {str(member): str(first + member) for member in members}
