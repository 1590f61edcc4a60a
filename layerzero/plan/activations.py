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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.utils.checkpoint import checkpoint

ActivationMode = Literal["composable", "wrapped", "wrapped_offload"]
_RECOMPUTATION = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
_ARGUMENTS_OF_MODE: dict[str, tuple[str, ...]] = {
    "composable": _RECOMPUTATION,
    "wrapped": (*_RECOMPUTATION, "checkpoint_fn"),
    "wrapped_offload": ("pin_memory",),
}
_NOT_REENTRANT: Mapping[str, Any] = {
    "use_reentrant": False,
    "checkpoint_impl": CheckpointImpl.NO_REENTRANT,
}
"""Arguments of torch's checkpoint functions, and the only value supported for each."""
_EXPECTED = (
    f"act_ckpt: expected one of {list(get_args(ActivationMode))}, a list of it and a mapping of "
    "arguments, or a mapping with 'mode', got {!r}"
)


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """How a module's activations are kept between its forward and its backward.

    Attributes:
        mode: "composable" or "wrapped": recomputed in backward. "wrapped_offload": kept in host
            memory.
        arguments: arguments of torch's checkpoint function, or `pin_memory`
            (docs/reference/plans.md).

    Raises:
        ValueError: an unknown mode or argument.
    """

    mode: ActivationMode
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in get_args(ActivationMode):
            raise ValueError(
                f"act_ckpt: expected one of {list(get_args(ActivationMode))}, got {self.mode!r}"
            )
        known = _ARGUMENTS_OF_MODE[self.mode]
        taken = {}
        for name, value in self.arguments.items():
            if name in _NOT_REENTRANT and self.mode != "wrapped_offload":
                if value != _NOT_REENTRANT[name]:
                    raise ValueError(
                        f"act_ckpt: {name}={value!r}: reentrant recomputation does not gather "
                        f"parameters again; leave {name} out"
                    )
            elif name not in known:
                raise ValueError(
                    f"act_ckpt: {self.mode!r} has no argument {name!r}; expected {list(known)}"
                )
            else:
                taken[name] = value
        object.__setattr__(self, "arguments", taken)


def read_act_ckpt(value: Any) -> ActivationCheckpointing | None:
    """Parse a mode, (mode,), (mode, arguments), or a mapping or object that has both.

    None and False mean that activations are kept as they are. Arguments may be None.

    Raises:
        ValueError, TypeError: none of these forms, or an unknown mode or argument.
    """
    if value is None or value is False:
        return None
    if isinstance(value, ActivationCheckpointing):
        return value
    mode: Any = None
    arguments: Any = None
    if isinstance(value, str):
        mode = value
    elif isinstance(value, Mapping):
        mode = value.get("mode")
        arguments = {name: each for name, each in value.items() if name != "mode"}
    elif isinstance(value, (list, tuple)) and len(value) in (1, 2):
        mode, arguments = value[0], value[1] if len(value) == 2 else None
    elif hasattr(value, "cfg"):  # ActCkptCfg of finetuning-scheduler
        mode, arguments = getattr(value, "mode", None), value.cfg
    if isinstance(mode, Enum):
        mode = mode.value
    arguments = {} if arguments is None else arguments
    if not isinstance(mode, str) or not isinstance(arguments, Mapping):
        raise TypeError(_EXPECTED.format(value))
    return ActivationCheckpointing(mode=mode, arguments=arguments)  # type: ignore[arg-type]


def checkpoint_activations(module: nn.Module, choice: ActivationCheckpointing) -> None:
    """Apply `choice` to one module that can be called."""
    if choice.mode == "composable":
        from torch.distributed._composable import checkpoint as composable_checkpoint

        composable_checkpoint(module, **choice.arguments)
        return
    own = module.__dict__.get("forward")
    forward = type(module).forward if own is None else own
    module_ref = weakref.ref(module)
    options, run = dict(choice.arguments), None
    if choice.mode == "wrapped":
        run = options.pop("checkpoint_fn", None)
        if run is None:
            run, options = checkpoint, {"use_reentrant": False, **options}

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        module = module_ref()
        assert module is not None, "its method is being called"
        # A partial, because Dynamo cannot trace the creation of a bound method.
        inside = functools.partial(forward, module) if own is None else own
        if run is not None:
            return run(inside, *args, **options, **kwargs)
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
