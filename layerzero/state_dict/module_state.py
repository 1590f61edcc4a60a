"""Makes `state_dict()` of a wrapped model return shards, and `load_state_dict()` accept them.

Hooks on the modules that own sharded parameters do this, so it works for the wrapper, the wrapped
module and any module inside alike. Inside `summon_full_params` the hooks do nothing, and entries
are full parameters.
"""

from __future__ import annotations

import weakref
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from layerzero.flat.parameter_info import change_info, info_of
from layerzero.state_dict.preconditions import unit_refs
from layerzero.step.root import root_if_alive
from layerzero.step.unit import TrainingState, Unit

if TYPE_CHECKING:
    from layerzero.state_dict.parameter_shard import ParameterShard


def install(unit: Unit) -> None:
    """Put the hooks on the modules that show the unit's parameters."""
    for sharded_param in unit.sharded_params:
        unit_refs[sharded_param] = weakref.ref(unit)
        gather = partial(_full_tensor, weakref.ref(sharded_param))
        change_info(sharded_param, gather=gather)
    for handle in unit.handles:
        for sharded_param in () if handle.row_multiple is None else handle.sharded_params:
            _describe_place(sharded_param)
    hooks = unit.state_dict_hooks
    hooks.append(unit.module.register_state_dict_pre_hook(partial(_check_structure, unit)))
    for module in unit.owners:
        hooks.append(module.register_state_dict_post_hook(partial(_show_shards, unit)))
        hooks.append(module.register_load_state_dict_pre_hook(partial(_take_shards, unit)))


def _describe_place(parameter: nn.Parameter) -> None:
    """Have a sharded parameter of whole rows satisfy torch 2.14's `CheckpointableTensor`.

    These are attributes of the tensor, by which `torch.distributed.checkpoint` writes it as a part
    of the whole parameter. Scalars are of shape [1] there: a 1-D part has a 1-D whole.
    """
    info = info_of(parameter)
    split, shape = info.tensor_parallel, (*info.shape,) or (1,)
    begin = (0,) * len(shape) if split is None else (split.offset or (0,))
    local_shape = shape if split is None else (*split.local_shape,) or (1,)
    row = prod(local_shape[1:]) or 1
    # A parameter without elements still needs a part: one that no rank writes cannot be read.
    has_part = parameter.numel() or not prod(shape)
    parts = {
        "global_offsets": (begin[0] + info.range[0] // row, *begin[1:]),
        "local_offsets": (0,) * len(shape),
        "local_sizes": (*parameter.shape,),
    }
    place = {name: (value,) if has_part else () for name, value in parts.items()}
    parameter.__dict__.update(place, global_shape=shape)


def _full_tensor(reference: weakref.ref[nn.Parameter]) -> torch.Tensor:
    sharded_param = reference()
    assert sharded_param is not None, "its attribute calls this"
    full: torch.Tensor = _FullTensor.apply(sharded_param)  # type: ignore[no-untyped-call]
    return full


class _FullTensor(torch.autograd.Function):
    """As of a DTensor: this rank's gradient of the whole goes to its part, and is not reduced."""

    @staticmethod
    def forward(ctx: Any, sharded_param: nn.Parameter) -> torch.Tensor:
        ctx.shard = shard_of(sharded_param, sharded_param.detach())
        return ctx.shard.full_tensor()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ctx.shard.part_of(gradient)


def _check_structure(unit: Unit, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if _settles_first_values(unit):
        return
    root = root_if_alive(unit)
    is_summoned = unit.training_state is TrainingState.SUMMON_FULL_PARAMS
    stands_aside = is_summoned or unit.views.shows_stand_ins
    if root is not None and unit is root.units[0] and not stands_aside:
        root.structure.check("state_dict")


def _settles_first_values(unit: Unit) -> bool:
    """Whether modules show whole parameters; then the parts have their values now."""
    root = root_if_alive(unit)
    values = None if root is None else root.structure.first_values
    if values is not None:
        values.settle()
    return values is not None


def _refuse_replaced(module: nn.Module, unit: Unit) -> None:
    """Check that the module still has its sharded parameters. It may be any module of a model."""
    for handle in unit.handles:
        handle.reset_sharded_params(unit.label)
    for name, sharded_param in unit.views.inside(module):
        now = module._parameters.get(name)
        if now is not sharded_param and not (unit.shows_unsharded and unit.owns(now)):
            raise RuntimeError(
                f"state_dict: parameter {info_of(sharded_param).fqn!r} was replaced or removed "
                "after wrapping, and its replacement is not sharded; copy values into the "
                "parameter inside summon_full_params(), or call layerzero.rewrap(model) on every "
                "rank"
            )


def _show_shards(
    unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object
) -> None:
    is_summoned = unit.training_state is TrainingState.SUMMON_FULL_PARAMS
    if is_summoned or unit.views.shows_stand_ins:
        return
    if not _settles_first_values(unit):
        _refuse_replaced(module, unit)
    for name, sharded_param in unit.views.inside(module):
        entry = state_dict.get(prefix + name)
        # With keep_vars the caller wants the parameter itself.
        if isinstance(entry, torch.Tensor) and not isinstance(entry, nn.Parameter):
            state_dict[prefix + name] = shard_of(sharded_param, sharded_param.detach())


def _take_shards(
    unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any
) -> None:
    local_metadata, *_, error_msgs = others  # torch's arguments of a hook before a load.
    if unit.training_state is TrainingState.SUMMON_FULL_PARAMS:
        return
    if root := root_if_alive(unit):
        root.structure.end_first_values()
    unit.before_load()
    _refuse_replaced(module, unit)
    for name, sharded_param in unit.views.inside(module):
        value = state_dict.get(prefix + name)
        if not isinstance(value, torch.Tensor):
            continue
        try:
            taken = local_part(value, sharded_param)
        except ValueError as error:
            error_msgs.append(f"{prefix + name}: {error}")
            taken = sharded_param
        if local_metadata.get("assign_to_params_buffers"):
            # With assign=True, too, the sharded parameter stays, and takes the new value.
            with torch.no_grad():
                sharded_param.copy_(taken)
            taken = sharded_param
        state_dict[prefix + name] = taken


def shard_of(sharded_param: nn.Parameter, local: torch.Tensor) -> ParameterShard:
    """`local`, of the shape of `sharded_param`, as a shard of a tensor with the original shape."""
    from layerzero.state_dict.names import extent_of
    from layerzero.state_dict.parameter_shard import ParameterShard

    info = info_of(sharded_param)
    return ParameterShard(local, extent_of(info), info.range, weakref.ref(sharded_param))


def local_part(value: torch.Tensor, sharded_param: nn.Parameter) -> torch.Tensor:
    """This rank's part of an entry of a state dict, in the shape of `sharded_param`.

    Args:
        value: a full tensor of the original shape, a DTensor, a shard of the same range, a plain
            tensor of the shape of `sharded_param`, or what modules show before the first use.

    Raises:
        ValueError: `value` is none of these.
    """
    from layerzero.state_dict.parameter_shard import ParameterShard

    whole = getattr(value, "_whole", None)  # Of a `WholeParameter` (module_tree/first_values.py).
    if whole is not None and whole.sharded is sharded_param:
        return sharded_param  # torch's `set_model_state_dict` passes it for what was not saved.
    info, own = info_of(sharded_param), shard_of(sharded_param, sharded_param.detach())
    if isinstance(value, DTensor):
        if info.tensor_parallel is None:
            raise ValueError(
                "the entry is a DTensor, but the parameter is not: load the entry's full_tensor(), "
                "or load through torch.distributed.checkpoint"
            )
        local = info.tensor_parallel.localize(value.detach(), info.fqn)
        return local.reshape(-1)[slice(*own.range)].view(sharded_param.shape)
    if isinstance(value, ParameterShard):
        if not own.is_of_same_place(value):
            raise ValueError(
                f"the entry is a shard of elements {value.range} of shape {tuple(value.shape)}, "
                f"but this rank needs elements {own.range} of shape {tuple(own.shape)}: it was "
                "saved by another rank, or with another sharding; load full tensors, or a "
                "checkpoint of layerzero.checkpoint or torch.distributed.checkpoint"
            )
        return value.local.view(sharded_param.shape)
    if value.shape == own.shape:
        return own.part_of(value)
    if value.shape == sharded_param.shape:
        return value
    raise ValueError(
        f"size mismatch: the entry has shape {tuple(value.shape)}, the parameter "
        f"{tuple(own.shape)} and this rank's shard {tuple(sharded_param.shape)}"
    )
