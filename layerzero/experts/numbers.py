"""Global numbers of experts whose modules have the same names on every rank of the expert axis.

They come from `expert_numbers`, which `auto_wrap_policy` gives for expert units;
experts/names.py uses them in state dicts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.build.plan import Group, ranks_of
from layerzero.build.wrap import UnitPlan
from layerzero.experts.names import Numbers, name_members
from layerzero.flat.groups import resolve_process_groups


class ExpertLists:
    """Modules, such as ModuleLists, whose members are experts with local numbers."""

    def __init__(self, module: nn.Module, plans: Sequence[UnitPlan]) -> None:
        """Find the lists, and give the parameters inside global names. Not collective.

        Raises:
            ValueError, TypeError: `expert_numbers` is malformed or does not fit the modules.
        """
        self._modules: dict[str, nn.Module] = {}
        self._numbers: dict[str, Numbers] = {}
        for plan in plans:
            declaring = next(
                (p for p in plan.ancestors() if p.arguments.get("expert_numbers") is not None), None
            )
            if declaring is not None and plan.existing is None:
                self._read(module, plan, declaring)
        if self._numbers:
            for plan in plans:
                for original in plan.originals:
                    original.fqn = self._global(original.fqn)

    def name_members(self) -> None:
        """Use the global names in state dicts and checkpoints. Not collective."""
        for path, module in self._modules.items():
            name_members(module, self._numbers[path])

    def _read(self, root: nn.Module, plan: UnitPlan, declaring: UnitPlan) -> None:
        where = f"{declaring.label} (rank {dist.get_rank()}): expert_numbers"
        given = declaring.arguments["expert_numbers"]
        group = declaring.arguments.get("process_group")
        if group is None:
            raise ValueError(
                f"{where} needs a process_group too: the ranks that have the same experts"
            )
        paths = {_list_around(original.fqn, declaring.fqn) for original in plan.originals} - {None}
        if not paths and plan.originals:
            raise ValueError(
                f"{where}: the name {plan.originals[0].fqn!r} contains no number; expected a list "
                "of experts inside the unit, or a unit that is a member of one"
            )
        for path in sorted(filter(None, paths)):
            module = root.get_submodule(path)
            numbers = _from_axis(where, path, given, group, module)
            if numbers:
                self._modules[path], self._numbers[path] = module, numbers

    def _global(self, fqn: str) -> str:
        parts = fqn.split(".")
        renamed = list(parts)
        for place, part in enumerate(parts):
            numbers = self._numbers.get(".".join(parts[:place]))
            if numbers is not None:
                renamed[place] = numbers.get(part, part)
        return ".".join(renamed)


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


def _members(module: nn.Module) -> list[int]:
    named = (*module._modules, *module._parameters)
    return sorted({int(name) for name in named if name.isdigit()})


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
    members = _members(module)
    if members != list(range(len(members))):
        raise ValueError(
            f"{where}: {path} has the experts {members}; expected local numbers from 0; if these "
            "are global numbers already, remove expert_numbers"
        )
    if groups[0].size() == 1:
        return {}
    first = groups[0].rank() * len(members)
    return {str(member): str(first + member) for member in members}
