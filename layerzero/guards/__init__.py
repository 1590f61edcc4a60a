"""Guards: refusals and warnings about programs that sharding would change in silence.

Each is an `Extension` of the model, or stands on a public hook of torch; the engine imports none.
Unsharded parameters are copies, freed after use. Some things that plain torch allows never reach
the sharded parameters, and raise (docs/reference/errors.md). Version counters show what a forward
writes, except through `.data`: see first_forward.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from layerzero.flat.flat_param import version_of
from layerzero.flat.parameter_hooks import is_accumulating
from layerzero.flat.parameter_info import info_of
from layerzero.guards.first_forward import FirstForward, rejoin, written_into
from layerzero.notices import some, warn_once
from layerzero.step.extension import Extension
from layerzero.step.root import RootState
from layerzero.step.unit import Unit

_grad_of = attrgetter("grad")


def install(root: RootState) -> None:
    """Guard a model that has just been built. Not collective."""
    first = FirstForward(root.extensions, root.units)
    for guard in (StrayGradients(root.units), EachForward(root, first), first):
        root.extensions.add(guard)


class StrayGradients(Extension):
    """Warns once where autograd computes a gradient of a shard, as for a penalty on
    `model.parameters()`. Costs nothing until it does."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._accumulators: dict[nn.Parameter, object] = {}  # Autograd holds them only weakly.
        for unit in units:
            self.trainable_changed(unit)

    def trainable_changed(self, unit: Unit) -> None:
        for handle in unit.handles:
            placement = handle.placement
            for sharded_param in handle.sharded_params if placement.num_ranks > 1 else ():
                if sharded_param.requires_grad and sharded_param not in self._accumulators:
                    self._accumulators[sharded_param] = _watch(sharded_param, placement.is_first)


def _watch(sharded_param: nn.Parameter, is_first: bool) -> Any:
    with torch.inference_mode(False):
        edge: Any = torch.autograd.graph.get_gradient_edge(sharded_param)
    accumulator, fqn = edge.node, info_of(sharded_param).fqn

    def warn(_: object) -> None:
        if is_accumulating():
            return  # The engine delivers a reduced gradient to a parameter with hooks.
        warn_once(
            f"{fqn!r} was used outside the forward of its unit, where it is this rank's shard, as "
            "in a penalty on model.parameters(): autograd computed a gradient of the shard itself, "
            "which is not reduced. This is right for sums over elements, such as an L2 penalty, "
            "and wrong for norms and anything else that needs the whole tensor: compute that of "
            "parameter.full_tensor(), alike on all ranks, or inside the forward of that unit",
            "gradients of sharded parameters",
            is_first=is_first,
        )

    accumulator.register_prehook(warn)
    return accumulator


class EachForward(Extension):
    """Checks what is around a model, and the unsharded parameters of all its units."""

    def __init__(self, root: RootState, first: FirstForward) -> None:
        self._first = first
        self._context = root.context
        self._units = root.units
        self._handles = [handle for unit in root.units for handle in unit.handles]
        self._unsharded_params = [p for handle in self._handles for p in handle.unsharded_params]

    def before_forward(self, unit: Unit, forward_pass: object) -> None:
        """
        Raises:
            RuntimeError: DistributedDataParallel manages the parameters, or an unsharded one has a
                gradient that no reduction has taken.
        """
        around = DistributedDataParallel._active_ddp_module
        if around is not None:
            taken = {id(parameter) for parameter in around._module_parameters}
            if any(id(p) in taken for unit in self._units for p in unit.sharded_params):
                raise RuntimeError(
                    "DistributedDataParallel around sharded modules has overwritten shards with "
                    "the first rank's: remove DistributedDataParallel, or let it ignore them "
                    "(its _set_params_and_buffers_to_ignore_for_model)"
                )
        # In C: the host's time should not grow with the number of parameters.
        if not all(map(is_, map(_grad_of, self._unsharded_params), repeat(None))):
            self._refuse_gradients()

    def _refuse_gradients(self) -> None:
        fqns = [fqn for handle in self._handles for fqn in handle.fqns]
        pairs = zip(fqns, self._unsharded_params, strict=True)
        names = [fqn for fqn, unsharded in pairs if unsharded.grad is not None]
        for unit in self._units:
            unit.drop_unsharded_gradients()
        raise RuntimeError(
            f"the last backward computed gradients of {some(map(repr, names))} that could not be "
            "reduced and were dropped: the loss uses a tensor that left its unit without being an "
            "output of a forward (stored by a hook, or on a module), and no output of the unit had "
            "a gradient; return that tensor from the forward, or add an output to the loss, times 0"
        )

    def after_forward(self) -> RuntimeError | None:
        if self._context.replaced:
            replaced, self._context.replaced = self._context.replaced, []
            return RuntimeError(
                f"the forward replaced {some(map(repr, replaced))}, which are sharded; the new "
                "parameters were dropped and the sharded ones restored: use buffers, exclude these "
                "parameters from sharding (ignored_parameters), or change values between steps, "
                "inside summon_full_params()"
            )
        names: list[str] = []
        for handle in self._handles:
            versions = [*map(version_of, handle.unsharded_params)]
            if versions != handle.left_versions:
                triples = zip(handle.fqns, handle.left_versions, versions, strict=True)
                if not handle.is_main_memory:  # Else writes stay, as in plain torch.
                    names += [fqn for fqn, before, now in triples if before != now]
                handle.left_versions = versions
                rejoin(handle)  # As `flatten_parameters` of cuDNN's RNNs needs.
        names = self._first.changed(names) if names else names
        return written_into(names) if names else None
