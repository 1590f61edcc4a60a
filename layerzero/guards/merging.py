"""Merging of adapters (peft) works on whole parameters; their products would mix shards.

Everything that merges (`merge_adapter`, `unmerge_adapter`, diffusers' `fuse_lora`) calls `merge` or
`unmerge` of each adapter's layer, so full parameters of the layer's units are shown to that call.
`merge_and_unload` replaces modules as well, which `summon` refuses between two layers, so the whole
model is shown to it.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from layerzero.guards.stand_in import StandIn
from layerzero.step.root import root_of
from layerzero.step.states import TrainingState
from layerzero.step.summon import SummonOptions, summon
from layerzero.step.unwrap import units_inside


def show_whole_to_merging(module: nn.Module) -> None:
    """Run the methods that merge adapters inside `summon`, on this module and those inside."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    for name, part in module.named_modules() if tuners is not None else ():
        if isinstance(part, tuners.BaseTunerLayer):
            _Merging.put(part, "merge", name)
            _Merging.put(part, "unmerge", name)
        elif isinstance(part, tuners.BaseTuner):
            _Merging.put(part, "merge_and_unload", name)


class _Merging(StandIn):
    """Collective over the ranks that share the model, outside `summon_full_params`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        units = units_inside(self.module)
        if all(unit.training_state is TrainingState.SUMMON_FULL_PARAMS for unit in units):
            return self.own(*args, **kwargs)
        what = f"{self._name}.{self._method}"
        options = SummonOptions(
            writeback=True, rank0_only=False, offload_to_cpu=False, with_grads=False
        )
        with summon(root_of(units[0]), units, options, what):
            return self.own(*args, **kwargs)
