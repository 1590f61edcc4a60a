"""Guards `save_pretrained` of other libraries, which would write shards as if they were full.

`save_pretrained` (transformers, diffusers, peft) writes a config first and then fails on the
weights, or writes this rank's shards as if they were all. The guard raises before anything is
written. A model sharded by `layerzero.integrations` has a `save_pretrained` that works. A class
that has its own, without one of these libraries, keeps it: it may know of the shards.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from layerzero.flat.parameter_info import get_info
from layerzero.guards.stand_in import StandIn

_METHOD = "save_pretrained"
_LIBRARIES = ("transformers", "diffusers", "peft", "huggingface_hub")


def guard_saving(module: nn.Module) -> None:
    """Make `save_pretrained` of `module` and those inside raise while parameters are sharded.

    Inside `summon_full_params` it works as before.
    """
    for name, part in module.named_modules():
        owners = [cls.__module__ for cls in type(part).__mro__ if _METHOD in vars(cls)]
        if any(owner.partition(".")[0] in _LIBRARIES for owner in owners):
            _Saving.put(part, _METHOD, name)


def refuse_pieces(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """
    Raises:
        RuntimeError: an entry has the name of a sharded parameter, but another shape.
    """
    for name, parameter in module.named_parameters():
        info, given = get_info(parameter), state_dict.get(name)
        if info is not None and isinstance(given, torch.Tensor) and given.shape != info.shape:
            raise RuntimeError(
                f"{type(module).__name__}.{_METHOD}: state_dict has a piece of {name!r}, of shape "
                f"{tuple(given.shape)} instead of {tuple(info.shape)}; nothing was written. "
                "Parameters are this rank's shards: pass state_dict=layerzero.checkpoint."
                "get_model_state_dict(model, full=True, cpu_offload=True), called on every rank"
            )


class _Saving(StandIn):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, own = self.module, self.own
        # A class may take the state dict among its `**kwargs`.
        arguments = {**inspect.signature(own).bind_partial(*args, **kwargs).arguments, **kwargs}
        is_sharded = any(get_info(parameter) is not None for parameter in module.parameters())
        state_dict = arguments.get("state_dict")
        if is_sharded and state_dict is not None:
            refuse_pieces(module, state_dict)
        if not is_sharded or state_dict is not None:
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
