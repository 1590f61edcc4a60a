"""Guards on modules with sharded parameters: copying fails, conversions keep parameters sharded.

Guards are attributes of the instance, like the methods that hooks.py wraps, so other modules of the
same class are not affected.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from layerzero.flat.parameter_info import get_info
from layerzero.step.methods import put, uninstall
from layerzero.step.unit import Unit

_NAMES = "_layerzero_sharded"
_Convert = Callable[[torch.Tensor], torch.Tensor]
show_first_values: Callable[..., None] | None = None
"""Called with a unit, a module that shows parameters of it, and all modules that `to_empty` has
emptied. None while a construction runs `param_init_fn`, after which it puts values back."""


def refuse_copies(name: str) -> NoReturn:
    """Raise NotImplementedError: two modules would share hooks, sharded parameters and the unit."""
    raise NotImplementedError(
        f"{name}: a module that ZeRO3 sharded cannot be copied or pickled (copy, deepcopy, pickle, "
        "torch.save of the module itself). To average weights copy sharded parameters: {name: "
        "p.detach().clone() for name, p in model.named_parameters()}; for a second model copy the "
        "module before wrapping it, and wrap both; to save, use layerzero.checkpoint.save, or "
        "torch.save of layerzero.checkpoint.get_model_state_dict(model, full=True)"
    )


def refuse_export(label: str) -> NoReturn:
    """Raise NotImplementedError: a trace would contain gathers, and parameters that are freed."""
    raise NotImplementedError(
        f"{label}: a sharded model cannot be exported or traced (torch.export, torch.onnx, "
        "torch.jit.trace). Call full = layerzero.checkpoint.get_model_state_dict(model, full=True, "
        "cpu_offload=True, rank0_only=True) on every rank; on the first rank, "
        "load_state_dict(full) into an unwrapped module, and export that"
    )


def refuse_transform(label: str) -> NoReturn:
    """Raise NotImplementedError: a transform would take the engine's own tensors for the user's."""
    raise NotImplementedError(
        f"{label}: torch.func transforms (vmap, grad, jvp) cannot run a sharded module's forward; "
        "use torch.autograd.grad or torch.autograd.forward_ad, or transform inside a unit's forward"
    )


class _SeesToEmpty(TorchFunctionMode):
    """Sees whether a conversion is that of `to_empty`, which takes no values over."""

    is_to_empty = False

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ != "__get__":  # Not `copy_` after it, as where memory is pinned.
            self.is_to_empty = func is torch.empty_like
        return func(*args, **kwargs or {})


def install(module: nn.Module) -> None:
    """Guard a module that shows sharded parameters, or is a unit."""
    module_ref = weakref.ref(module)

    def refuse_state() -> NoReturn:
        refuse_copies(type(module_ref()).__name__)

    def apply(convert: _Convert, recurse: bool = True) -> nn.Module:
        guarded = module_ref()
        assert guarded is not None, "its method is being called"
        parts = dict.fromkeys(guarded.modules() if recurse else (guarded,))
        with _SeesToEmpty() as seen:
            for part in parts:
                _check_conversion(part, convert)
        if seen.is_to_empty and show_first_values is not None:
            _convert(guarded, convert, recurse, keeps_sharded=True)
            for unit in dict.fromkeys(shown_by(guarded).values()):
                show_first_values(unit, guarded, parts)
            return guarded
        for unit in {unit for part in parts for unit in shown_by(part).values()}:
            root: Any = unit.context.owner() if unit.has_joined else None
            if root is not None:
                root.structure.end_first_values()
        return _convert(guarded, convert, recurse, keeps_sharded=False)

    # Called by copy, deepcopy and pickle.
    put(module.__dict__, "__getstate__", refuse_state)
    # Called by to(), half(), cuda() and the like.
    put(module.__dict__, "_apply", apply)


def add_name(module: nn.Module, name: str, unit: Unit) -> None:
    """Register a parameter of a guarded module as one of `unit`."""
    module.__dict__.setdefault(_NAMES, {})[name] = unit


def shown_by(module: nn.Module) -> dict[str, Unit]:
    """Names under which the module itself shows parameters, and the units of these."""
    return module.__dict__.get(_NAMES, {})


def remove(module: nn.Module) -> None:
    """The module has no sharded parameters any more."""
    module.__dict__.pop(_NAMES, None)
    uninstall(module)


def _sharded_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Our parameters on the module by name, in the form they have now: sharded or unsharded."""
    parameters = module._parameters
    return {
        name: parameter
        for name in shown_by(module)
        if (parameter := parameters.get(name)) is not None
    }


def _check_conversion(module: nn.Module, convert: _Convert) -> None:
    for name, shown in _sharded_parameters(module).items():
        sample = torch.empty(0, dtype=shown.dtype, device=shown.device)
        converted = convert(sample)
        if converted.dtype != shown.dtype or converted.device != shown.device:
            info = get_info(shown)
            raise RuntimeError(
                f"parameter {name if info is None else info.fqn!r} is sharded as {shown.dtype} on "
                f"{shown.device} and cannot become {converted.dtype} on {converted.device} after "
                "wrapping; nothing was converted: cast or move the module before wrapping it, or "
                "compute in another dtype with MixedPrecision(param_dtype=...)"
            )


def _convert(module: Any, convert: _Convert, recurse: bool, keeps_sharded: bool) -> nn.Module:
    """`_apply` of the module's class, but sharded parameters stay the same objects.

    torch may replace every parameter by a new object (torch.__future__), which would lack our mark.
    """
    sharded = _sharded_parameters(module)
    for name in sharded:
        module._parameters[name] = None
    try:
        type(module)._apply(module, convert, recurse)
    finally:
        module._parameters.update(sharded)
    with torch.no_grad():
        for parameter in () if keeps_sharded else dict.fromkeys(sharded.values()):
            parameter.data = convert(parameter.data)
            if parameter.grad is not None:
                parameter.grad.data = convert(parameter.grad.data)
    return module


_SHAPES = re.compile(r"\b(shape|size)s?\b")
_NOTE = "only this unit's own parameters are full here; those of other units are shards"


def note_shape(error: BaseException, label: str) -> None:
    """Extend an error about shapes: torch's own message does not show which tensors are shards."""
    text = str(error.args[0]) if error.args else ""
    if isinstance(error, RuntimeError) and _SHAPES.search(text) and _NOTE not in text:
        text += (
            f" ({label}: {_NOTE}. To use a parameter of another unit, call the module that "
            "owns it, put both modules into one unit (auto_wrap_policy), or register the method "
            "that uses it with layerzero.register_forward_method)"
        )
        error.args = (text, *error.args[1:])


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` was compiled in place, or is what `torch.compile` returned."""
    return module._compiled_call_impl is not None or "dynamo_ctx" in module.__dict__
