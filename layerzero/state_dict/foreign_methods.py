"""Methods of other libraries that would take shards for whole parameters: they save, or merge.

`save_pretrained` (transformers, diffusers, peft) writes a config first and then fails on the
weights, or writes this rank's shards as if they were all: it raises before anything is written. A
model sharded by `layerzero.integrations` has one that works, and a class that has its own, without
one of these libraries, keeps it: it may know of the shards.

Merging of adapters (peft) works on whole parameters; their products would mix shards. Everything
that merges (`merge_adapter`, `unmerge_adapter`, diffusers' `fuse_lora`) calls `merge` or `unmerge`
of each adapter's layer, so full parameters of the layer's units are shown to that call.
`merge_and_unload` replaces modules as well, which `summon` refuses between two layers, so the whole
model is shown to it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from layerzero.build.wrap import units_inside
from layerzero.flat.parameter_info import get_info
from layerzero.step.root import root_of
from layerzero.step.unit import TrainingState

_METHOD = "save_pretrained"
_LIBRARIES = ("transformers", "diffusers", "peft", "huggingface_hub")


def install(module: nn.Module) -> None:
    """Put stand-ins on `module` and those inside. Not collective.

    `save_pretrained` raises while parameters are sharded, and works inside `summon_full_params`;
    methods that merge adapters run inside `summon`.
    """
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    for name, part in module.named_modules():
        if all(get_info(parameter) is None for parameter in part.parameters()):
            continue  # It may be copied, and its methods are right.
        owners = [cls.__module__ for cls in type(part).__mro__ if _METHOD in vars(cls)]
        if any(owner.partition(".")[0] in _LIBRARIES for owner in owners):
            _replace(part, _METHOD, name, _save)
        if tuners is not None and isinstance(part, tuners.BaseTunerLayer):
            _replace(part, "merge", name, _merge)
            _replace(part, "unmerge", name, _merge)
        elif tuners is not None and isinstance(part, tuners.BaseTuner):
            _replace(part, "merge_and_unload", name, _merge)


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


def _replace(part: nn.Module, method: str, name: str, instead: Callable[..., Any]) -> None:
    """Replace a method of one instance. `instead` is called with the module, its class's method,
    bound, the names of module and method, and what the method is called with."""
    part_ref = weakref.ref(part)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        module = part_ref()
        own = functools.partial(getattr(type(module), method), module)
        return instead(module, own, f"{name}.{method}", *args, **kwargs)

    part.__dict__.setdefault(method, stand_in)


def _save(module: nn.Module, own: Any, what: str, /, *args: Any, **kwargs: Any) -> Any:
    # A class may take the state dict among its `**kwargs`.
    arguments = {**inspect.signature(own).bind_partial(*args, **kwargs).arguments, **kwargs}
    state_dict = arguments.get("state_dict")
    if all(get_info(parameter) is None for parameter in module.parameters()):
        return own(*args, **kwargs)
    if state_dict is not None:
        refuse_pieces(module, state_dict)
        return own(*args, **kwargs)
    raise RuntimeError(
        f"{type(module).__name__}.{_METHOD} would write this rank's shards instead of whole "
        "parameters; nothing was written. Call layerzero.integrations.transformers."
        "save_pretrained(model, folder) on every rank; or pass state_dict=layerzero.checkpoint."
        "get_model_state_dict(model, full=True, cpu_offload=True), made on every rank. Where the "
        "model has other modules than when it was wrapped, change it and save it within one "
        "`with model.summon_full_params(writeback=False):`"
    )


def _merge(module: nn.Module, own: Any, what: str, /, *args: Any, **kwargs: Any) -> Any:
    """Collective over the ranks that share the model, outside `summon_full_params`."""
    with summoned(module, what, writeback=True):
        return own(*args, **kwargs)


@contextmanager
def summoned(module: nn.Module, what: str, *, writeback: bool) -> Iterator[None]:
    """Show full parameters of the units inside `module`, unless `summon_full_params` does.

    Collective over the ranks that share the model, at entry and exit.

    Args:
        what: the user's call, for messages.
    """
    units = units_inside(module)
    if all(unit.training_state is TrainingState.SUMMON_FULL_PARAMS for unit in units):
        yield
        return
    from layerzero.state_dict.summon import SummonOptions, summon

    with summon(root_of(units[0]), units, SummonOptions(writeback=writeback), what):
        yield
