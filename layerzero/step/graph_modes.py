"""Refuses `torch.compile` with CUDA graphs inside sharded modules.

A CUDA graph keeps the addresses that it was recorded with. A unit's parameters may get others at
each gather, so a replay would read memory that is not theirs any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from layerzero.step.unit import Unit

_OPTION = "triton.cudagraphs"
_BACKEND = "cudagraphs"


def check_compile(unit: Unit, arguments: Mapping[str, Any]) -> None:
    """Check the keyword arguments of a `compile()` of the unit's module.

    Raises:
        ValueError: they turn CUDA graphs on, and the unit's parameters are on a device.
    """
    if any(_has_graphs(handle.gradients.device) for handle in unit.handles):
        _refuse(unit.label, _uses_graphs(**arguments))


def check_compiled(modules: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
    """Check (name, module) pairs that may have been compiled by the user.

    Raises:
        ValueError: one of them records CUDA graphs, and `device` has them.
    """
    if _has_graphs(device):
        for name, module in modules:
            _refuse(name or "the root unit", _records_graphs(module))


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` was compiled in place, or is what `torch.compile` returned."""
    return module._compiled_call_impl is not None or "dynamo_ctx" in module.__dict__


def _has_graphs(device: torch.device) -> bool:
    return device.type != "cpu"  # There the modes are without effect.


def _refuse(where: str, is_recorded: bool) -> None:
    if is_recorded:
        raise ValueError(
            f"{where}: this mode of torch.compile records CUDA graphs, which keep the addresses of "
            "parameters, but each gather gives full parameters new ones; use mode='default' or "
            "'max-autotune-no-cudagraphs'"
        )


def _uses_graphs(
    *,
    backend: Any = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> bool:
    """Whether `torch.compile` with these arguments records CUDA graphs."""
    if backend != "inductor":
        return bool(backend == _BACKEND)
    import torch._inductor.config as inductor_config
    from torch._inductor import list_mode_options

    chosen = list_mode_options(mode) if mode else {}
    given = {**chosen, **(options or {})}.get(_OPTION)
    return bool(inductor_config.triton.cudagraphs if given is None else given)


def _records_graphs(module: nn.Module) -> bool:
    """Whether `module` is what `torch.compile` returned, or was compiled in place, with graphs."""
    compiled = getattr(module, "_compiled_call_impl", None) or module
    get_config = getattr(compiled, "get_compiler_config", None)
    config = None if get_config is None else get_config()
    if config is not None:
        return bool(config.get(_OPTION))
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None:
        return False
    backend = torch._dynamo.eval_frame.innermost_backend(context.callback)
    return getattr(backend, "compiler_name", None) == _BACKEND
