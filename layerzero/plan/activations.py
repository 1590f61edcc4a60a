"""Activation checkpointing of a plan (`act_ckpt`): parses the option, and applies it to modules.

It is applied to the module before sharding. Its forward then runs inside the call that unshards it,
so a recomputed forward sees unsharded parameters. torch's wrapper modules for "wrapped" and
"wrapped_offload" would add a part to every name, so forward is wrapped on the instance instead.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

ActivationMode = Literal["composable", "wrapped", "wrapped_offload"]


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """How a module's activations are kept between its forward and its backward.

    Attributes:
        mode: "composable" and "wrapped": recomputed in backward. "wrapped_offload": kept in host
            memory.
        arguments: of torch's `checkpoint`; or `pin_memory`. Recomputation is never reentrant,
            which would not gather parameters again.

    Raises:
        ValueError: an unknown mode, or arguments that are no mapping.
    """

    mode: ActivationMode
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_mode = self.mode in get_args(ActivationMode)
        if not is_mode or not isinstance(self.arguments, Mapping):
            raise ValueError(
                f"act_ckpt: expected one of {list(get_args(ActivationMode))}, alone or in a list "
                f"with a mapping of arguments, got {self.mode!r} and {self.arguments!r}"
            )


def read_act_ckpt(value: Any) -> ActivationCheckpointing | None:
    """Parse a mode, (mode,), (mode, arguments), or finetuning-scheduler's ActCkptCfg.

    None and False mean that activations are kept as they are. Arguments may be None.

    Raises:
        ValueError: an unknown mode.
    """
    if value is None or value is False or isinstance(value, ActivationCheckpointing):
        return value or None
    mode, arguments = value, None
    if isinstance(value, (list, tuple)) and len(value) in (1, 2):
        mode, arguments = (*value, None)[:2]
    elif hasattr(value, "cfg"):
        mode, arguments = value.mode, value.cfg
    mode = mode.value if isinstance(mode, Enum) else mode
    return ActivationCheckpointing(mode=mode, arguments=arguments or {})


def checkpoint_activations(module: nn.Module, choice: ActivationCheckpointing) -> None:
    """Apply `choice` to one module that can be called."""
    own = module.__dict__.get("forward")
    forward = type(module).forward if own is None else own
    module_ref = weakref.ref(module)
    options = dict(choice.arguments)
    recomputes = choice.mode != "wrapped_offload"
    if recomputes:  # The second is an argument of torch's checkpoint_wrapper.
        options = {**options, "use_reentrant": False}
        options.pop("checkpoint_impl", None)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        module = module_ref()
        assert module is not None, "its method is being called"
        # A partial, because Dynamo cannot trace the creation of a bound method.
        inside = functools.partial(forward, module) if own is None else own
        if recomputes:
            return checkpoint(inside, *args, **options, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(*_to_host_and_back(module, **options)):
            return inside(*args, **kwargs)

    module.__dict__["forward"] = wrapped


def _to_host_and_back(
    module: nn.Module, pin_memory: bool = False
) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Hooks that keep what autograd saves on the host."""
    # Parameters are unsharded again in backward, so only activations are copied to the host.
    stays = {parameter.untyped_storage()._cdata for parameter in module.parameters()}

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage()._cdata in stays:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=pin_memory)
        return tensor.device, host.copy_(tensor, non_blocking=pin_memory)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=pin_memory)

    return pack, unpack
