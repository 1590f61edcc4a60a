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
from typing import Any, TypeVar

import torch
from torch import nn

from layerzero.flat.parameter_info import get_info
from layerzero.step.root import root_of
from layerzero.step.unit import TrainingState
from layerzero.step.unwrap import units_inside

_METHOD = "save_pretrained"
_LIBRARIES = ("transformers", "diffusers", "peft", "huggingface_hub")
S = TypeVar("S", bound="_StandIn")


def install(module: nn.Module) -> None:
    """Put stand-ins on `module` and those inside. Not collective.

    `save_pretrained` raises while parameters are sharded, and works inside `summon_full_params`;
    methods that merge adapters run inside `summon`.
    """
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    for name, part in module.named_modules():
        owners = [cls.__module__ for cls in type(part).__mro__ if _METHOD in vars(cls)]
        if any(owner.partition(".")[0] in _LIBRARIES for owner in owners):
            _Saving.put(part, _METHOD, name)
        if tuners is not None and isinstance(part, tuners.BaseTunerLayer):
            _Merging.put(part, "merge", name)
            _Merging.put(part, "unmerge", name)
        elif tuners is not None and isinstance(part, tuners.BaseTuner):
            _Merging.put(part, "merge_and_unload", name)


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


class _StandIn:
    """Takes the place of a method on one instance; the class keeps its own.

    It is called instead of `method` of `module`, whose name in the model is `name`.
    """

    def __init__(self, module: nn.Module, method: str, name: str) -> None:
        self._module_ref = weakref.ref(module)
        self._method = method
        self._name = name

    @classmethod
    def put(cls, module: nn.Module, method: str, name: str) -> None:
        """Take the method's place, unless the instance has its own."""
        module.__dict__.setdefault(method, cls(module, method, name))

    @property
    def module(self) -> nn.Module:
        module = self._module_ref()
        assert module is not None, "it is called through the module, and copied with it"
        return module

    @property
    def own(self) -> Callable[..., Any]:
        """The method of the class, bound."""
        module = self.module
        return functools.partial(getattr(type(module), self._method), module)

    def __deepcopy__(self: S, memo: dict[int, Any]) -> S:
        return type(self)(memo.get(id(self.module), self.module), self._method, self._name)


class _Saving(_StandIn):
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
        remedy = (
            "Call layerzero.integrations.transformers.save_pretrained(model, folder) on every "
            "rank; or pass state_dict=layerzero.checkpoint.get_model_state_dict(model, full=True, "
            "cpu_offload=True), made on every rank"
        )
        units = units_inside(module)
        if units and root_of(units[0]).structure.changes():  # as after `merge_and_unload`
            remedy = (
                "The model has other modules than when it was wrapped: change it and save it "
                "within one `with model.summon_full_params(writeback=False):`"
            )
        raise RuntimeError(
            f"{type(module).__name__}.{_METHOD} would write this rank's shards instead of whole "
            f"parameters; nothing was written. {remedy}"
        )


class _Merging(_StandIn):
    """Collective over the ranks that share the model, outside `summon_full_params`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with summoned(self.module, f"{self._name}.{self._method}", writeback=True):
            return self.own(*args, **kwargs)


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
