"""ShardingPlan: describes by name patterns how a model is sharded."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from layerzero.build.arguments import check_module
from layerzero.build.wrap import UnitPlan
from layerzero.notices import columns
from layerzero.plan.fields import PlanFields
from layerzero.plan.options import near_matches
from layerzero.plan.resolve import Resolved, Row, names, resolve
from layerzero.zero3 import ZeRO3

_DEEPEST = 64
"""Lists and mappings inside each other, in a YAML file."""


@dataclass(frozen=True, kw_only=True)
class ShardingPlan(PlanFields):
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
        own = ""
        if callable(getattr(module, "fully_shard", None)):
            own = f" ({type(module).__name__}.fully_shard may override this)"
        lines = [
            f"{len(units)} unit{'s' * (len(units) > 1)} of {type(module).__name__}{own}",
            self.prefetched,
            "",
            *_table(resolved, units),
        ]
        if resolved.problems:
            lines += ["", *(f"problem: {text}" for text in resolved.problems)]
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


def load_yaml(path: Path) -> Any:
    """The content of a YAML file as plain data; no other objects are constructed.

    Raises:
        ImportError: PyYAML is not installed.
        ValueError: not YAML, or a duplicate key (PyYAML would silently take the last one).
    """
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ImportError(
            f"{path}: reading YAML needs PyYAML: pip install pyyaml, or pass the plan's fields to "
            "ShardingPlan.from_dict"
        ) from error

    class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
        """A loader that raises for duplicate keys."""

        def fetch_flow_collection_start(self, token_class: Any) -> None:
            # PyYAML's time grows with the square of the depth.
            if self.flow_level == _DEEPEST:
                raise RecursionError
            super().fetch_flow_collection_start(token_class)

    def construct_mapping(loader: Any, node: Any) -> dict[Any, Any]:
        # Keys that a merge key (<<) brings in may be overridden, so they do not count.
        nodes = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [loader.construct_object(key, deep=True) for key in nodes]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                line = nodes[index].start_mark.line + 1
                raise ValueError(f"{path}: line {line}: the key {key!r} occurs twice")
        loader.flatten_mapping(node)
        return dict(loader.construct_pairs(node, deep=True))

    UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, construct_mapping)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeys)
    except yaml.YAMLError as error:
        raise ValueError(
            f"{path}: not YAML: {error}; put quotes around a pattern that starts with '*' or '{{', "
            "or has braces inside [...] or {...}"
        ) from None
    except RecursionError:
        raise ValueError(f"{path}: lists or mappings are nested too deeply for a plan") from None
