"""Checks before and after each forward of a model.

Unsharded parameters are copies, freed after use. Some things that plain torch allows never reach
the sharded parameters, and raise (docs/reference/errors.md). Version counters show what a forward
writes, except through `.data`: see first_forward.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_

from torch.nn.parallel import DistributedDataParallel

from layerzero.flat.flat_param import version_of
from layerzero.guards.first_forward import FirstForward, is_main_memory, rejoin, written_into
from layerzero.notices import some
from layerzero.step.context import RuntimeContext
from layerzero.step.extension import Extension
from layerzero.step.unit import Unit

_grad_of = attrgetter("grad")


class EachForward(Extension):
    """Checks what is around a model, and the unsharded parameters of all its units."""

    def __init__(self, context: RuntimeContext, units: Sequence[Unit], first: FirstForward) -> None:
        self._first = first
        self._context = context
        self._units = units
        self._handles = [handle for unit in units for handle in unit.handles]
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
                if not is_main_memory(handle):
                    names += [fqn for fqn, before, now in triples if before != now]
                handle.left_versions = versions
                rejoin(handle)  # As `flatten_parameters` of cuDNN's RNNs needs.
        names = self._first.changed(names) if names else names
        return written_into(names) if names else None
