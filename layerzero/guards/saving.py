"""Guards `save_pretrained` of other libraries, which would write shards as if they were full.

`save_pretrained` (transformers, diffusers, peft) writes a config first and then fails on the
weights, or writes this rank's shards as if they were all. The guard raises before anything is
written. A model sharded by `layerzero.integrations` has a `save_pretrained` that works.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from layerzero.flat.parameter_info import get_info
from layerzero.guards.stand_in import StandIn

_METHOD = "save_pretrained"


def guard_saving(module: nn.Module) -> None:
    """Make `save_pretrained` of `module` and those inside raise while parameters are sharded.

    Inside `summon_full_params` it works as before.
    """
    for name, part in module.named_modules():
        if callable(getattr(type(part), _METHOD, None)):
            _Saving.put(part, _METHOD, name)


class _Saving(StandIn):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, own = self.module, self.own
        arguments = inspect.signature(own).bind_partial(*args, **kwargs).arguments
        is_sharded = any(get_info(parameter) is not None for parameter in module.parameters())
        if not is_sharded or arguments.get("state_dict") is not None:
            return own(*args, **kwargs)
        what, why = (
            type(module).__name__,
            "would write this rank's shards instead of whole parameters",
        )
        if self._name:
            raise RuntimeError(
                f"{what}.{_METHOD} of {self._name!r} {why}; nothing was written. Call it on every "
                "rank inside `with model.summon_full_params(writeback=False):`, with "
                "is_main_process=True on the first rank only; or pass state_dict="
            )
        raise RuntimeError(
            f"{what}.{_METHOD} {why}; nothing was written. Call "
            "layerzero.integrations.transformers.save_pretrained(model, folder) on every rank, or "
            "pass state_dict=layerzero.checkpoint.get_model_state_dict(model, full=True, "
            "cpu_offload=True)"
        )
