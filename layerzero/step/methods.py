"""Methods and marks of ours on instances of the user's modules: put there, and taken away again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layerzero.step.tensors import cast_floating, find_tensors
from layerzero.step.unit import Unit

Method = Callable[..., Any]

_INSTALLED = "_layerzero_installed"
"""Attribute of a module: maps each method name to the former method, or None, and ours."""
_NAMES = "_layerzero_sharded"


def put(attributes: dict[str, Any], name: str, method: Method) -> None:
    """Replace a method in a module's `__dict__`: setattr on the result of `torch.compile(module)`
    would go to the module inside."""
    installed = attributes.setdefault(_INSTALLED, {})
    before = installed[name][0] if name in installed else attributes.get(name)
    installed[name] = (before, method)
    attributes[name] = method


def patched_methods(module: nn.Module) -> list[str]:
    """Names of our methods that other code has replaced since."""
    installed = module.__dict__.get(_INSTALLED, {})
    return [name for name, (_, ours) in installed.items() if module.__dict__.get(name) is not ours]


def uninstall(module: nn.Module) -> None:
    """Restore the methods from before wrapping; a compiled module is no longer compiled. It has no
    sharded parameters any more."""
    module.__dict__.pop(_NAMES, None)
    for name, (before, _) in module.__dict__.pop(_INSTALLED, {}).items():
        if before is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = before


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` was compiled in place, or is what `torch.compile` returned."""
    return module._compiled_call_impl is not None or "dynamo_ctx" in module.__dict__


def add_name(module: nn.Module, name: str, unit: Unit) -> None:
    """Register a parameter that a module shows as one of `unit`."""
    module.__dict__.setdefault(_NAMES, {})[name] = unit


def shown_by(module: nn.Module) -> dict[str, Unit]:
    """Names under which the module itself shows parameters, and the units of these."""
    return module.__dict__.get(_NAMES, {})


def own_method(module: nn.Module, name: str) -> Method | None:
    """`module.name`, without a reference to the module if possible.

    None: its class has it, where it is looked up at each call, for libraries that patch classes.
    """
    method: Method | None = module.__dict__.get(name)
    if method is not None:
        return method
    bound = getattr(module, name)
    function = getattr(bound, "__func__", None)
    if function is None or getattr(bound, "__self__", None) is not module:
        return bound
    if getattr(type(module), name, None) is function:
        return None
    # Bound again at each call: a bound method stored on its own module is a cycle, and the
    # module's memory would wait for the garbage collector.
    module_ref = weakref.ref(module)
    return functools.wraps(function)(
        lambda *args, **kwargs: function(module_ref(), *args, **kwargs)
    )


def run_in_float32(module: nn.Module) -> None:
    """Cast inputs of a module in a low-precision unit to float32, and its outputs back.

    Outputs get the dtype of the last input that was cast, as in FSDP1; if none was, they stay.
    """
    method, module_ref = own_method(module, "forward"), weakref.ref(module)

    @functools.wraps(method or type(module).forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        owner: Any = module_ref()
        run = method or functools.partial(type(owner).forward, owner)
        dtypes = [t.dtype for t in find_tensors((args, kwargs)) if t.is_floating_point()]
        cast = [dtype for dtype in dtypes if dtype != torch.float32]
        outputs = run(*cast_floating(args, torch.float32), **cast_floating(kwargs, torch.float32))
        return cast_floating(outputs, cast[-1]) if cast else outputs

    put(module.__dict__, "forward", forward)
