"""ShardingPlan: describes by name patterns how a model is sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerzero.build.arguments import check_module
from layerzero.build.wrap import UnitPlan
from layerzero.config import (
    FLAG,
    MixedPrecision,
    OffloadPolicy,
    ReshardAfterForward,
    prefetch_depth,
)
from layerzero.notices import columns
from layerzero.plan.activations import ActivationCheckpointing
from layerzero.plan.options import (
    GIVEN_TWICE,
    MODULE_OPTIONS,
    ZERO3_OPTIONS,
    load_yaml,
    merge_precision,
    near_matches,
    read_options,
    refuse_twice,
)
from layerzero.plan.patterns import NamePattern
from layerzero.plan.resolve import Resolved, Row, names, resolve
from layerzero.zero3 import ZeRO3

_SHORTHANDS = (
    "param_dtype",
    "reduce_dtype",
    "output_dtype",
    "cast_forward_inputs",
    "reshard_after_forward",
    "cpu_offload",
    "act_ckpt",
)
"""Fields that are options of the whole model, and so cannot be in `defaults` as well."""


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Describes by name patterns how a model is sharded. See docs/reference/plans.md.

    Attributes:
        apply_modules: patterns of the modules that become units, or a mapping from pattern to the
            options of its modules. A later pattern wins over an earlier one.
        defaults: options of the whole model: arguments of `ZeRO3` that are not fields here, and
            options of modules, which apply to each unit whose pattern does not set them.
        ignored_modules: patterns of modules that are not sharded, with everything inside, even if
            other patterns match them.
        ignored_parameters: patterns of parameters that are not sharded.
        optional: patterns of modules that a rank may skip (`optional_modules` of `ZeRO3`). Of what
            one pattern matches, modules inside another one are left out.
        hook_modules: modules whose forward unshards and reshards a unit in place of the unit's own
            module. A mapping from unit patterns to the name of the module, in which wildcards stand
            for what those of the pattern matched; or patterns of modules that do this for the units
            inside them.
        ep_plan: patterns of the expert units. Ranks have different experts, and shard each over the
            ranks that have the same ones (`expert_mesh` of `shard_with_plan`).
        local_experts: whether experts have the same names on every rank of the axis "ep" of
            `expert_mesh`. State dicts and checkpoints then number them consecutively over its
            ranks.
        param_dtype, reduce_dtype, output_dtype, cast_forward_inputs: as in `MixedPrecision`;
            dtypes, or their names. `output_dtype` applies to the whole model's outputs.
        reshard_after_forward: as in `ZeRO3`.
        cpu_offload: True, or a mapping of arguments of `OffloadPolicy`, in which `params` is True.
        act_ckpt: "composable", "wrapped" or "wrapped_offload"; with arguments a pair, a mapping
            with "mode", or an `ActivationCheckpointing`. Applies to the outermost units
            (docs/reference/plans.md).
        pregather: unshard all units before each forward starts, and wait for them.
        broadcast_buffers: if nothing is sharded, start forwards with the buffers of the first rank,
            as `DistributedDataParallel` does.
        num_to_forward_prefetch, num_to_backward_prefetch: how many units are prefetched once their
            order is recorded. None: `forward_prefetch` and `backward_prefetch` of `defaults`
            decide; without them, one.
    """

    apply_modules: Mapping[str, Mapping[str, Any]] | Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignored_modules: Sequence[str] = ()
    ignored_parameters: Sequence[str] = ()
    optional: Sequence[str] = ()
    hook_modules: Mapping[str, str] | Sequence[str] = ()
    ep_plan: Sequence[str] = ()
    local_experts: bool = False
    param_dtype: torch.dtype | str | None = None
    reduce_dtype: torch.dtype | str | None = None
    output_dtype: torch.dtype | str | None = None
    cast_forward_inputs: bool | None = None
    reshard_after_forward: ReshardAfterForward | None = None
    cpu_offload: OffloadPolicy | Mapping[str, bool] | bool | None = None
    act_ckpt: ActivationCheckpointing | str | Sequence[Any] | Mapping[str, Any] | None = None
    pregather: bool = False
    broadcast_buffers: bool = True
    num_to_forward_prefetch: int | None = None
    num_to_backward_prefetch: int | None = None

    def __post_init__(self) -> None:
        read: dict[str, Any] = {
            "apply_modules": _read_apply_modules(self.apply_modules),
            "ignored_modules": _read_patterns("ignored_modules", self.ignored_modules),
            "ignored_parameters": _read_patterns("ignored_parameters", self.ignored_parameters),
            "optional": _read_patterns("optional", self.optional),
            "hook_modules": _read_hook_modules(self.hook_modules),
            "ep_plan": _read_ep_plan(self.ep_plan),
            "defaults": read_options("defaults", self.defaults, [*ZERO3_OPTIONS, *MODULE_OPTIONS]),
            **read_options("plan", self._given_shorthands, _SHORTHANDS),
        }
        for name, value in read.items():
            object.__setattr__(self, name, value)
        for name in ("pregather", "broadcast_buffers", "local_experts"):
            FLAG(name, getattr(self, name))
        for name in ("num_to_forward_prefetch", "num_to_backward_prefetch"):
            _check_number(name, getattr(self, name))
        self._refuse_given_twice()
        if self.pregather and self.optional:
            raise ValueError(
                f"plan: pregather and optional={list(self.optional)} are both given; pregather "
                "gathers all units before each forward, also those that every rank skips: leave "
                "out one of them"
            )

    @property
    def _given_shorthands(self) -> dict[str, Any]:
        """Fields that are options of the whole model, where they were given."""
        given = {name: getattr(self, name) for name in _SHORTHANDS}
        return {name: value for name, value in given.items() if value is not None}

    def _refuse_given_twice(self) -> None:
        given = self._given_shorthands
        pairs = [(name, name) for name in given] + [(two, one) for one, two in GIVEN_TWICE]
        if self.num_to_forward_prefetch is not None:
            given["num_to_forward_prefetch"] = self.num_to_forward_prefetch
            pairs.append(("num_to_forward_prefetch", "forward_prefetch"))
        if self.num_to_backward_prefetch and self.defaults.get("backward_prefetch", 1) is None:
            given["num_to_backward_prefetch"] = self.num_to_backward_prefetch
            pairs.append(("num_to_backward_prefetch", "backward_prefetch"))
        refuse_twice("plan", pairs, given, self.defaults, ", in defaults,")

    @property
    def patterns(self) -> list[tuple[NamePattern, Mapping[str, Any]]]:
        """The parsed patterns of `apply_modules`, each with its options."""
        assert isinstance(self.apply_modules, Mapping), "__post_init__ made it a mapping"
        return [(NamePattern.parse(text), own) for text, own in self.apply_modules.items()]

    @property
    def options(self) -> dict[str, Any]:
        """Options of the whole model."""
        return {**self._given_shorthands, **self.defaults}

    @property
    def mixed_precision(self) -> MixedPrecision:
        """Mixed precision of the whole model."""
        return merge_precision(MixedPrecision(), self.options)

    @property
    def num_forward(self) -> int:
        """Number of units prefetched in forward."""
        if self.num_to_forward_prefetch is not None:
            return self.num_to_forward_prefetch
        return prefetch_depth("forward_prefetch", self.defaults.get("forward_prefetch", True))

    @property
    def num_backward(self) -> int:
        """Number of units prefetched in backward."""
        if self.num_to_backward_prefetch is not None:
            return self.num_to_backward_prefetch
        return int(self.defaults.get("backward_prefetch", True) is not None)

    @classmethod
    def from_dict(cls, plan: Mapping[str, Any]) -> ShardingPlan:
        """Make a plan from a mapping of its fields, as parsed from a file.

        Raises:
            ValueError, TypeError: an unknown field or option, or a bad value; the message names it.
        """
        if not isinstance(plan, Mapping):
            raise TypeError(f"plan: expected a mapping of fields, got {plan!r}")
        known = [each.name for each in fields(cls)]
        for name in plan:
            if name not in known:
                raise ValueError(
                    f"plan: unknown key {name!r} (value {plan[name]!r})"
                    f"{near_matches(str(name), known)}; expected {known}"
                )
        # A key without a value is None in YAML, and counts as not given.
        return cls(**{name: value for name, value in plan.items() if value is not None})

    @classmethod
    def from_yaml(cls, path: str | Path) -> ShardingPlan:
        """Make a plan from a YAML file. Needs PyYAML.

        Raises:
            ImportError: PyYAML is not installed.
            ValueError, TypeError: as `from_dict`, or not YAML; the message names the file.
        """
        plan = load_yaml(Path(path))
        try:
            return cls.from_dict(plan)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from None

    def validate(self, model: nn.Module) -> None:
        """Check the plan against a model that is not sharded yet. Not collective.

        The first rank warns about patterns that have no effect.

        Raises:
            ValueError: names do not fit; lists all of them, with near matches.
            RuntimeError: the model is sharded already.
        """
        check_module(model)
        resolved = resolve(self, model)
        resolved.raise_errors()
        resolved.warn()

    def explain(self, model: nn.Module) -> str:
        """The units, how many are prefetched, and a table of what each pattern matched.

        Not collective; does not change the model, which may be sharded. Problems that `validate`
        would report are listed at the end.
        """
        resolved = resolve(self, model)
        module = model.module if isinstance(model, ZeRO3) else model
        units = resolved.units_of(module)
        lines = [
            f"{len(units)} unit{'s' * (len(units) > 1)} of {type(module).__name__}",
            f"units prefetched along recorded orders: {self.num_forward} in forward, "
            f"{self.num_backward} in backward",
            "",
            *_table(resolved, units),
        ]
        if problems := [*resolved.errors, *resolved.warnings]:
            lines += ["", *(f"problem: {text}" for text in problems)]
        return "\n".join(lines)


def _table(resolved: Resolved, units: Sequence[UnitPlan]) -> list[str]:
    numels = {unit.fqn: _num_parameters(unit) for unit in units}
    table = [
        ("pattern", "field", "matched", "used", "parameters", "names"),
        ("(root)", "", "1", "1", f"{numels['']:,}", ""),
    ]
    for row in resolved.rows:
        is_units = row.key == "apply_modules"
        numel = f"{sum(numels.get(fqn, 0) for fqn in row.used):,}" if is_units else ""
        found = str(len(row.fqns)), str(len(row.used)), numel, "; ".join(_names(row, resolved))
        table.append((row.pattern, row.key, *found))
    return columns(table, (0, 1, 5))


def _num_parameters(unit: UnitPlan) -> int:
    """Number of elements of the parameters that the unit owns, or will own."""
    if unit.existing is not None:
        return unit.existing.num_parameters
    return sum(original.parameter.numel() for original in unit.originals)


def _names(row: Row, resolved: Resolved) -> Iterator[str]:
    if row.used:
        hooks = {unit.fqn: unit.hook for unit in resolved.units}
        is_hook = row.key == "hook_modules"
        yield names(
            [f"{f} by {hook.fqn}" if is_hook and (hook := hooks.get(f)) else f for f in row.used]
        )
    for reason, fqns in row.notes.items():
        yield f"not {names(fqns)}: {reason}"


def _read_apply_modules(value: Any) -> dict[str, dict[str, Any]]:
    if isinstance(value, Mapping):
        items = [(pattern, {} if own is None else own) for pattern, own in value.items()]
    else:
        items = [(pattern, {}) for pattern in _read_patterns("apply_modules", value)]
    read: dict[str, dict[str, Any]] = {}
    for pattern, own in items:
        _parse("apply_modules", pattern)
        where = f"apply_modules: {pattern!r}"
        why_not = "it applies to the whole model: put it into defaults"
        read[pattern] = read_options(where, own, MODULE_OPTIONS, why_not)
    return read


def _read_hook_modules(value: Any) -> dict[str, str] | tuple[str, ...]:
    if not isinstance(value, Mapping):
        return _read_patterns("hook_modules", value)
    for owner, hook in value.items():
        _parse("hook_modules", owner)
        _parse(f"hook_modules: {owner!r}", hook)
    return dict(value)


def _read_ep_plan(value: Any) -> tuple[str, ...]:
    if not isinstance(value, Mapping):
        return _read_patterns("ep_plan", value)
    units = value.get("apply_efsdp_modules") or value.get("apply_modules") or ["layers.{*}.experts"]
    raise TypeError(
        f"ep_plan: expected a list of patterns of units that are experts, got the mapping "
        f"{dict(value)!r}; write ep_plan: {list(units)!r}, and the same names in apply_modules. "
        "These units are sharded over the axis edp of expert_mesh; the model itself splits "
        "experts over ranks and routes tokens"
    )


def _read_patterns(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected a list of patterns, got {value!r}")
    patterns = tuple(value)
    for pattern in patterns:
        _parse(name, pattern)
        if patterns.count(pattern) > 1:
            raise ValueError(f"{name}: {pattern!r} occurs twice; remove one")
    return patterns


def _parse(name: str, pattern: Any) -> NamePattern:
    try:
        parsed = NamePattern.parse(pattern)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    if not pattern:
        raise ValueError(
            f"{name}: expected a pattern, got ''; the whole model is always a unit, whose options "
            "are fields of the plan and its defaults"
        )
    return parsed


def _check_number(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}: expected a number of units >= 0 or None, got {value!r}")
