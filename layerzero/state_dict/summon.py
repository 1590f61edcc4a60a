"""summon_full_params: shows full parameters, in the dtype of the main shards, inside a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from layerzero.comm.exchanges import broadcast_from_first, gather_along
from layerzero.flat.parameter_hooks import kind_of_hooks
from layerzero.flat.parameter_info import copy_attributes, set_sharded_param
from layerzero.state_dict.full_tensors import flat_of
from layerzero.step.handle import FlatParamHandle
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState
from layerzero.step.unit import TrainingState, Unit


@dataclass(frozen=True, kw_only=True)
class SummonOptions:
    """The arguments of `ZeRO3.summon_full_params`, which documents them."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


@dataclass
class _Summoned:
    """One summoned flat parameter; `parameters` is empty where only the first rank has them."""

    handle: FlatParamHandle
    parameters: list[nn.Parameter]
    """The parameters that are shown now; the user may replace those of `made`."""
    made: tuple[nn.Parameter, ...]

    def was_written(self, index: int) -> bool:
        """Whether the user wrote a full parameter, or assigned another; not through `.data`."""
        now = self.parameters[index]
        return now is not self.made[index] or now._version > 0


@contextmanager
def summon(
    root: RootState, units: list[Unit], options: SummonOptions, what: str = "summon_full_params"
) -> Iterator[None]:
    """Show full parameters of `units`. Collective over their groups, at entry and exit.

    Args:
        what: the user's call, for messages.
    """
    check_idle(root, units, what)
    root.structure.check(what)
    root.before_call(what)
    root.shown.follow_zero_grad()
    root.shown.hide()
    try:
        with _shown(root, units, options):
            yield
    finally:
        root.shown.show()


@contextmanager
def _shown(root: RootState, units: list[Unit], options: SummonOptions) -> Iterator[None]:
    summoned: list[_Summoned] = []
    for unit in units:
        unit.reshard()
        unit.set_training_state(TrainingState.SUMMON_FULL_PARAMS)
    finished = False
    try:
        with torch.no_grad(), torch.inference_mode(False):
            for unit in units:
                made = [_gather(root, unit, handle, options) for handle in unit.handles]
                summoned.extend(made)
                if all(entry.parameters for entry in made):
                    shown = [each for entry in made for each in entry.parameters]
                    unit.views.show(dict(zip(unit.sharded_params, shown, strict=True)))
        yield
        finished = True
    finally:
        try:
            if finished and options.writeback:
                _check_written(root, units, summoned, options)
        finally:
            for unit in units:
                unit.views.show({})
                unit.set_training_state(TrainingState.IDLE)
            for entry in summoned:
                pairs = zip(entry.parameters, entry.handle.sharded_params, strict=False)
                for full, sharded in pairs:
                    set_sharded_param(full, sharded)  # `full` is no parameter any more.
        if finished and options.writeback:
            with torch.no_grad():
                for entry in summoned:
                    _write_back(root, entry, options)
        if not options.writeback and root.structure.changes():
            root.structure.was_dropped = True
        if finished:
            _refuse_hooks(summoned)


def _refuse_hooks(summoned: list[_Summoned]) -> None:
    """Raise for hooks on summoned parameters, which would silently be dropped with them."""
    for entry in summoned:
        for name, parameter in zip(entry.handle.fqns, entry.parameters, strict=False):
            hooks_from = kind_of_hooks(parameter)
            if hooks_from is not None:
                raise RuntimeError(
                    f"parameter {name!r}: hooks were registered on it ({hooks_from}) inside "
                    "summon_full_params, where full parameters are temporary, so the hooks would "
                    "never run; register them outside, on the sharded parameters"
                )


def check_idle(root: RootState, units: list[Unit], what: str) -> None:
    """
    Raises:
        RuntimeError: a backward runs, or one of these units is in use; starts with `what`.
    """
    root.backward.clear_abandoned()
    states = {unit.label: unit.training_state for unit in units}
    busy = {label: each.name for label, each in states.items() if each is not TrainingState.IDLE}
    if root.context.in_backward or busy:
        raise RuntimeError(
            f"{what}: expected a model between steps, but it is inside forward, "
            f"backward or another summon_full_params ({busy}); leave that first"
        )


def _check_written(
    root: RootState, units: list[Unit], summoned: list[_Summoned], options: SummonOptions
) -> None:
    """Take over tensors assigned to parameters as new values, and check all before any write."""
    error: Exception | None = None
    try:
        for entry in summoned:
            if entry.parameters:
                _take_replaced(entry, units)
    except (RuntimeError, ValueError) as found:
        error = found
    for handle in [entry.handle for entry in summoned[:1]] if options.rank0_only else []:
        is_bad = torch.tensor([error is not None], dtype=torch.uint8, device=root.device)
        if _broadcast(root, is_bad, handle, "summon verdict", handle.fqns[0]).item():
            error = error or RuntimeError(
                "summon_full_params: the first rank of the group has parameters that cannot be "
                "written back; its error names them"
            )
    if error is not None:
        raise error


def _take_replaced(entry: _Summoned, units: list[Unit]) -> None:
    handle = entry.handle
    unit = next(unit for unit in units if handle in unit.handles)
    for index, sharded in enumerate(handle.sharded_params):
        shown = {id(each): each for each in unit.views.shown_for(sharded)}
        new = [each for each in shown.values() if each is not entry.parameters[index]]
        where = f"summon_full_params: {handle.fqns[index]!r} (rank {handle.placement.rank})"
        if len(shown) != 1 or (new and not isinstance(new[0], torch.Tensor)):
            raise RuntimeError(
                f"{where} was removed, or replaced under some of its names only; copy new values "
                "into the parameter in place, or change the module before wrapping it"
            )
        shape = handle.unsharded_params[index].shape
        value = new[0] if new else entry.parameters[index]
        assert isinstance(value, torch.Tensor)
        if value.shape != shape:
            raise ValueError(
                f"{where}: expected values of shape {tuple(shape)}, got {tuple(value.shape)}"
            )
        if new:
            entry.parameters[index] = value


def _gather(
    root: RootState, unit: Unit, handle: FlatParamHandle, options: SummonOptions
) -> _Summoned:
    handle.reset_sharded_params(unit.label)
    full = gather_flat(root, unit, handle, handle.main_shard)
    full_grad = None
    has_grad = [parameter.grad is not None for parameter in handle.sharded_params]
    # Also without a gradient here: ranks with other experts may have one, and all ranks must issue
    # the same collectives.
    if options.with_grads and (handle.gradients.trainable or any(has_grad)):
        grads = {i: p.grad for i, p in enumerate(handle.sharded_params) if p.grad is not None}
        flat = flat_of(handle, handle.main_shard.dtype, grads)
        full_grad = gather_flat(root, unit, handle, flat)
    if options.rank0_only and not handle.placement.is_first:
        return _Summoned(handle, [], ())
    if full.untyped_storage().data_ptr() == handle.main_shard.untyped_storage().data_ptr():
        full = full.clone()  # In a group of one: changes must be lost unless written back.
    values = _views(handle, full, options)
    full_grads = None if full_grad is None else _views(handle, full_grad, options)
    parameters = []
    for index, sharded in enumerate(handle.sharded_params):
        # Through `.data`, so that it counts its own versions; see `was_written`.
        parameter = nn.Parameter(values[index].data, requires_grad=sharded.requires_grad)
        copy_attributes(handle.unsharded_params[index], parameter)
        if full_grads is not None and has_grad[index]:
            parameter.grad = full_grads[index]
        parameters.append(parameter)
    return _Summoned(handle, parameters, tuple(parameters))


def _views(
    handle: FlatParamHandle, full: torch.Tensor, options: SummonOptions
) -> list[torch.Tensor]:
    """Views of all parameters in a gathered buffer; copies on the CPU with `offload_to_cpu`."""
    if not options.offload_to_cpu:
        return [handle.view_of(full, index) for index in range(len(handle.fqns))]
    on_cpu = full.cpu()
    # A DTensor is copied separately: made from a local tensor on the CPU, torch would move it back
    # to the device of its mesh.
    return [
        handle.view_of(on_cpu, index) if split is None else handle.view_of(full, index).cpu()
        for index, split in enumerate(handle.splits)
    ]


@remembers_failure
def gather_flat(
    root: RootState, unit: Unit, handle: FlatParamHandle, shard: torch.Tensor
) -> torch.Tensor:
    name = partial(root.operations.next, "summon", unit.label)
    return gather_along(shard.to(root.device), handle.placement.owner_groups, name).view(-1)


@remembers_failure
def _write_back(root: RootState, entry: _Summoned, options: SummonOptions) -> None:
    """Take over full values, and gradients if asked for; with `rank0_only`, one at a time."""
    # Values go back through `.data`, and count as written only where the user wrote: between a
    # forward and its backward a summon may read.
    handle, verb = entry.handle, "summon writeback"
    handle.note_rewrite()
    ranges = handle.layout.shard_ranges(handle.placement.main_shard_index)
    for index, (owned, sharded) in enumerate(zip(ranges, handle.sharded_params, strict=True)):
        parameter = entry.parameters[index] if entry.parameters else None
        value = None if parameter is None else _flat_of(handle, index, parameter)
        if options.rank0_only:
            value = _from_first(root, handle, index, value, verb)
        assert value is not None
        sharded.data.copy_(value[owned.start : owned.stop].view(sharded.shape))
        if not options.rank0_only and entry.was_written(index):
            torch.autograd.graph.increment_version(sharded)
        if not options.with_grads:
            continue
        full = parameter if parameter is None else parameter.grad
        full = full if full is None else _flat_of(handle, index, full)
        if options.rank0_only:
            exists = torch.tensor([full is not None], dtype=torch.uint8, device=root.device)
            what = f"{verb} of a gradient"
            if _broadcast(root, exists, handle, what, handle.fqns[index]).item():
                full = _from_first(root, handle, index, full, what)
        part = None if full is None else full[owned.start : owned.stop].view(sharded.shape)
        sharded.grad = None if part is None else part.to(sharded.device, copy=True)


def _from_first(
    root: RootState, handle: FlatParamHandle, index: int, own: torch.Tensor | None, verb: str
) -> torch.Tensor:
    """The first rank's `own`, of the original parameter's number of elements, on every rank."""
    sharded = handle.sharded_params[index]
    full = sharded.new_empty(handle.layout.numels[index], device=root.device)
    if own is not None:
        full.copy_(own)
    return _broadcast(root, full, handle, verb, handle.fqns[index])


def _flat_of(handle: FlatParamHandle, index: int, tensor: torch.Tensor) -> torch.Tensor:
    """A full parameter or gradient as in the full buffer: 1-D, of a DTensor the local tensor."""
    split = handle.splits[index]
    if split is not None:
        tensor = split.localize(tensor, handle.fqns[index])
    return tensor.detach().reshape(-1)


def _broadcast(
    root: RootState, tensor: torch.Tensor, handle: FlatParamHandle, verb: str, name: str
) -> torch.Tensor:
    groups = handle.placement.groups
    return broadcast_from_first(tensor, groups, partial(root.operations.next, verb, name))
