"""ShardingPlan: describes by name patterns how a model is sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerzero.config import (
    FLAG,
    MixedPrecision,
    OffloadPolicy,
    ReshardAfterForward,
    prefetch_depth,
)
from layerzero.plan.activations import ActivationCheckpointing
from layerzero.plan.options import (
    MODULE_OPTIONS,
    ZERO3_OPTIONS,
    load_yaml,
    merge_precision,
    near_matches,
    read_options,
)
from layerzero.plan.patterns import parse_pattern
from layerzero.plan.resolve import Resolved
from layerzero.wrapping.refusals import check_module

_SHORTHANDS = (
    "param_dtype",
    "reduce_dtype",
    "output_dtype",
    "cast_forward_inputs",
    "reshard_after_forward",
    "cpu_offload",
    "act_ckpt",
)
"""Fields that are options of the whole model."""
_FROM_PATTERNS = (
    *("process_group", "auto_wrap_policy"),
    *("ignored_modules", "ignored_parameters", "optional_modules"),
)
"""Arguments of `ZeRO3` in whose place a plan has patterns, or `shard_with_plan` a mesh."""
_DEFAULTS = [*{*ZERO3_OPTIONS, *MODULE_OPTIONS}.difference(_FROM_PATTERNS)]


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
        hook_modules: patterns of modules whose forward unshards and reshards the units inside them,
            in place of the units' own.
        ep_plan: patterns of the expert units. Ranks have different experts, and shard each over the
            ranks that have the same ones (`expert_mesh` of `shard_with_plan`).
        local_experts: whether experts have the same names on every rank of the axis "ep" of
            `expert_mesh`. State dicts and checkpoints then number them consecutively over its
            ranks.
        param_dtype, reduce_dtype, output_dtype, cast_forward_inputs: as in `MixedPrecision`;
            dtypes, or their names. `output_dtype` applies to the whole model's outputs.
        reshard_after_forward: as in `ZeRO3`.
        cpu_offload: True, or a mapping of arguments of `OffloadPolicy`, in which `params` is True.
        act_ckpt: "composable", "wrapped" or "wrapped_offload"; with arguments a pair, or an
            `ActivationCheckpointing`. Applies to the outermost units.
        pregather: unshard all units before each forward starts, and wait for them.
        num_to_forward_prefetch, num_to_backward_prefetch: how many units are prefetched once their
            order is recorded. None: `forward_prefetch` and `backward_prefetch` of `defaults`
            decide; without them, one.
    """

    apply_modules: Mapping[str, Mapping[str, Any]] | Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignored_modules: Sequence[str] = ()
    ignored_parameters: Sequence[str] = ()
    optional: Sequence[str] = ()
    hook_modules: Sequence[str] = ()
    ep_plan: Sequence[str] = ()
    local_experts: bool = False
    param_dtype: torch.dtype | str | None = None
    reduce_dtype: torch.dtype | str | None = None
    output_dtype: torch.dtype | str | None = None
    cast_forward_inputs: bool | None = None
    reshard_after_forward: ReshardAfterForward | None = None
    cpu_offload: OffloadPolicy | Mapping[str, bool] | bool | None = None
    act_ckpt: ActivationCheckpointing | str | Sequence[Any] | None = None
    pregather: bool = False
    num_to_forward_prefetch: int | None = None
    num_to_backward_prefetch: int | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _SHORTHANDS}
        read: dict[str, Any] = {
            "apply_modules": _read_apply_modules(self.apply_modules),
            "defaults": read_options("defaults", self.defaults, _DEFAULTS),
            **read_options("plan", {n: v for n, v in given.items() if v is not None}, _SHORTHANDS),
        }
        for name in (
            "ignored_modules",
            "ignored_parameters",
            "optional",
            "hook_modules",
            "ep_plan",
        ):
            read[name] = read_patterns(name, getattr(self, name))
        for name, value in read.items():
            object.__setattr__(self, name, value)
        for name in ("pregather", "local_experts"):
            FLAG(name, getattr(self, name))
        for name in ("num_to_forward_prefetch", "num_to_backward_prefetch"):
            prefetch_depth(name, getattr(self, name) or 0)
        if self.pregather and self.optional:
            raise ValueError(
                f"plan: pregather and optional={list(self.optional)} are both given; pregather "
                "gathers all units before each forward, also those that every rank skips: leave "
                "out one of them"
            )

    @property
    def options(self) -> dict[str, Any]:
        """Options of the whole model."""
        given = {name: getattr(self, name) for name in _SHORTHANDS}
        return {**{n: v for n, v in given.items() if v is not None}, **self.defaults}

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
        Resolved(self, model).raise_or_warn()


def _read_apply_modules(value: Any) -> dict[str, dict[str, Any]]:
    given = value if isinstance(value, Mapping) else {}
    patterns = read_patterns("apply_modules", list(value) if value is given else value)
    options = {pattern: given.get(pattern) for pattern in patterns}
    return {
        text: read_options(f"apply_modules: {text!r}", {} if own is None else own, MODULE_OPTIONS)
        for text, own in options.items()
    }


def read_patterns(where: str, value: Any) -> tuple[str, ...]:
    """Check a list of patterns.

    Raises:
        TypeError, ValueError: it is something else; the message begins with `where`.
    """
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{where}: expected a list of patterns, got {value!r}")
    patterns = tuple(value)
    for pattern in patterns:
        try:
            parse_pattern(pattern)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from None
    return patterns
