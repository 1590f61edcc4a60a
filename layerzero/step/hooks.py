"""Connects the engine to a step: wraps module methods, and hooks outputs in the autograd graph.

Methods are wrapped on the instance (methods.py) instead of using module hooks, because the engine
must see exceptions (module hooks are skipped on KeyboardInterrupt) and methods other than
`forward`. The call object is a local variable of the wrapper, so calls of one unit never share
bookkeeping. Its backward hooks are on the outputs' nodes in the graph, so it does not matter what
happens to the output tensors afterwards.

Note [A cast belongs to one call]
    `torch.autocast` casts a float32 parameter once and keeps the cast until its outermost context
    ends. A later call would join the graph at a cast that is older than the call, possibly of
    weights that have changed; and in backward the gradient would reach the parameter only after the
    unit counts as done (Note [When a unit is done in backward] in backward.py). So inside a unit's
    call autocast keeps no cast and uses none: each use of a weight casts it anew, and its gradients
    add up in float32.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import OrderedDict
from types import GeneratorType
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from layerzero.flat.names import and_wrapped
from layerzero.notices import warn_once
from layerzero.step.backward import ForwardCall
from layerzero.step.methods import Method, is_compiled, own_method, put
from layerzero.step.operations import uncompiled
from layerzero.step.root import root_of
from layerzero.step.tensors import cast_floating, find_tensors, move
from layerzero.step.unit import SUMMON_FULL_PARAMS, Unit

_OF_ITERTOOLS = (each for each in vars(itertools).values() if isinstance(each, type))
_LAZY = frozenset({GeneratorType, map, filter, zip, enumerate, *_OF_ITERTOOLS})
"""Types of results that may run the module's code after its forward has returned."""


def install_on_calls(module: nn.Module, unit: Unit, casts: bool = True) -> None:
    """Make every call of `module`, compiled or not, a forward call of `unit`.

    Args:
        casts: whether to cast inputs and outputs by the unit's mixed precision.
    """
    if type(module).compile is nn.Module.compile:
        # `module.compile()` compiles only what runs inside the calls of `unit`.
        module_ref = weakref.ref(module)
        compile_inside = module.__dict__.get("compile")
        call_impl = module.__dict__.get("_call_impl")

        @functools.wraps(nn.Module.compile)
        def compile_and_install(*args: Any, **kwargs: Any) -> None:
            module = module_ref()
            assert module is not None, "its method is being called"
            if compile_inside is not None:  # The module is wrapped for another unit, too.
                compile_inside(*args, **kwargs)
            else:
                inside = call_impl or nn.Module._call_impl.__get__(module)
                module.__dict__["_compiled_call_impl"] = torch.compile(inside, *args, **kwargs)
            install(module, "_compiled_call_impl", unit, casts=casts)

        put(module.__dict__, "compile", compile_and_install)
    if module._compiled_call_impl is not None:
        install(module, "_compiled_call_impl", unit, casts=casts)
    # `_call_impl` too: it runs the user's module hooks, which then see full parameters.
    install(module, "_call_impl", unit, casts=casts)
    install(module, "forward", unit, casts=casts)


def install(
    module: nn.Module, name: str, unit: Unit, *, is_entry: bool = True, casts: bool = True
) -> None:
    """Make `module.name(...)` a forward call of `unit`.

    A call inside a running call of the unit belongs to that one.

    Args:
        is_entry: False for modules inside the unit. Their calls count as calls of the unit only if
            it does not show its unsharded parameters, that is, when they are called directly.
        casts: whether to cast inputs and outputs by the unit's mixed precision.
    """
    own, module_ref = own_method(module, name), weakref.ref(module)

    @functools.wraps(own or getattr(type(module), name))
    def forward(*args: Any, **kwargs: Any) -> Any:
        module = module_ref()
        method = own or functools.partial(getattr(type(module), name), module)
        if (unit.shows_unsharded or not unit.handles) and (unit.depth or not is_entry):
            return method(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _call_uncompiled(unit, method, args, kwargs, casts)
        return _call(unit, method, args, kwargs, casts)

    put(module.__dict__, name, forward)


@uncompiled
def _call(
    unit: Unit, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any], casts: bool
) -> Any:
    for owner in unit.tied_owners:
        summoned = owner.training_state is SUMMON_FULL_PARAMS
        if not (owner.shows_unsharded or summoned):
            # A tied parameter belongs to a unit that was not called: make this its call, too.
            inside = functools.partial(_call, unit, method)
            return _call(owner, inside, (args, kwargs, casts), {}, casts)
    if unit.training_state is SUMMON_FULL_PARAMS:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{unit.label}: forward with gradients inside summon_full_params: the gradients "
                "would not be reduced; leave the context first, or use torch.no_grad()"
            )
        return method(*args, **kwargs)
    root = root_of(unit)
    call: ForwardCall | None = None
    if caches := torch.is_autocast_cache_enabled():  # See Note [A cast belongs to one call].
        torch.set_autocast_cache_enabled(False)
    try:
        call = root.begin_call(unit)
        if root.moves_inputs and root.is_in_outermost_call:
            args, kwargs = move((args, kwargs), root.device)
        if casts and unit.input_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), unit.input_dtype)
        outputs = method(*args, **kwargs)
        if casts and unit.output_dtype is not None:
            outputs = cast_floating(outputs, unit.output_dtype)
    except BaseException as error:
        if call is not None:
            root.call_raised(call, error)
        raise
    finally:
        if caches:
            torch.set_autocast_cache_enabled(True)
    root.end_call(call, outputs)
    if type(outputs) in _LAZY:
        from layerzero.step.on_request import step_by_step

        return step_by_step(functools.partial(_call, unit, kwargs={}, casts=casts), outputs)
    for tensor in (outputs,) if type(outputs) is torch.Tensor else find_tensors(outputs):
        if tensor.requires_grad:
            if tensor.grad_fn is not None:
                _watch_gradient(tensor, call)
            elif unit.owns(tensor):
                from layerzero.step.on_request import keep_returned

                keep_returned(root, unit)
    return outputs


# A graph break: torch.compile of an outer module stops before a unit's call and resumes after it.
@_disable_dynamo
def _call_uncompiled(
    unit: Unit, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any], casts: bool
) -> Any:
    if not (torch.compiler.is_exporting() or any(map(is_compiled, and_wrapped(unit.module)))):
        warn_once(
            f"torch.compile around {unit.label} compiles nothing inside that unit, whose call ends "
            "the graph; call compile() of the sharded model, which compiles each unit, or of the "
            "unit's module",
            "torch.compile around",
        )
    return _call(unit, method, args, kwargs, casts)


_CALLS = "layerzero calls"
"""Key in a node's `metadata`, with an output's number: the calls that returned what it made."""


def _watch_gradient(output: torch.Tensor, call: ForwardCall) -> None:
    """Have the backward of `call` begin before the node runs that made an output.

    Not for leaves, which the call only handed on: no node of the call lies behind them, they may
    live on, and their gradients come as soon as they are complete, not in the order of Note [When a
    unit is done in backward].
    """
    # The caller may write into a view. The node that made it then leaves the graph, and that of its
    # base stays; and torch allows no hook on such a tensor after another one.
    base = output._base if output._is_view() else None
    for tensor in (output,) if base is None else (output, base):
        node: Any = tensor.grad_fn  # torch's types have `metadata` as a method.
        if node is not None:
            calls = node.metadata.setdefault((_CALLS, tensor.output_nr), [])
            calls.append(call)
            if len(calls) == 1:
                hook = functools.partial(_begin_backward, calls)
                if base is not None:
                    node.register_prehook(hook)
                    continue
                # As `register_hook`, without the handle, which takes longer than all else here.
                hooks: Any = tensor._backward_hooks
                if hooks is None:
                    hooks = tensor._backward_hooks = OrderedDict()
                    node._register_hook_dict(tensor)
                hooks[hook] = hook


@uncompiled
def _begin_backward(calls: list[ForwardCall], _: object) -> None:
    # A unit that returned what one inside it returned, or its own input, comes first, as it does
    # where it returned another tensor, perhaps on another rank.
    for call in reversed(calls):
        root_of(call.unit).backward.on_output_gradient(call)
