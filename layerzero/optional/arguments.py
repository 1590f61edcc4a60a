"""Optional modules: modules that a rank may skip in a pass while other ranks run them.

docs/howto/optional_modules.md describes them. Here they are found, checked and turned into regions.

Note [Optional modules are kept by name]
    A model keeps the names of its optional modules, keyed by its root unit: for `rewrap`, after
    which another module may have the name, and for a ZeRO3 module around this one, whose units
    they join. The root unit is new after each wrapping, so what an earlier one kept never counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from layerzero.build.plan import AnyGroup, Feature, ranks_of
from layerzero.build.wrap import UnitPlan, has_forward
from layerzero.config import OptionalMean
from layerzero.flat.names import clean_name
from layerzero.notices import warn_once
from layerzero.optional.exchange import Exchange
from layerzero.optional.optional_units import OptionalRegions, OptionalUnits, exchange_of
from layerzero.step.root import RootState
from layerzero.step.unit import Unit, get_unit
from layerzero.step.unwrap import modules_of


class _Kept(NamedTuple):
    names: tuple[str, ...]
    mean: OptionalMean


_kept: WeakKeyDictionary[Unit, _Kept] = WeakKeyDictionary()
"""Names and mean by root unit, see Note [Optional modules are kept by name]."""


class OptionalModules(Feature):
    """The optional modules of one model, those of ZeRO3 modules inside it included."""

    modules: Mapping[str, nn.Module]
    """Keyed by FQN; a module that wrappers surround (torch.compile) is the outermost of these."""
    mean: OptionalMean

    def __init__(
        self,
        root: nn.Module,
        listed: Sequence[nn.Module],
        mean: OptionalMean,
        plans: Sequence[UnitPlan],
        groups: Mapping[int, AnyGroup],
        everyone: Callable[[], tuple[int, ...]],
    ) -> None:
        """Find and check the optional modules of `root`. Not collective.

        Args:
            listed: the `optional_modules` argument of `ZeRO3`.
            mean: its `optional_mean`.
            groups: the ranks of each unit that only some have, keyed by id(plan).
            everyone: returns the ranks that share the model.

        Raises:
            ValueError: a module is not inside, or has no unit of its own on all ranks; or another
                mean was given to a ZeRO3 module inside.
        """
        names = _Names(root)
        self.modules = modules = {name: names.module_of[name] for name in map(names.find, listed)}
        nested = [kept for part in root.modules() if (kept := _nested(part, root, names))]
        modules.update((name, names.module_of[name]) for kept in nested for name in kept.names)
        self.mean = _common_mean(mean, bool(listed), [kept.mean for kept in nested])
        for name, module in modules.items():
            _check_units(name, module, plans, groups, everyone())
            _warn_of_own_collectives(name, module)
        if not modules and self.mean != "all":
            warn_once(f"optional_mean={self.mean!r} has no effect: no optional_modules were given")

    def compared(self) -> dict[str, list[str]]:
        rows = [f"{name!r} with optional_mean={self.mean!r}" for name in sorted(self.modules)]
        return {"optional modules": rows} if rows else {}

    def built(self, root: RootState) -> None:
        self.install(root, exchange_of)

    def install(self, root: RootState, make_exchange: Callable[[RootState], Exchange]) -> None:
        """Let ranks skip the modules from now on. Collective where the exchange makes new groups.

        Args:
            make_exchange: makes what ranks agree over.
        """
        if not self.modules:
            return
        _kept[root.units[0]] = _Kept(tuple(self.modules), self.mean)
        regions = find_regions(root.units, self)
        if regions is None:
            return
        handles = (handle for index in regions.region_of for handle in root.units[index].handles)
        # On one rank there is nothing to gather, and no other to agree with.
        if any(handle.placement.num_ranks > 1 for handle in handles):
            optional = OptionalUnits(root, regions, make_exchange(root))
            root.extensions.add(optional)
            optional.begin(root)


def find_regions(units: Sequence[Unit], optional: OptionalModules) -> OptionalRegions | None:
    """The region of each optional unit; None if there is none.

    A unit belongs to the innermost optional module that it is, or lies under. So do units outside
    whose parameters a module under an optional one uses (tied parameters, a `hook_module`): they
    are regions of their own, unless they are the root or contain that optional module.

    Args:
        units: the root's list, outermost first.
    """
    around: dict[int, tuple[str, nn.Module]] = {}
    """The innermost optional module around each module, keyed by id."""
    parts_of = {name: list(modules_of(module)) for name, module in optional.modules.items()}
    for name, parts in sorted(parts_of.items(), key=lambda item: -len(item[1])):
        around.update((id(part), (name, optional.modules[name])) for part in parts)
    places = Counter(
        id(module) for _, module in units[0].module.named_modules(remove_duplicate=False)
    )
    region_of, is_reused = dict[int, str](), False
    for index, unit in enumerate(units):
        inside = {id(part) for part in modules_of(unit.module)}
        users = [around[id(user)][1] for user in unit.owners if id(user) in around]
        if id(unit.module) in around:
            region_of[index] = around[id(unit.module)][0]
        elif index and users and not any(id(user) in inside for user in users):
            region_of[index] = unit.fqn
        else:
            continue
        is_shared = any(id(user) not in inside for user in unit.owners)
        is_reused = is_reused or is_shared or places[id(unit.module)] > 1
    if not any(units[index].handles for index in region_of):
        return None  # All of their parameters are tied to units that every rank needs.
    return OptionalRegions(region_of, optional.mean, is_reused)


def optional_now(root: Unit) -> list[nn.Module]:
    """The modules that have the names of the root's optional modules now, with parameters."""
    kept = _kept.get(root)
    if kept is None:
        return []
    named = _Names(root.module).module_of
    found = [named[name] for name in kept.names if name in named]
    return [module for module in found if next(module.parameters(), None) is not None]


def names_of_optional(root: Unit) -> list[str]:
    """Names of the optional modules of a model, by its root unit."""
    kept = _kept.get(root)
    return [] if kept is None else list(kept.names)


class _Names:
    """Names of the modules of one model. A wrapper has the name of the module inside it."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.module_of: dict[str, nn.Module] = {}
        """The outermost module of each name."""
        self.name_of: dict[int, str] = {}
        """The first name of each module, keyed by id."""
        for name, module in root.named_modules():
            for part in (module, _unwrapped(module)):
                self.module_of.setdefault(clean_name(name), part)
                self.name_of.setdefault(id(part), clean_name(name))

    def find(self, module: nn.Module) -> str:
        """The name of a module inside the root.

        Raises:
            ValueError: it is not inside, or is the root.
        """
        name = self.name_of.get(id(module), self.name_of.get(id(_unwrapped(module))))
        own, outer = type(_unwrapped(module)).__name__, type(self._root).__name__
        if name:
            return name
        what = f"a {own} that is not inside the wrapped {outer}"
        if name is not None:
            what = f"the wrapped {outer} itself"
        elif any(part is self._root for part in module.modules()):
            what = f"a {own} that contains the wrapped {outer}"
        raise ValueError(
            f"optional_modules: contains {what}; list modules inside the wrapped one, which "
            "model.modules() returns on this rank"
        )


def _unwrapped(module: nn.Module) -> nn.Module:
    unit = get_unit(module)
    return module if unit is None else unit.module


def _nested(part: nn.Module, root: nn.Module, names: _Names) -> _Kept | None:
    """The optional modules of a ZeRO3 module inside `root`, by their names there."""
    unit = get_unit(part)
    kept = None if unit is None or unit.module is root else _kept.get(unit)
    if kept is None:
        return None
    start = names.name_of[id(part)]
    listed = (f"{start}.{name}" if start else name for name in kept.names)
    return kept._replace(names=tuple(name for name in listed if name in names.module_of))


def _common_mean(mean: OptionalMean, is_used: bool, nested: Sequence[OptionalMean]) -> OptionalMean:
    means = {*nested, mean} if is_used or not nested or mean != "all" else set(nested)
    if len(means) > 1:
        raise ValueError(
            f"optional_mean={mean!r}, but a ZeRO3 module inside was given "
            f"optional_mean={next(each for each in nested if each != mean)!r}; one model has one: "
            "pass the same to each"
        )
    return means.pop()


def _check_units(
    name: str,
    module: nn.Module,
    plans: Sequence[UnitPlan],
    groups: Mapping[int, AnyGroup],
    everyone: Sequence[int],
) -> None:
    """Raise ValueError unless `module` has units, and all of them are on all of the model's ranks.

    Args:
        name: FQN of the optional module.
        everyone: the ranks that share the model.
    """
    inside = {id(part) for part in modules_of(module)}
    under = [plan for plan in plans if id(_unwrapped(plan.module)) in inside]
    if not any(plan.originals or plan.tied_owners or _has_handles(plan) for plan in under):
        raise ValueError(_why_no_unit(name, module, inside, plans))
    for plan in under:
        ranks = _own_ranks(plan, groups)
        if ranks is not None and ranks != tuple(everyone):
            raise ValueError(
                f"optional_modules: {name!r} contains {plan.label!r}, which ranks {list(ranks)} "
                f"share, while ranks {list(everyone)} share the model: modules with a "
                "process_group of their own (experts) cannot be optional; list modules beside them"
            )


def _has_handles(plan: UnitPlan) -> bool:
    return plan.existing is not None and bool(plan.existing.handles)


def _own_ranks(plan: UnitPlan, groups: Mapping[int, AnyGroup]) -> tuple[int, ...] | None:
    if id(plan) in groups:
        return ranks_of(groups[id(plan)])
    if plan.existing is None or not plan.existing.handles:
        return None
    placement = plan.existing.handles[0].placement
    return placement.members if placement.data_parallel is None else placement.shard_group.ranks


def _warn_of_own_collectives(name: str, module: nn.Module) -> None:
    found = [n for n, part in module.named_modules() if isinstance(part, nn.SyncBatchNorm)]
    if found:
        inside = clean_name(f"{name}.{found[0]}".rstrip("."))
        warn_once(
            f"optional_modules: {name!r} contains a SyncBatchNorm ({inside!r}), whose statistics "
            "all ranks exchange in training: if a rank skips it, the others wait for that rank; "
            "use BatchNorm, or keep it in eval mode"
        )


def _why_no_unit(name: str, module: nn.Module, inside: set[int], plans: Sequence[UnitPlan]) -> str:
    start = f"optional_modules: {name!r} ({type(_unwrapped(module)).__name__}) has no unit"
    held = next(
        (
            (plan, original.fqn)
            for plan in plans
            for original in plan.originals
            if any(id(slot.module) in inside for slot in original.slots)
        ),
        None,
    )
    if held is None:
        has_any = next(module.parameters(), None) is not None
        why = "all of its parameters are ignored" if has_any else "it has no parameters"
        return f"{start}: {why}, so every rank may skip it anyway; remove it from the list"
    classes = ", ".join(dict.fromkeys(type(each).__name__ for each in _callable_parts(module)))
    return (
        f"{start}: its parameters, such as {held[1]!r}, belong to {held[0].label!r}, which every "
        f"rank needs; make it a unit of its own: auto_wrap_policy={{{classes}, ...}}"
    )


def _callable_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or the outermost ones inside it that can be called; with parameters."""
    if has_forward(module):
        yield _unwrapped(module)
        return
    for child in module.children():
        if next(child.parameters(), None) is not None:
            yield from _callable_parts(child)
