"""Applies `act_ckpt`: recomputes activations, or keeps them on the host, without renaming anything.

It is applied to the module before sharding. Its forward then runs inside the call that unshards it,
so a recomputed forward sees unsharded parameters. torch's wrapper modules for "wrapped" and
"wrapped_offload" would add a part to every name, so forward is wrapped on the instance instead.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from layerzero.plan.checkpointing import ActivationCheckpointing

Forward = Callable[..., Any]


def checkpoint_activations(module: nn.Module, choice: ActivationCheckpointing) -> None:
    """Apply `choice` to one module that can be called."""
    if choice.mode == "composable":
        from torch.distributed._composable import checkpoint as composable_checkpoint

        composable_checkpoint(module, **choice.arguments)
        return
    wrap = _recomputing if choice.mode == "wrapped" else _keeping_on_host
    forward = _forward_of(module)
    module.__dict__["forward"] = wrap(forward, weakref.ref(module), choice.arguments)


def _forward_of(module: nn.Module) -> Forward:
    """`module.forward` as a function that takes the module as its first argument."""
    own = module.__dict__.get("forward")
    if own is None:
        return type(module).forward

    @functools.wraps(own)
    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return forward


def _recomputing(
    forward: Forward, module_ref: Callable[[], nn.Module | None], arguments: Mapping[str, Any]
) -> Forward:
    options = dict(arguments)
    run = options.pop("checkpoint_fn", None)
    if run is None:
        run, options = checkpoint, {"use_reentrant": False, **options}

    @functools.wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        module = module_ref()
        assert module is not None, "its method is being called"
        # A partial, because Dynamo cannot trace the creation of a bound method.
        inside = functools.partial(forward, module)
        return run(inside, *args, **options, **kwargs)

    return recomputing


def _keeping_on_host(
    forward: Forward, module_ref: Callable[[], nn.Module | None], arguments: Mapping[str, Any]
) -> Forward:
    pin_memory = arguments.get("pin_memory", False)

    @functools.wraps(forward)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        module = module_ref()
        assert module is not None, "its method is being called"
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

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(module, *args, **kwargs)

    return keeping
