"""ZeRO3StrategyAdapter: scheduled fine-tuning of a sharded model. See docs/reference/lightning.md.

Sharded parameters keep the original names and have their own `requires_grad`, so phases, optimizer
groups and checkpoints need no translation: what the scheduler does to an unsharded model also works
here. The adapter only passes on the plan, which is needed before the model is sharded.

Note [What configure_model changes]
    The scheduler reads names and freezes parameters before `configure_model` runs. Wrappers that
    `configure_model` puts around layers (torch's checkpoint_wrapper, torch.compile) change names,
    so that phases would thaw nothing; parameters that it replaces, as some tensor-parallel styles
    do, would be trained from the start. So wrappers are left out of names from then on, frozen
    parameters are frozen again, and a missing scheduled name is an error.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from finetuning_scheduler.strategy_adapters import StrategyAdapter
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from layerzero import ShardingPlan
from layerzero.integrations.engine import MODULE_OPTIONS, clean_name, near_matches, some

_WILDCARD = re.compile(r"\{(\*|\d+-\d+)\}")
_OTHER_FIELDS = {each.name for each in fields(ShardingPlan)} - {"apply_modules", "defaults"}
_OTHER_FIELDS -= set(MODULE_OPTIONS)
"""Fields of a plan that are not options; `zero3_defaults` may have them as well."""


class ZeRO3StrategyAdapter(StrategyAdapter):
    """Connects finetuning-scheduler with `ZeRO3Strategy`; registered as an entry point.

    Args, given as `FinetuningScheduler(strategy_adapter_cfg={...})`:
        zero3_plan: a mapping from module names, or regular expressions for whole names, to options
            of these modules, as in `apply_modules` of a `ShardingPlan`; the last match wins. Its
            patterns (`layers.{*}`, `re:...`) work as well. None: the strategy's own policy.
        zero3_defaults: options of the whole model, and the other fields of a `ShardingPlan`.

    In both, `cpu_offload_policy` (arguments of torch's `CPUOffloadPolicy`) means `cpu_offload`, and
    `mp_policy` and `offload_policy` are those of `fully_shard`.

    Raises:
        ValueError, TypeError: a bad plan, or the strategy has one as well.
    """

    def __init__(
        self,
        zero3_plan: Mapping[str, Mapping[str, Any] | None] | None = None,
        zero3_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._plan = zero3_plan
        self._defaults = zero3_defaults or {}
        self._frozen: set[str] | None = None

    def on_before_init_fts(self) -> None:
        """Pass the plan to the strategy, which has not sharded the model yet."""
        strategy: Any = self.pls_handle
        strategy.before_restore = self._resume
        strategy.before_sharding = self._follow_changes
        _leave_out_wrappers(self.pl_module)
        if self._plan is None and not self._defaults:
            return
        modules = {name for name, _ in self.pl_module.named_modules()}
        apply_modules = {
            _pattern(key, modules): own or {} for key, own in (self._plan or {}).items()
        }
        defaults = dict(self._defaults)
        plan_fields = {name: defaults.pop(name) for name in _OTHER_FIELDS & defaults.keys()}
        plan = ShardingPlan(apply_modules=apply_modules, defaults=defaults, **plan_fields)
        strategy.use_plan(plan, "strategy_adapter_cfg")

    def on_after_init_fts(self) -> None:
        """Record the parameters that are frozen in the first phase."""
        super().on_after_init_fts()
        named = self.pl_module.named_parameters()
        self._frozen = {name for name, parameter in named if not parameter.requires_grad}

    def _follow_changes(self, module: nn.Module) -> None:
        """See Note [What configure_model changes]."""
        _leave_out_wrappers(module)
        if self._frozen is None:
            return
        parameters = dict(module.named_parameters())
        for depth, phase in self.fts_handle.ft_schedule.items():
            gone = [name for name in phase["params"] if name not in parameters]
            if gone:
                names = some([repr(name) for name in gone])
                raise ValueError(
                    f"ZeRO3StrategyAdapter: phase {depth} unfreezes {names}, which the module no "
                    f"longer has{near_matches(gone[0], parameters)}: configure_model, which runs "
                    "after the schedule is made, changed the names; change them in __init__"
                )
        for name in self._frozen & parameters.keys():
            parameters[name].requires_grad_(False)

    def _resume(self) -> None:
        """Mark the scheduler as resuming in `fit(ckpt_path=...)`: it checks `trainer.ckpt_path` in
        its setup, before Lightning sets that."""
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.fts_handle._fts_state._resume_fit_from_ckpt = True


def _leave_out_wrappers(module: nn.Module) -> None:
    """Leave the parts of wrappers out of the names of this module's modules, and so of parameters
    and buffers: the method is replaced on the instance."""
    module.__dict__["named_modules"] = functools.partial(_named_without_wrappers, module)


def _named_without_wrappers(
    module: nn.Module, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, nn.Module]]:
    for name, inner in type(module).named_modules(module, *args, **kwargs):
        yield clean_name(name), inner


def _pattern(key: str, modules: set[str]) -> str:
    if key in modules or key.startswith("re:") or _WILDCARD.search(key):
        return key
    return f"re:{key}"
