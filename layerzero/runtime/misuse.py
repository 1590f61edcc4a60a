"""Extends an error message if the failing line used a sharded parameter like a full one.

torch's own message names only shapes. The search runs after an error: it resolves the expressions
of the failing lines through modules and local variables, and calls nothing. Errors inside a call of
a unit are handled there (hooks.py). Others are handled if uncaught, by `sys.excepthook`; anything
earlier would cost time in every operation on a parameter.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from types import CodeType, TracebackType
from typing import Any

from torch import nn

from layerzero.core.parameter_info import get_info

_EXPRESSION = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[-?\d+\])*")
_STEP = re.compile(r"-?\w+")
_EXPLAINED = "_layerzero_explained"
_HOOK = "_layerzero_hook"


def explain(error: BaseException) -> None:
    """Append the sharded parameters that the failing lines used, if any, to the error's text."""
    if not isinstance(error, (RuntimeError, ValueError, IndexError, TypeError)):
        return
    if hasattr(error, _EXPLAINED) or not (error.args and isinstance(error.args[0], str)):
        return
    setattr(error, _EXPLAINED, True)
    found: dict[str, str] = {}
    traceback = error.__traceback__
    while traceback is not None:
        for sharded_param in _sharded_params_used_at(traceback):
            info = get_info(sharded_param)
            if info is not None:
                start, stop = info.range
                found[info.fqn] = f"elements {start} to {stop} of shape {tuple(info.shape)}"
        traceback = traceback.tb_next
    if found:
        listed = "; ".join(f"{fqn!r} ({what})" for fqn, what in found.items())
        error.args = (
            f"{error.args[0]}\nThe line that failed uses sharded parameters outside the forward of "
            f"their unit, where each is this rank's 1-D shard: {listed}. Call the module that owns "
            "the parameter, put it into the unit of the module that uses it (auto_wrap_policy), "
            "register the method with layerzero.register_forward_method, or use "
            "summon_full_params()",
            *error.args[1:],
        )


def explain_uncaught() -> None:
    """Explain uncaught errors, too, before the current `sys.excepthook` prints them."""
    print_error = sys.excepthook
    if hasattr(print_error, _HOOK):
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        try:
            explain(error)
        finally:
            print_error(kind, error, traceback)

    setattr(hook, _HOOK, True)
    sys.excepthook = hook


def _sharded_params_used_at(traceback: TracebackType) -> Iterator[nn.Parameter]:
    frame = traceback.tb_frame
    names = {**frame.f_globals, **frame.f_locals}
    for number in _lines(frame.f_code, traceback):
        for match in _EXPRESSION.finditer(linecache.getline(frame.f_code.co_filename, number)):
            first, *steps = _STEP.findall(match.group())
            value = names.get(first)
            for step in steps:
                value = _step(value, step)
            if isinstance(value, nn.Parameter):
                yield value


def _lines(code: CodeType, traceback: TracebackType) -> range:
    """Lines of the expression that failed; Python before 3.11 gives only the first."""
    first = last = traceback.tb_lineno
    if hasattr(code, "co_positions"):
        positions = list(code.co_positions())[traceback.tb_lasti // 2]
        first, last = positions[0] or first, positions[1] or last
    return range(first, last + 1)


def _step(value: Any, name: str) -> Any:
    """An attribute or item of `value`, without running code of its class."""
    if isinstance(value, nn.Module):
        module = value.__dict__.get("_wrapped", value)  # The module inside a wrapper.
        if module is not value and name == "module":
            return module
        if name.startswith("-") and int(name) >= -len(module._modules):
            return list(module._modules.values())[int(name)]
        for where in (module._parameters, module._modules, module.__dict__):
            if name in where:
                return where[name]
        return None
    if isinstance(value, (list, tuple)) and name.lstrip("-").isdigit():
        index = int(name)
        return value[index] if -len(value) <= index < len(value) else None
    return getattr(value, "__dict__", {}).get(name)
