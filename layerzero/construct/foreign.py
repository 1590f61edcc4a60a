"""Methods that other libraries gave a module, and that would take its pieces for the whole.

`save_pretrained` (transformers, diffusers, peft) writes a config first and fails on the weights, or
writes shards as if they were all. It is refused before anything is written. A model that
`layerzero.integrations` sharded has one that is right.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from torch import nn

from layerzero.core.parameter_info import get_info

_METHOD = "save_pretrained"


def guard_saving(module: nn.Module) -> None:
    """Let no module inside write pieces; full parameters (`summon_full_params`) it may write."""
    for name, part in module.named_modules():
        if callable(getattr(type(part), _METHOD, None)) and _METHOD not in part.__dict__:
            part.__dict__[_METHOD] = _Guard(part, name)


class _Guard:
    """In place of the method, on the instance alone."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module_ref = weakref.ref(module)
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module_ref()
        assert module is not None, "it is called through the module"
        own = getattr(type(module), _METHOD)
        arguments = inspect.signature(own).bind_partial(module, *args, **kwargs).arguments
        pieces = any(get_info(parameter) is not None for parameter in module.parameters())
        if not pieces or arguments.get("state_dict") is not None:
            return own(module, *args, **kwargs)
        what, why = type(module).__name__, "has this rank's pieces, expected whole parameters"
        if self._name:
            raise RuntimeError(
                f"{what}.{_METHOD} of {self._name!r} {why}; nothing was written. Call it on every "
                "rank, with is_main_process=True on the first alone, inside `with "
                "model.summon_full_params(writeback=False):`, or pass state_dict="
            )
        raise RuntimeError(
            f"{what}.{_METHOD} {why}; nothing was written. Call "
            "layerzero.integrations.transformers.save_pretrained(model, folder) on every rank, or "
            "pass state_dict=layerzero.checkpoint.get_model_state_dict(model, full=True, "
            "cpu_offload=True)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Guard:
        module = self._module_ref()
        assert module is not None, "it is copied with the module"
        return _Guard(memo.get(id(module), module), self._name)
