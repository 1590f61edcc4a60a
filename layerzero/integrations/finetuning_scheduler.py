"""ZeRO3StrategyAdapter: scheduled fine-tuning of a sharded model. See docs/lightning.md.

Pieces have the original names and their own `requires_grad`, whatever unit they lie in, so phases,
optimizer groups and checkpoints need no translation: what the scheduler does to an unsharded model
is right here. Left to the adapter is the plan, which must be known before the model is sharded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from finetuning_scheduler.strategy_adapters import StrategyAdapter
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.fsdp import CPUOffloadPolicy

from layerzero.integrations.lightning import ZeRO3Strategy
from layerzero.plan.options import MODULE_OPTIONS
from layerzero.plan.sharding_plan import ShardingPlan

_WILDCARD = re.compile(r"\{(\*|\d+-\d+)\}")
_OTHER_FIELDS = {each.name for each in fields(ShardingPlan)} - {"apply_modules", "defaults"}
_OTHER_FIELDS -= set(MODULE_OPTIONS)
"""Of a plan, that are no options: what `zero3_defaults` may hold besides."""


class ZeRO3StrategyAdapter(StrategyAdapter):
    """Connects finetuning-scheduler with `ZeRO3Strategy`; found by its entry point.

    Args, given as `FinetuningScheduler(strategy_adapter_cfg={...})`:
        zero3_plan: from names of modules, or regular expressions that match whole names, to options
            of these modules, as in `apply_modules` of a `ShardingPlan`; the last one wins. Its
            patterns (`layers.{*}`, `re:...`) are taken, too. None: the strategy's own policy.
        zero3_defaults: options of the whole model, and the other fields of a `ShardingPlan`.

    In both, `cpu_offload_policy` stands for `cpu_offload`: arguments of torch's `CPUOffloadPolicy`.

    Raises:
        ValueError, TypeError: a bad plan, or one beside that of the strategy.
    """

    def __init__(
        self,
        zero3_plan: Mapping[str, Mapping[str, Any] | None] | None = None,
        zero3_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("zero3_plan", zero3_plan), ("zero3_defaults", zero3_defaults)):
            if value is not None and not isinstance(value, Mapping):
                raise TypeError(f"{name}: expected a mapping, got {value!r}")
        self._plan = zero3_plan
        self._defaults = zero3_defaults or {}

    def on_before_init_fts(self) -> None:
        """Hand the plan to the strategy, which has not sharded the model yet."""
        strategy = self.pls_handle
        if not isinstance(strategy, ZeRO3Strategy):
            raise TypeError(
                f"ZeRO3StrategyAdapter: expected a ZeRO3Strategy, got {type(strategy).__name__}; "
                "in custom_strategy_adapters name it for 'layerzero' alone"
            )
        strategy.before_restore = self._resume
        if self._plan is None and not self._defaults:
            return
        modules = {name for name, _ in self.pl_module.named_modules()}
        apply_modules = {
            _pattern(key, modules): _translated(f"zero3_plan: {key!r}", own or {})
            for key, own in (self._plan or {}).items()
        }
        defaults = _translated("zero3_defaults", self._defaults)
        plan_fields = {name: defaults.pop(name) for name in _OTHER_FIELDS & defaults.keys()}
        plan = ShardingPlan(apply_modules=apply_modules, defaults=defaults, **plan_fields)
        strategy.use_plan(plan, "strategy_adapter_cfg")

    def _resume(self) -> None:
        """Tell the scheduler that `fit(ckpt_path=...)` goes on.

        It looks at `trainer.ckpt_path` in its setup, which Lightning sets after that.
        """
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.fts_handle._fts_state._resume_fit_from_ckpt = True


def _pattern(key: str, modules: set[str]) -> str:
    """A name, or a regular expression, as a pattern of a plan."""
    if not isinstance(key, str):
        raise TypeError(f"zero3_plan: expected names or regular expressions, got {key!r}")
    if key in modules or key.startswith("re:") or _WILDCARD.search(key):
        return key
    return f"re:{key}"


def _translated(where: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with `cpu_offload_policy` as a plan has it."""
    if not isinstance(options, Mapping):
        raise TypeError(f"{where}: expected a mapping of options, got {options!r}")
    own = dict(options)
    if "cpu_offload_policy" not in own:
        return own
    policy = own.pop("cpu_offload_policy")
    if "cpu_offload" in own:
        raise ValueError(f"{where}: cpu_offload_policy and cpu_offload are both given")
    if isinstance(policy, CPUOffloadPolicy):
        policy = {"pin_memory": policy.pin_memory}
    own["cpu_offload"] = policy
    return own
