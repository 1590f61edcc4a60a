"""Matches a plan's patterns with a model: units, their options, and every problem found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from layerzero.flat.names import WRAPPER_NAMES
from layerzero.flat.parameter_info import get_info
from layerzero.notices import some, warn_once
from layerzero.plan.options import near_matches
from layerzero.plan.patterns import parse_pattern
from layerzero.step.unit import get_unit
from layerzero.wrapping.refusals import has_forward


@dataclass
class ResolvedUnit:
    """A module that becomes a unit."""

    fqn: str
    module: nn.Module
    pattern: str
    """The last pattern that matches, which decides its options."""
    options: Mapping[str, Any]
    hook: nn.Module | None = None
    is_expert: bool = False


_SHARDED = "sharded already, and keeps its own options"
_NO_FORWARD = (
    "nothing would gather it, because it has no forward; list the modules inside it, or the module "
    "that uses it in hook_modules"
)


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


class Resolved:
    """The result of matching a plan with a model. Changes nothing; collects problems.

    Args:
        plan: a `ShardingPlan`, which lies above this file.
    """

    units: list[ResolvedUnit]
    """Units in the order of the module tree, without the root."""

    def __init__(self, plan: Any, model: nn.Module) -> None:
        self.units = []
        self.ignored_modules: list[nn.Module] = []
        self.ignored_parameters: list[nn.Parameter] = []
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self._root = model
        self._modules = _by_name(model)
        self._ignored: set[int] = set()
        self._match_ignored(plan.ignored_modules, plan.ignored_parameters)
        self._match_units(plan.apply_modules, plan.hook_modules)
        self._match_experts(plan.ep_plan)
        for text in plan.optional:
            self._match("optional", text)

    def raise_or_warn(self) -> None:
        """Raise one ValueError that lists all errors, if there are any; else give the warnings."""
        if self.errors:
            raise ValueError("\n".join(self.errors))
        for text in self.warnings:
            warn_once(text)

    def _match(self, key: str, text: str, known: Mapping[str, Any] | None = None) -> list[str]:
        """The names that a pattern matches; an error if there are none."""
        known = self._modules if known is None else known
        pattern = parse_pattern(text)
        found = [fqn for fqn in known if pattern.fullmatch(fqn) is not None]
        if not found:
            self.errors.append(_no_match(key, text, known))
        return found

    def _match_ignored(self, modules: Iterable[str], parameters: Iterable[str]) -> None:
        for text in modules:
            for fqn in self._match("ignored_modules", text):
                self.ignored_modules.append(self._modules[fqn])
                self._ignored |= {id(module) for module in self._modules[fqn].modules()}
        known = {
            f"{prefix}.{name}" if prefix else name: parameter
            for prefix, module in _named_modules(self._root)
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        for text in parameters:
            for fqn in self._match("ignored_parameters", text, known):
                self.ignored_parameters.append(known[fqn])

    def _match_units(self, patterns: Mapping[str, Mapping[str, Any]], hooks: Iterable[str]) -> None:
        """The last pattern that matches a module decides; of hook modules, the nearest around."""
        matched: dict[int, ResolvedUnit] = {}
        for text, options in patterns.items():
            for fqn in self._match("apply_modules", text):
                module = self._modules[fqn]
                matched[id(module)] = ResolvedUnit(fqn, module, text, options)
        found = {text: self._match("hook_modules", text) for text in hooks}
        pairs = ((fqn, text) for text, fqns in found.items() for fqn in fqns)
        hook_of = {fqn: text for fqn, text in pairs if has_forward(self._modules[fqn])}
        used = set[str]()
        skipped: dict[str, dict[str, list[str]]] = {text: {} for text in patterns}
        for fqn, module in self._modules.items():
            unit = matched.get(id(module))
            if unit is None or unit.fqn != fqn:
                continue
            around = [hook for hook in hook_of if fqn.startswith(f"{hook}.")]
            if around and fqn not in hook_of:
                nearest = max(around, key=len)
                unit.hook = self._modules[nearest]
                used.add(hook_of[nearest])
            reason = self._reason_against(unit)
            if reason is None:
                self.units.append(unit)
            else:
                skipped[unit.pattern].setdefault(reason, []).append(fqn)
        self._warn(skipped)
        for text in found:
            if found[text] and text not in used:
                self.errors.append(
                    f"hook_modules: {text!r} gathers nothing: expected modules with a forward, and "
                    "units inside them"
                )

    def _reason_against(self, unit: ResolvedUnit) -> str | None:
        """Why a matched module does not become a unit; None if it does."""
        parameters = list(unit.module.parameters())
        if id(unit.module) in self._ignored:
            return "ignored"
        if not parameters:
            return "it has no parameters"
        is_inside_unit = all(get_info(parameter) is not None for parameter in parameters)
        if is_inside_unit or get_unit(unit.module) is not None:
            return _SHARDED
        return None if unit.hook is not None or has_forward(unit.module) else _NO_FORWARD

    def _warn(self, skipped: Mapping[str, Mapping[str, list[str]]]) -> None:
        effective = {unit.pattern for unit in self.units}
        for text, by_reason in skipped.items():
            told = {
                reason: fqns
                for reason, fqns in by_reason.items()
                if text not in effective or reason in (_SHARDED, _NO_FORWARD)
            }
            if text not in effective and not by_reason:
                told = {"later patterns match the same modules": [text]}
            listed = "; ".join(f"{_quoted(fqns)}: {reason}" for reason, fqns in told.items())
            if listed:
                self.warnings.append(f"apply_modules: {text!r} does not apply to {listed}")

    def _match_experts(self, texts: Iterable[str]) -> None:
        for text in texts:
            found = self._match("ep_plan", text)
            experts = [unit for unit in self.units if unit.fqn in found]
            for unit in experts:
                unit.is_expert = True
            if found and not experts:
                self.errors.append(
                    f"ep_plan: {text!r} matches {_quoted(found)}, but no unit: list them in "
                    "apply_modules as well"
                )


def _quoted(fqns: Iterable[str]) -> str:
    return some(map(repr, fqns))


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
        pattern = parse_pattern(text)
    except ValueError as error:
        raise ValueError(f"optional_modules: {error}") from None
    known = _by_name(root)
    found = [module for name, module in known.items() if pattern.fullmatch(name) is not None]
    if not found:
        raise ValueError(_no_match("optional_modules", text, known))
    inside: set[int] = set()
    for module in found:
        if id(module) not in inside:
            inside |= {id(part) for part in module.modules()}
            yield module
