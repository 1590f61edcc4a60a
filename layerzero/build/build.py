"""Builds units from a plan: materialises, synchronises, flattens and installs hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from layerzero.build.arguments import Arguments
from layerzero.build.compare import settle
from layerzero.build.materialize import Materializer
from layerzero.build.plan import WrapPlan
from layerzero.build.topology import Topology
from layerzero.build.wrap import UnitPlan, Visit
from layerzero.comm.exchanges import broadcast, broadcast_from_first
from layerzero.comm.pending import Operation
from layerzero.config import GatherBudget, MixedPrecision
from layerzero.flat.flatten import OriginalParameter, kinds_of_rows
from layerzero.flat.host_memory import HostMemory
from layerzero.flat.names import and_wrapped
from layerzero.flat.placement import Placement
from layerzero.flat.tensor_parallel import local_of, split_of
from layerzero.step import hooks, methods
from layerzero.step.handle import FlatParamHandle
from layerzero.step.root import RootState
from layerzero.step.unit import Unit, UnitOptions, get_unit, set_unit


def build(plan: WrapPlan, topology: Topology, given: Arguments) -> RootState:
    """Build the units, in the order of their plans, under one root.

    Collective over the model's ranks.

    Raises:
        Exception: a meta tensor could not be initialised; every rank raises (`settle`).
    """
    materializer = Materializer(plan.device, given.param_init_fn)
    builder = Builder(plan, topology, given, materializer)
    units = builder.build_units()
    waits = settle(materializer, topology.placement, plan.device)
    new = [unit for unit, made in zip(units, plan.units, strict=True) if made.existing is None]
    for unit in new:  # Of ranks with values, too: the check of the first forward is collective.
        unit.awaits_values = unit.was_built_empty = waits
        unit.awaited_buffers = tuple(materializer.awaited) if unit is new[0] else ()
    root = builder.join(units, RootState)
    root.moves_inputs = given.move_inputs and plan.device.type != "cpu"
    for built in plan.extensions.built:
        built(root)
    return root


@dataclass(frozen=True)
class Builder:
    """Builds the units of one `ZeRO3` call."""

    plan: WrapPlan
    topology: Topology
    given: Arguments
    materializer: Materializer

    def join(self, units: list[Unit], make_root: Callable[..., RootState]) -> RootState:
        """Join the units under one root; `make_root` takes the arguments of `RootState`."""
        # By default: the units around the one in use, it, one about to be freed, and those ahead.
        default_units = self.plan.nesting + 1 + max(self.given.forward_prefetch, 1)
        return make_root(
            units,
            self.given,
            self.plan.device,
            GatherBudget.parse(self.given.limit_all_gathers, default_units=default_units),
            self.topology.tensor_parallel_groups,
            self.plan.ignored,
        )

    def build_units(self) -> list[Unit]:
        """Build the units in the order of their plans. Collective with `sync_module_states`.

        Modules are visited in order, and a unit is flattened right after its last module was
        visited. So a model on the meta device never needs more memory than its shards and the
        full units around the current module.
        """
        plans, visits = self.plan.units, self.plan.visits
        last_visits: dict[int, list[UnitPlan]] = {}
        for plan, index in _last_visits(plans, visits):
            last_visits.setdefault(index, []).append(plan)
        finished: dict[int, Unit] = {}
        for index, visit in enumerate(visits):
            self._prepare(visit)
            for plan in last_visits.get(index, ()):
                finished[id(plan)] = self._finish(plan)
        for plan in plans:
            unit = finished[id(plan)]
            unit.tied_owners = tuple(finished[id(owner)] for owner in plan.tied_owners)
            hooked = self.plan.arguments[id(plan)].hook_module
            if hooked is not None and plan.existing is None:
                # It may be a unit's module itself, which casts inputs already.
                hooks.install_on_calls(hooked, unit, casts=get_unit(hooked) is None)
                unit.add_owner(hooked)
        return [finished[id(plan)] for plan in plans]

    def _prepare(self, visit: Visit) -> None:
        if visit.plan.existing is not None:
            return
        mixed_precision = self.plan.arguments[id(visit.plan)].mixed_precision
        placement = self.topology.placements[id(visit.plan)]
        keeps = mixed_precision.keeps_float32(visit.module)
        buffer_dtype = None if keeps else mixed_precision.buffer_dtype
        was_meta = [
            name for name, p in visit.module._parameters.items() if p is not None and p.is_meta
        ]
        gets_values = self.given.sync_module_states and not placement.is_first
        self.materializer(visit.fqn, visit.module, buffer_dtype, initialise=not gets_values)
        for name in was_meta if self.topology.tensor_parallel_groups else ():
            self._copy_over_mesh(visit, name)
        if keeps:
            methods.run_in_float32(visit.module)
        for name, buffer in visit.module._buffers.items():
            if buffer is not None:
                if self.given.sync_module_states:
                    self._broadcast(local_of(buffer), f"buffer {visit.fqn}.{name}", placement)
                label = f"buffer '{visit.fqn}.{name}'" if visit.fqn else f"buffer {name!r}"
                self._note_value(label, buffer, placement)

    def _finish(self, plan: UnitPlan) -> Unit:
        if plan.existing is not None:
            inner = plan.fqn.removesuffix(plan.existing.fqn).rstrip(".")
            plan.existing.rename(inner)
            return plan.existing
        arguments, device = self.plan.arguments[id(plan)], self.plan.device
        mixed_precision = arguments.mixed_precision
        placement = self.topology.placements[id(plan)]
        kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[OriginalParameter]] = {}
        for original in plan.originals:
            first = original.slots[0]
            parameter = first.module._parameters[first.name]
            assert parameter is not None
            original.parameter = parameter
            original.value = local_of(parameter)
            if self.given.sync_module_states:
                original.value = original.value.to(device)
                self._broadcast(original.value, f"parameter {original.fqn}", placement)
            self._note_value(f"parameter {original.fqn!r}", original.value, placement)
            compute_dtype = arguments.compute_dtype(original)
            # One flat parameter for each kind: its elements have one dtype, compute dtype and
            # requires_grad.
            key = (parameter.dtype, compute_dtype, parameter.requires_grad)
            kinds.setdefault(key, []).append(original)
        flats = [
            (compute_dtype, part)
            for (_, compute_dtype, _), originals in kinds.items()
            for part in kinds_of_rows(
                originals, placement, device, compute_dtype, self.given.row_multiple
            )
        ]
        offload = arguments.offload
        host = HostMemory(offload.pin_memory, device) if offload.params or offload.grads else None
        handles = [
            FlatParamHandle(
                originals,
                placement,
                device,
                compute_dtype,
                reduce_dtype=_reduce_dtype(originals[0], compute_dtype, mixed_precision),
                params_on=host if offload.params else None,
                grads_on=host if offload.grads else None,
                row_multiple=self.given.row_multiple,
            )
            for compute_dtype, originals in flats
        ]
        is_mean = arguments.gradient_reduction == "mean"
        *wrappers, inside = and_wrapped(plan.module)
        if wrappers and mixed_precision.keeps_float32(inside):
            mixed_precision = replace(mixed_precision, cast_forward_inputs=False)
        unit = Unit(
            plan.fqn,
            plan.module,
            handles,
            [part for _, part in flats],
            UnitOptions(
                mixed_precision=mixed_precision,
                reshard_after_forward=arguments.reshard_after_forward,  # type: ignore[arg-type]
                gradient_scale=1.0 / placement.num_averaged if is_mean else 1.0,
                deterministic=self.given.deterministic,
            ),
        )
        if plan.parent is None or "mixed_precision" in plan.arguments:
            unit.output_dtype = mixed_precision.output_dtype
        set_unit(plan.module, unit)
        for new_unit in self.plan.extensions.new_unit:
            new_unit(unit)
        hooks.install_on_calls(plan.module, unit)
        for module in unit.owners:
            if module is not plan.module and type(module).forward is not nn.Module.forward:
                hooks.install(module, "forward", unit, is_entry=False)
        for slot in (slot for original in plan.originals for slot in original.slots):
            methods.add_name(slot.module, slot.name, unit)
        # The full values are in the flat parameters now; these references would keep them alive.
        for original in plan.originals:
            del original.parameter, original.value
        return unit

    def _note_value(self, label: str, value: torch.Tensor, placement: Placement) -> None:
        for has_value in self.plan.extensions.has_value:
            has_value(label, value, placement)

    def _copy_over_mesh(self, visit: Visit, name: str) -> None:
        """Broadcast a new parameter along the tensor-parallel axes that it is replicated on.

        Each rank draws it from its own generator. Generators differ once ranks have drawn parts of
        different sizes of another parameter (on CPU, where DTensors do not share a generator).
        """
        parameter = visit.module._parameters[name]
        assert parameter is not None
        split, value = split_of(parameter), local_of(parameter)
        operation = Operation("synchronisation", f"parameter {visit.fqn}.{name}", 0)
        for axis, group in enumerate(self.topology.tensor_parallel_groups):
            if group.size > 1 and (split is None or split.placements[axis].is_replicate()):
                broadcast(value, group, operation).wait()

    def _broadcast(self, tensor: torch.Tensor, name: str, placement: Placement) -> None:
        sent, operation = tensor.contiguous(), Operation("synchronisation", name, 0)
        broadcast_from_first(sent, placement.groups, lambda _: operation)
        if sent is not tensor:
            tensor.copy_(sent)


def _last_visits(plans: list[UnitPlan], visits: list[Visit]) -> Iterator[tuple[UnitPlan, int]]:
    """Each plan, with the index of the last visit after which it can be flattened."""
    last_of_plan = {id(visit.plan): index for index, visit in enumerate(visits)}
    last_of_module = {id(visit.module): index for index, visit in enumerate(visits)}
    for plan in plans:
        # A tied parameter may be used by a module that is visited after the unit's own last one.
        users = [slot.module for original in plan.originals for slot in original.slots]
        indices = [last_of_module[id(user)] for user in users if id(user) in last_of_module]
        yield plan, max([last_of_plan[id(plan)], *indices])


def _reduce_dtype(
    original: OriginalParameter, compute_dtype: torch.dtype, mixed_precision: MixedPrecision
) -> torch.dtype:
    if not compute_dtype.is_floating_point:
        return compute_dtype
    chosen = mixed_precision.reduce_dtype
    return original.parameter.dtype if chosen == "main" else chosen or compute_dtype
