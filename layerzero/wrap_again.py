"""rewrap: shards a model again after its modules or parameters were changed."""

from __future__ import annotations

from layerzero.build.unwrap import unwrap
from layerzero.flat.parameter_hooks import kind_of_hooks
from layerzero.flat.parameter_info import get_info, info_of
from layerzero.notices import warn_once
from layerzero.optional.arguments import optional_now
from layerzero.state_dict.summon import check_idle
from layerzero.step.root import root_of
from layerzero.step.unit import get_unit
from layerzero.zero3 import ZeRO3


def rewrap(model: ZeRO3) -> list[str]:
    """Shard a model again whose modules or parameters were changed after wrapping. Collective.

    The arguments of the first wrapping apply, and the wrapper object stays the same. A parameter
    keeps its sharded parameter (the same object, with `.grad`, hooks and optimizer state) if its
    unit is laid out as before; a warning names the other parameters that had hooks. Prefetch lists
    and recorded execution orders are reset.

    Every rank gathers the whole model once, so the unsharded model must fit in its memory. New
    parameters must have equal values on all ranks.

    Args:
        model: the outermost ZeRO3 module, between steps.

    Returns:
        Names of the parameters whose sharded parameters are new. No optimizer has these yet; an
        optimizer that held the former ones must be created again.

    Raises:
        ValueError: `model` is not the outermost ZeRO3 module, or shares units with another model.
        RuntimeError: it is in forward or backward, gradients wait for a backward that synchronizes,
            methods of modules were replaced after wrapping, or modules were changed inside
            `summon_full_params(writeback=False)`.
        NotImplementedError: a module inside is wrapped by its own ZeRO3, or `step_in_backward` is
            on.
    """
    unit = get_unit(model)
    if not isinstance(model, ZeRO3) or unit is None or root_of(unit).units[0] is not unit:
        raise ValueError(f"rewrap: expected the outermost ZeRO3 module, got {type(model).__name__}")
    root = root_of(unit)
    root.backward.clear_abandoned()
    root.before_call("rewrap")
    if root.structure.was_dropped:  # By a merge of adapters, for example.
        raise RuntimeError(
            "rewrap: modules were changed inside summon_full_params(writeback=False), which "
            "dropped the values of parameters there; use writeback=True, or load what was saved "
            "into a new model"
        )
    check_idle(root, root.units, "rewrap")
    if any(handle.gradients.is_waiting for each in root.units for handle in each.handles):
        raise RuntimeError(
            "rewrap: expected a model between steps, but it has unreduced gradients; call "
            "reduce_gradients() first"
        )
    for name, module in model.named_modules():
        if module is not model and isinstance(module, ZeRO3):
            raise NotImplementedError(
                f"rewrap: {name!r} was wrapped by its own ZeRO3, whose arguments would be lost; "
                "build the model again and wrap it with auto_wrap_policy"
            )
    if root.reducer.step_by is not None:
        raise NotImplementedError(
            "rewrap: would replace sharded parameters of the optimizer that steps in backward; "
            "call step_in_backward(None) before, and step_in_backward(a new optimizer) afterwards"
        )
    before = dict.fromkeys(parameter for each in root.units for parameter in each.sharded_params)
    ignored = root.ignored.now()
    given: dict[str, object] = dict(model.__dict__["_given"])
    given.update(
        ignored_modules=ignored.modules,
        ignored_parameters=ignored.parameters,
        optional_modules=optional_now(unit),
    )
    patches = model.forward_patches
    if patches:
        del model.forward
    unwrap(model, root.units)
    del unit, root
    ZeRO3.__init__(model, **given)  # type: ignore[arg-type]
    for patch in patches:
        model._patch_forward(patch)
    shown = set(model.parameters())
    lost = [info_of(p).fqn for p in before if kind_of_hooks(p) is not None and p not in shown]
    if lost:
        warn_once(
            f"rewrap: the hooks on {lost} were lost, because their sharded parameters were "
            "replaced; register them again"
        )
    return [
        name
        for name, parameter in model.named_parameters()
        if get_info(parameter) is not None and parameter not in before
    ]
