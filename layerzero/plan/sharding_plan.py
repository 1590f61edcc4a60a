"""ShardingPlan: how a model is sharded, by names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from layerzero.construct.argument_types import check_module
from layerzero.plan.explain import explain
from layerzero.plan.fields import PlanFields
from layerzero.plan.options import near_matches
from layerzero.plan.resolve import resolve
from layerzero.plan.yaml_file import load


@dataclass(frozen=True, kw_only=True)
class ShardingPlan(PlanFields):
    """How a model is sharded, by patterns on its names. See docs/reference/plans.md.

    Attributes:
        apply_modules: patterns of the modules that become units, or a mapping from pattern to the
            options of its modules. A later pattern wins over an earlier one.
        defaults: options of the whole model: every argument of `ZeRO3` that is not a field here,
            and every option a module can have, which then has that where its pattern says nothing.
        ignored_modules: patterns of modules that are left alone with all they contain, whatever
            else names them.
        ignored_parameters: patterns of parameters that are left alone.
        hook_modules: whose forward gathers and frees a unit, if not its own module's: a mapping
            from patterns of units to the name of that module, in which wildcards stand for what
            those of the pattern matched; or patterns of modules that do this for units inside.
        ep_plan: patterns of the units that are experts: ranks have different ones, and shard them
            over the ranks that have the same (`expert_mesh` of `shard_with_plan`).
        local_experts: experts have the same names on every rank of the axis "ep" of `expert_mesh`:
            in state dicts and checkpoints their numbers go on from rank to rank of it.
        param_dtype, reduce_dtype, output_dtype, cast_forward_inputs: as in `MixedPrecision`;
            dtypes, or their names. `output_dtype` is that of the whole model's outputs.
        reshard_after_forward: as in `ZeRO3`.
        cpu_offload: True, or a mapping of arguments of `OffloadPolicy`, in which `params` is True.
        act_ckpt: "composable", "wrapped" or "wrapped_offload"; with arguments a pair, a mapping
            with "mode", or an `ActivationCheckpointing`. Applies to the head of each step
            (docs/reference/plans.md).
        pregather: gather all units before each forward starts, and wait for them.
        broadcast_buffers: where nothing is sharded, start forwards with the buffers of the first
            rank, as `DistributedDataParallel` does.
        num_to_forward_prefetch, num_to_backward_prefetch: how many steps ahead are gathered. None:
            what `forward_prefetch` and `backward_prefetch` of `defaults` say, one if nothing.
    """

    @classmethod
    def from_dict(cls, plan: Mapping[str, Any]) -> ShardingPlan:
        """A plan from a mapping of its fields, as a file has it.

        Raises:
            ValueError, TypeError: an unknown field or option, or a bad value, which is named.
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
        # A key without a value is None in YAML: as if it were not there.
        return cls(**{name: value for name, value in plan.items() if value is not None})

    @classmethod
    def from_yaml(cls, path: str | Path) -> ShardingPlan:
        """A plan from a YAML file. Needs PyYAML.

        Raises:
            ImportError: PyYAML is not installed.
            ValueError, TypeError: as `from_dict`, or not YAML; the file is named.
        """
        plan = load(Path(path))
        try:
            return cls.from_dict(plan)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from None

    def validate(self, model: nn.Module) -> None:
        """Check the plan against a model that is not sharded yet. Not collective.

        Warns of what has no effect, on the first rank.

        Raises:
            ValueError: names that do not fit; all of them at once, with near matches.
            RuntimeError: the model is sharded already.
        """
        check_module(model)
        resolved = resolve(self, model)
        resolved.raise_errors()
        resolved.warn()

    def explain(self, model: nn.Module) -> str:
        """The expected order as lines `a -> [b, c]`, and a table of what each pattern matched.

        Not collective; the model, sharded or not, stays as it is. What `validate` would say is at
        the end.
        """
        return explain(self, model)
