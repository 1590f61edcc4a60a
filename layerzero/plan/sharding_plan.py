"""ShardingPlan: describes by name patterns how a model is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from layerzero.build.argument_types import check_module
from layerzero.plan.explain import explain
from layerzero.plan.fields import PlanFields
from layerzero.plan.options import near_matches
from layerzero.plan.resolve import resolve
from layerzero.plan.yaml_file import load


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
            with "mode", or an `ActivationCheckpointing`. Applies to the head of each step
            (docs/reference/plans.md).
        pregather: unshard all units before each forward starts, and wait for them.
        broadcast_buffers: if nothing is sharded, start forwards with the buffers of the first rank,
            as `DistributedDataParallel` does.
        num_to_forward_prefetch, num_to_backward_prefetch: how many steps are prefetched once their
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
        plan = load(Path(path))
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
        return explain(self, model)
