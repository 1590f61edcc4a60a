"""What is done to modules with sharded parameters as a whole: copies, exports and transforms fail,
conversions keep parameters sharded.

`to()` moves the shards of whole units to another device, such as the host between two phases of a
program, and back; forwards raise meanwhile (decision 0067). `to_empty` makes modules show whole
parameters until their first use (decision 0055).

Guards are attributes of the instance, like the methods that hooks.py wraps, so other modules of the
same class are not affected.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from layerzero.build.materialize import Materializer
from layerzero.errors import CollectiveError
from layerzero.flat.assigned import put_shard
from layerzero.flat.flat_param import FlatParam
from layerzero.flat.parameter_info import get_info
from layerzero.step.methods import put, shown_by
from layerzero.step.root import RootState, root_if_alive
from layerzero.step.unit import IDLE, Unit

_Convert = Callable[[torch.Tensor], torch.Tensor]


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
    """Sees whether a conversion is that of `to_empty`, which takes no values over, and whether it
    changes anything: `to(device)` after `to_empty` is no use of the model."""

    is_to_empty = changes = False

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func.__name__ != "__get__":  # Not `copy_` after it, as where memory is pinned.
            self.is_to_empty = func is torch.empty_like
            self.changes = not args or result is not args[0]
        return result


def guard(module: nn.Module) -> None:
    """Guard a module that shows sharded parameters, or is a unit."""
    module_ref = weakref.ref(module)

    def refuse_state() -> NoReturn:
        refuse_copies(type(module_ref()).__name__)

    def apply(convert: _Convert, recurse: bool = True) -> nn.Module:
        guarded = module_ref()
        assert guarded is not None, "its method is being called"
        parts = dict.fromkeys(guarded.modules() if recurse else (guarded,))
        with _SeesToEmpty() as seen:
            moved = {unit for part in parts for unit in _moved_by(part, convert)}
        # A construction puts values back after `param_init_fn` has emptied them.
        begins = seen.is_to_empty and not Materializer.is_initialising
        for unit in {unit for part in parts for unit in shown_by(part).values()}:
            root = root_if_alive(unit)
            if root is not None and not begins and (moved or seen.changes):
                root.structure.end_first_values()
        if moved:
            _move(moved, parts, convert)
        _convert(guarded, convert, recurse, keeps_sharded=begins)
        if begins:
            from layerzero.module_tree import first_values

            for unit in dict.fromkeys(shown_by(guarded).values()):
                first_values.begin(unit, guarded, parts)
        return guarded

    # Called by copy, deepcopy and pickle.
    put(module.__dict__, "__getstate__", refuse_state)
    # Called by to(), half(), cuda() and the like.
    put(module.__dict__, "_apply", apply)


def _sharded_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Our parameters on the module by name, in the form they have now: sharded or unsharded."""
    own = module._parameters
    return {name: p for name in shown_by(module) if (p := own.get(name)) is not None}


def _moved_by(module: nn.Module, convert: _Convert) -> Iterator[Unit]:
    """The units of parameters that `convert` moves to another device. Raises for another dtype."""
    for name, shown in _sharded_parameters(module).items():
        converted = convert(torch.empty(0, dtype=shown.dtype, device=shown.device))
        if converted.dtype != shown.dtype:
            info = get_info(shown)
            raise RuntimeError(
                f"parameter {name if info is None else info.fqn!r} is sharded as {shown.dtype} "
                f"and cannot become {converted.dtype} after wrapping; nothing was converted: cast "
                "the module before wrapping it, or compute in another dtype with "
                "MixedPrecision(param_dtype=...)"
            )
        if converted.device != shown.device:
            yield shown_by(module)[name]


def _move(units: Collection[Unit], parts: Collection[nn.Module], convert: _Convert) -> None:
    """Move the shards of units, each wholly in these modules. Raises if one cannot be moved now."""
    roots: dict[Unit, RootState | None] = {unit: root_if_alive(unit) for unit in units}
    for unit, root in roots.items():
        is_in_pass, handles = root is not None and root.is_in_pass, unit.handles
        reasons = {
            "a pass or summon_full_params uses them": is_in_pass or unit.training_state is not IDLE,
            "gradients of no_sync wait": any(h.gradients.is_waiting for h in handles),
            "offload keeps them on the host": any(h.params_on is not None for h in handles),
            "they are DTensors, whole here": any(h.is_whole and any(h.splits) for h in handles),
            "some of them would stay": not {*parts}.issuperset(unit.owners),
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            raise RuntimeError(
                f"{unit.label}: its parameters cannot move to another device, because {reason}; "
                "nothing was converted"
            )
    for unit, root in roots.items():
        unit.reshard()
        for handle in unit.handles:
            move(handle, convert)
        if root is not None:
            root.check_next_forward()


def move(flat: FlatParam, convert: _Convert) -> None:
    """Have the shards and their gradients lie where `convert` puts them; freed buffers stay where
    they are. Between steps."""
    with torch.inference_mode(False), torch.no_grad():
        put_shard(flat, convert(flat.main_shard.data))
        for index, parameter in enumerate(flat.sharded_params):
            parameter.data = flat.part_of(flat.main_shard.data, index)
            if parameter.grad is not None:
                # Another tensor: those without elements are made once, for every step.
                parameter.grad = convert(parameter.grad)
    flat.note_rewrite()
    flat.expect()


def _convert(module: Any, convert: _Convert, recurse: bool, keeps_sharded: bool) -> None:
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


_SHAPES = re.compile(r"\b(shapes?|sizes?|out of (bounds|range))\b")
_NOTE = "only this unit's own parameters are full here; those of other units are shards"


def note_shape(error: BaseException, label: str) -> None:
    """Extend an error about shapes: torch's own message does not show which tensors are shards."""
    text = str(error.args[0]) if error.args else ""
    if not isinstance(error, RuntimeError | IndexError) or isinstance(error, CollectiveError):
        return
    if _SHAPES.search(text) and _NOTE not in text:
        text += (
            f" ({label}: {_NOTE}. To use a parameter of another unit, call the module that "
            "owns it, put both modules into one unit (auto_wrap_policy), or register the method "
            "that uses it with layerzero.register_forward_method)"
        )
        error.args = (text, *error.args[1:])
