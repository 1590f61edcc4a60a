"""Optional modules: modules that a rank may skip in a pass while other ranks run them.

docs/howto/optional_modules.md describes them. Here they are found, checked and turned into regions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from torch import nn

from layerzero.build.plan import AnyGroup
from layerzero.build.wrap import UnitPlan, modules_of
from layerzero.config import OptionalMean
from layerzero.flat.names import clean_name
from layerzero.optional.optional_units import OptionalUnits
from layerzero.step.extension import Extension
from layerzero.step.root import RootState
from layerzero.step.unit import Unit, get_unit

names_of: WeakKeyDictionary[Unit, list[str]] = WeakKeyDictionary()
"""Names of the optional modules by root unit: after `rewrap` other modules may have them."""


class OptionalModules(Extension):
    _modules: dict[str, nn.Module]
    """Keyed by FQN; a module that wrappers surround (torch.compile) is the outermost of these."""

    def __init__(
        self,
        root: nn.Module,
        listed: Sequence[nn.Module],
        mean: OptionalMean,
        plans: Sequence[UnitPlan],
        groups: Mapping[int, AnyGroup],
        everyone: tuple[int, ...],
    ) -> None:
        """Find and check the optional modules of `root`. Not collective. `listed`: the
        `optional_modules` argument of `ZeRO3`. `groups`: the ranks of each unit that only some
        have, keyed by id(plan). `everyone`: the ranks that share the model."""
        for plan in plans:
            if plan.existing is not None and plan.existing in names_of:
                raise ValueError(
                    f"optional_modules: {plan.label!r} is a ZeRO3 module with optional_modules of "
                    "its own; give them to the outermost one alone"
                )
        self._mean, self._modules = mean, {}
        name_of, module_of = _named(root)
        for module in listed:
            name = name_of.get(id(module))
            if not name:
                raise ValueError(
                    f"optional_modules: contains a {type(module).__name__} that is not inside the "
                    f"wrapped {type(root).__name__}; list modules that its modules() returns"
                )
            self._modules[name] = module_of[name]
            inside = {id(part) for part in modules_of(module_of[name])}
            units = [plan for plan in plans if id(_unwrapped(plan.module)) in inside]
            for plan in units:
                if id(plan) in groups or not _placements(plan) <= {(everyone, None)}:
                    raise ValueError(
                        f"optional_modules: {name!r} contains {plan.label!r}, which has a "
                        "process_group of its own: experts cannot be optional"
                    )
            if not any(p.originals or p.tied_owners or _placements(p) for p in units):
                raise ValueError(
                    f"optional_modules: {name!r} ({type(_unwrapped(module)).__name__}) has no "
                    "unit: its parameters, if any, belong to one that every rank needs; add its "
                    "class, or those inside it, to auto_wrap_policy"
                )

    def compared(self) -> dict[str, list[str]]:
        rows = [f"{name!r} with optional_mean={self._mean!r}" for name in sorted(self._modules)]
        return {"optional modules": rows} if rows else {}

    def built(self, root: RootState) -> None:
        """Let ranks skip the modules from now on. Collective."""
        if not self._modules:
            return
        names_of[root.units[0]] = [*self._modules]
        region_of, is_reused = find_regions(root.units, self._modules)
        handles = (handle for index in region_of for handle in root.units[index].handles)
        # Without parameters, or on one rank, there is nothing to gather.
        if any(handle.placement.num_ranks > 1 for handle in handles):
            root.optional = OptionalUnits(root, region_of, self._mean, is_reused)
            root.extensions.add(root.optional)
            root.optional.set_active(True)


def find_regions(
    units: Sequence[Unit], optional: Mapping[str, nn.Module]
) -> tuple[dict[int, str], bool]:
    """The region of each optional unit, and whether any is used at several places of the model.

    A unit belongs to the innermost optional module that it is, or lies under. So do units outside
    whose parameters a module under an optional one uses (tied parameters, a `hook_module`): they
    are regions of their own, unless they are the root or contain that optional module. `units`: the
    root's list, outermost first.
    """
    around: dict[int, str] = {}
    """The name of the innermost optional module around each module, keyed by id."""
    parts_of = {name: list(modules_of(module)) for name, module in optional.items()}
    for name, parts in sorted(parts_of.items(), key=lambda item: -len(item[1])):
        around.update((id(part), name) for part in parts)
    places = Counter(
        id(module) for _, module in units[0].module.named_modules(remove_duplicate=False)
    )
    region_of, is_reused = dict[int, str](), False
    for index, unit in enumerate(units):
        inside = {id(part) for part in modules_of(unit.module)}
        users = [optional[around[id(user)]] for user in unit.owners if id(user) in around]
        if id(unit.module) in around:
            region_of[index] = around[id(unit.module)]
        elif index and users and not any(id(user) in inside for user in users):
            region_of[index] = unit.fqn
        else:
            continue
        is_shared = any(id(user) not in inside for user in unit.owners)
        is_reused = is_reused or is_shared or places[id(unit.module)] > 1
    return region_of, is_reused


def optional_now(root: Unit) -> list[nn.Module]:
    """The modules that have the names of the root's optional modules now, with parameters."""
    _, module_of = _named(root.module)
    found = [module_of[name] for name in names_of.get(root, ()) if name in module_of]
    return [module for module in found if next(module.parameters(), None) is not None]


def _named(root: nn.Module) -> tuple[dict[int, str], dict[str, nn.Module]]:
    """The first name of each module, by id, and the outermost module of each name: a wrapper has
    the name of the module inside it."""
    name_of, module_of = dict[int, str](), dict[str, nn.Module]()
    for name, module in root.named_modules():
        module_of.setdefault(clean_name(name), module)
        for part in (module, _unwrapped(module)):
            name_of.setdefault(id(part), clean_name(name))
    return name_of, module_of


def _unwrapped(module: nn.Module) -> nn.Module:
    unit = get_unit(module)
    return module if unit is None else unit.module


def _placements(plan: UnitPlan) -> set[tuple[Sequence[int], object]]:
    """Members and data-parallel ranks of the placements of a unit that exists already."""
    placements = () if plan.existing is None else (h.placement for h in plan.existing.handles)
    return {(each.members, each.data_parallel) for each in placements}
