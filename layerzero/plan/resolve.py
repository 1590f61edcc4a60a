"""Matches a plan's patterns with a model: units, their options, and every problem found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from layerzero.build.wrap import UnitPlan, has_forward, plan_units
from layerzero.flat.names import WRAPPER_NAMES
from layerzero.flat.parameter_info import get_info
from layerzero.notices import some, warn_once
from layerzero.plan.options import near_matches
from layerzero.plan.patterns import NamePattern
from layerzero.step.unit import get_unit
from layerzero.zero3 import ZeRO3


class Named(NamedTuple):
    """A module under one of its names."""

    fqn: str
    module: nn.Module


@dataclass
class ResolvedUnit:
    """A module that becomes a unit."""

    fqn: str
    module: nn.Module
    pattern: int
    """Index of the last pattern that matches, which decides its options."""
    is_member: bool
    """Whether a pattern matches it and others: it is one of a series, such as a layer."""
    options: Mapping[str, Any]
    hook: Named | None = None
    is_expert: bool = False


@dataclass
class Row:
    """The matches of one pattern."""

    key: str
    """The plan's field that has the pattern."""
    pattern: str
    fqns: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    """Matched names that the pattern takes effect on: units, ignored objects, optional modules."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """The other matched names, grouped by the reason why the pattern has no effect on them."""

    def note(self, reason: str, fqn: str) -> None:
        self.notes.setdefault(reason, []).append(fqn)


@dataclass
class Resolved:
    """The result of matching a plan with a model."""

    units: list[ResolvedUnit] = field(default_factory=list)
    """Units in the order of the module tree, without the root."""
    ignored_modules: list[nn.Module] = field(default_factory=list)
    ignored_parameters: list[nn.Parameter] = field(default_factory=list)
    optional_modules: list[nn.Module] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def units_of(self, model: nn.Module) -> list[UnitPlan]:
        """The units that `model` has or will have, outermost first, the root included."""
        chosen = {id(unit.module) for unit in self.units}
        ignored = self.ignored_modules, self.ignored_parameters
        return plan_units(model, lambda module, fqn: id(module) in chosen, *ignored)[0]

    def outermost_units(self) -> list[ResolvedUnit]:
        """The units that no other one of these is around; of a unit around a series, its members
        take the place."""
        found: list[ResolvedUnit] = []
        for unit in self.units:
            inside = [other for other in self.units if other.fqn.startswith(f"{unit.fqn}.")]
            is_around_series = not unit.is_member and any(other.is_member for other in inside)
            is_inside = any(unit.fqn.startswith(f"{other.fqn}.") for other in found)
            if not is_around_series and not is_inside:
                found.append(unit)
        return found

    def raise_errors(self) -> None:
        """Raise one ValueError that lists all errors, if there are any."""
        if self.errors:
            raise ValueError("\n".join(self.errors))

    def warn(self, is_first: bool | None = None) -> None:
        """Issue each warning once, on one rank.

        Args:
            is_first: whether this rank warns; None: the first rank of the world does.
        """
        for text in self.warnings:
            warn_once(text, is_first=is_first)


_SHARDED = "sharded already"
_NO_FORWARD = "no forward"


def names(fqns: Sequence[str]) -> str:
    return some(map(repr, fqns))


def _named_modules(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its names, without the parts that wrappers add to names.

    `nn.Module.named_modules` is not used, because a model may override it without
    `remove_duplicate`.
    """
    yield prefix, root
    for name, child in root._modules.items():
        if child is not None:
            inside = prefix if name in WRAPPER_NAMES else f"{prefix}.{name}" if prefix else name
            yield from _named_modules(child, inside)


def _by_name(root: nn.Module) -> dict[str, nn.Module]:
    """The modules inside `root`; of a wrapper and the module inside it, the wrapper."""
    found: dict[str, nn.Module] = {}
    for fqn, module in _named_modules(root):
        if fqn:
            found.setdefault(fqn, module)
    return found


def _named_parameters(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every parameter under each of its names, without the parts that wrappers add to names."""
    return [
        (f"{prefix}.{name}" if prefix else name, parameter)
        for prefix, module in _named_modules(root)
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def resolve(plan: Any, model: nn.Module, *, has_own_units: bool = False) -> Resolved:
    """Match all patterns. Changes nothing; collects problems instead of raising them.

    Args:
        plan: a `ShardingPlan`, which lies above this file.
        has_own_units: the model may make units later (its own `fully_shard`).
    """
    resolver = _Resolver(plan, model)
    resolver.match_ignored()
    resolver.match_units()
    resolver.match_experts()
    if isinstance(plan.hook_modules, Mapping):
        resolver.match_hooks(plan.hook_modules)
    else:
        resolver.match_hooks_around(plan.hook_modules)
    resolver.drop_containers()
    resolver.match_optional(has_own_units)
    resolver.check()
    return resolver.result


class _Resolver:
    """Matches the patterns of one plan; `resolve` calls each public method once, in order."""

    def __init__(self, plan: Any, model: nn.Module) -> None:
        root = model.module if isinstance(model, ZeRO3) else model
        self.result = Resolved()
        self._plan = plan
        self._root = root
        self._is_sharded = get_unit(root) is not None
        self._modules = _by_name(root)
        self._ignored: set[int] = set()
        self._unit_rows: list[Row] = []

    def match_ignored(self) -> None:
        for text in self._plan.ignored_modules:
            row = self._row("ignored_modules", text, self._modules)
            row.used.extend(row.fqns)
            for fqn in row.fqns:
                self.result.ignored_modules.append(self._modules[fqn])
                self._ignored |= {id(module) for module in self._modules[fqn].modules()}
        parameters = dict(_named_parameters(self._root))
        for text in self._plan.ignored_parameters:
            row = self._row("ignored_parameters", text, parameters)
            row.used.extend(row.fqns)
            self.result.ignored_parameters.extend(parameters[fqn] for fqn in row.fqns)

    def match_units(self) -> None:
        patterns = self._plan.patterns
        for pattern, _ in patterns:
            self._unit_rows.append(self._row("apply_modules", pattern.text, self._modules))
        winners = {
            id(self._modules[fqn]): index
            for index, row in enumerate(self._unit_rows)
            for fqn in row.fqns
        }
        seen: set[int] = set()
        for fqn, module in self._modules.items():
            index = winners.get(id(module))
            if index is None:
                continue
            for row in self._unit_rows[:index]:
                if fqn in row.fqns:
                    row.note(f"taken by {patterns[index][0].text!r}", fqn)
            row = self._unit_rows[index]
            if fqn not in row.fqns:
                continue  # The winning pattern matches another name of the module.
            reason = "another name of one" if id(module) in seen else self._reason_against(module)
            seen.add(id(module))
            if reason is not None:
                row.note(reason, fqn)
                continue
            row.used.append(fqn)
            is_member = any(fqn in each.fqns and len(each.fqns) > 1 for each in self._unit_rows)
            self.result.units.append(
                ResolvedUnit(fqn, module, index, is_member, patterns[index][1])
            )

    def _reason_against(self, module: nn.Module) -> str | None:
        """Why a matched module does not become a unit; None if it does."""
        if id(module) in self._ignored:
            return "ignored"
        parameters = list(module.parameters())
        if not parameters:
            return "no parameters"
        is_inside_unit = all(get_info(parameter) is not None for parameter in parameters)
        if not self._is_sharded and (is_inside_unit or get_unit(module) is not None):
            return _SHARDED
        return None

    def match_experts(self) -> None:
        for text in self._plan.ep_plan:
            row = self._row("ep_plan", text, self._modules)
            for unit in self.result.units:
                if unit.fqn in row.fqns:
                    unit.is_expert = True
                    row.used.append(unit.fqn)
            self._require_units(row)

    def _require_units(self, row: Row) -> None:
        """Note an error if a pattern for units matched none, and no warning explains it."""
        if row.fqns and not row.used and not self._sharded_before.issuperset(row.fqns):
            self.result.errors.append(
                f"{row.key}: {row.pattern!r} matches {names(row.fqns)}, but no unit: list them in "
                "apply_modules as well"
            )

    @property
    def _sharded_before(self) -> set[str]:
        """Names of matched modules that user code has sharded already."""
        return {fqn for row in self._unit_rows for fqn in row.notes.get(_SHARDED, ())}

    def match_hooks(self, hooks: Mapping[str, str]) -> None:
        """Hook modules from a mapping keyed by unit patterns; a later pattern wins."""
        for owner, text in hooks.items():
            pattern, template = NamePattern.parse(owner), NamePattern.parse(text)
            row = self._row("hook_modules", owner, self._modules)
            for unit in self.result.units:
                match = pattern.match(unit.fqn)
                if match is None:
                    continue
                row.used.append(unit.fqn)
                where = f"hook_modules: {owner!r}: {text!r}"
                try:
                    self._hook(unit, template.fill(match, pattern), where)
                except ValueError as error:
                    self.result.errors.append(f"{where}: {error}")
            self._require_units(row)

    def _hook(self, unit: ResolvedUnit, fqn: str, where: str) -> None:
        module = self._modules.get(fqn)
        if module is None or not has_forward(module) or module is unit.module:
            fault = "no such module exists" if module is None else "it has no forward"
            if module is unit.module:
                fault = "this is the unit's own module, whose forward gathers it anyway"
            self.result.errors.append(
                f"{where}: {unit.fqn!r} would be gathered by {fqn!r}, but {fault}"
                f"{near_matches(fqn, self._modules) if module is None else ''}; name a module "
                "whose forward runs around all uses of the unit"
            )
            return
        unit.hook = Named(fqn, module)

    def match_hooks_around(self, texts: Sequence[str]) -> None:
        """Hook modules from a list: each unshards the units inside it; the innermost wins."""
        named: dict[str, Row] = {}
        rows = []
        for text in texts:
            rows.append(row := self._row("hook_modules", text, self._modules))
            named.update({f: row for f in row.fqns if has_forward(self._modules[f])})
        for unit in self.result.units:
            around = [fqn for fqn in named if unit.fqn.startswith(f"{fqn}.")]
            if around and unit.fqn not in named:
                fqn = max(around, key=len)
                unit.hook = Named(fqn, self._modules[fqn])
                named[fqn].used.append(unit.fqn)
        for row in rows:
            gathers = tuple(f"{fqn}." for fqn in row.fqns)
            if any(fqn.startswith(gathers) for fqn in self._sharded_before):
                continue  # A warning explains that the units inside are sharded already.
            if row.fqns and not row.used:
                self.result.errors.append(
                    f"hook_modules: {row.pattern!r} matches {names(row.fqns)}, but gathers "
                    "nothing: expected modules with a forward, with units inside them"
                )

    def drop_containers(self) -> None:
        """Drop units that no call would unshard; their parameters go to the unit around them."""
        for unit in list(self.result.units):
            if unit.hook is None and not has_forward(unit.module):
                self.result.units.remove(unit)
                row = self._unit_rows[unit.pattern]
                row.used.remove(unit.fqn)
                row.note(_NO_FORWARD, unit.fqn)
        for row in self._unit_rows:
            containers = row.notes.get(_NO_FORWARD)
            if not containers:
                continue
            kind = type(self._modules[containers[0]]).__name__
            self.result.warnings.append(
                f"apply_modules: {row.pattern!r} matches {names(containers)}, but a {kind} has no "
                "forward, so nothing would gather it: it is skipped, with its options; list the "
                f"modules inside it, such as {containers[0] + '.{*}'!r}, or name a hook module for "
                "it in hook_modules"
            )

    def match_optional(self, units_may_follow: bool) -> None:
        """Optional modules: of what a pattern matches, the outermost modules that have units."""
        units = {id(unit.module) for unit in self.result.units}
        for text in self._plan.optional:
            row = self._row("optional", text, self._modules)
            taken: dict[int, str] = {}
            """Name of the taken module around each module, keyed by id."""
            for fqn in row.fqns:
                module = self._modules[fqn]
                parts = list(module.modules())
                has_unit = any(id(part) in units or get_unit(part) is not None for part in parts)
                if any(module is each for each in self.result.optional_modules):
                    row.used.append(fqn)  # Another name, or another pattern.
                elif id(module) in taken:
                    row.note(f"inside {taken[id(module)]!r}", fqn)
                elif not has_unit:
                    row.note("no unit at or under it", fqn)
                else:
                    row.used.append(fqn)
                    taken.update((id(part), fqn) for part in parts)
                    self.result.optional_modules.append(module)
            if row.fqns and not row.used and not units_may_follow:
                self.result.errors.append(
                    f"optional: {text!r} matches {names(row.fqns)}, but no unit is at or under "
                    "them, so every rank would need their parameters: list them in apply_modules "
                    "as well"
                )

    def check(self) -> None:
        """Collect warnings and errors.

        Modules that are sharded already, patterns without effect, `act_ckpt` on a module without
        forward.
        """
        for row in self._unit_rows:
            if sharded := row.notes.get(_SHARDED):
                self.result.warnings.append(
                    f"apply_modules: {row.pattern!r} matches {names(sharded)}, which an earlier "
                    "ZeRO3 has sharded: it is skipped, with its options (act_ckpt included), and "
                    "keeps those of that ZeRO3; leave it out of the plan, or do not wrap it before"
                )
            if row.fqns and not row.used and not {_NO_FORWARD, _SHARDED} & {*row.notes}:
                why = "; ".join(f"{names(fqns)}: {why}" for why, fqns in row.notes.items())
                self.result.warnings.append(
                    f"apply_modules: {row.pattern!r} has no effect ({why}); later patterns "
                    "override earlier ones: put the more specific one later, or remove it"
                )
        for unit in self.result.units:
            if unit.options.get("act_ckpt") is not None and not has_forward(unit.module):
                self.result.errors.append(
                    f"apply_modules: {self._unit_rows[unit.pattern].pattern!r}: act_ckpt on "
                    f"{unit.fqn!r}, which has no forward; set it on the module that calls it"
                )

    def _row(self, key: str, text: str, known: Mapping[str, Any]) -> Row:
        """Add the row of a pattern with its matches; a pattern without matches is an error."""
        pattern = NamePattern.parse(text)
        row = Row(key, text, [fqn for fqn in known if pattern.match(fqn) is not None])
        self.result.rows.append(row)
        if not row.fqns:
            self.result.errors.append(_no_match(key, text, known))
        return row


def _no_match(key: str, text: str, known: Iterable[str]) -> str:
    """The message for a pattern that matches none of the known names."""
    kind = "parameter" if key == "ignored_parameters" else "module"
    # With their numbers replaced by {*}, all members of a series count as one suggestion.
    series = [re.sub("[0-9]+", "{*}", fqn) for fqn in known]
    return (
        f"{key}: {text!r} matches no {kind}{near_matches(text, [*series, *known])}; a pattern must "
        f"match a whole name of named_{kind}s()"
    )


def optional_by_name(root: nn.Module, listed: Any) -> Iterator[nn.Module]:
    """The `optional_modules` argument of `ZeRO3(root)`: each name replaced by what it matches.

    For adapters whose users configure a model that does not exist yet. Of what a name or pattern
    matches, modules inside another one are left out. Raises while it is iterated, which `ZeRO3`
    does where it can raise on every rank.

    Args:
        listed: names, patterns or modules.

    Raises:
        TypeError: not an iterable of these.
        ValueError: a name matches nothing; lists near matches.
    """
    if isinstance(listed, (str, nn.Module)) or not isinstance(listed, Iterable):
        got = type(listed).__name__ if isinstance(listed, nn.Module) else repr(listed)
        raise TypeError(f"optional_modules: expected a list of names or modules, got {got}")
    for each in listed:
        if isinstance(each, str):
            yield from _outermost(root, each)
        else:
            yield each


def _outermost(root: nn.Module, text: str) -> Iterator[nn.Module]:
    try:
        pattern = NamePattern.parse(text)
    except ValueError as error:
        raise ValueError(f"optional_modules: {error}") from None
    known = _by_name(root)
    found = [module for name, module in known.items() if pattern.match(name) is not None]
    if not found:
        raise ValueError(_no_match("optional_modules", text, known))
    inside: set[int] = set()
    for module in found:
        if id(module) not in inside:
            inside |= {id(part) for part in module.modules()}
            yield module
