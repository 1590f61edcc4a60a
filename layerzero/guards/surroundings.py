"""Refuses engines around a sharded model that would take sharded parameters for full ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from layerzero.step.extension import Extension
from layerzero.step.unit import Unit

_ADVICE = (
    "it would overwrite every rank's shards with those of the first rank; ZeRO3 reduces gradients "
    "itself: remove DistributedDataParallel, or let it ignore the sharded parameters "
    "(its _set_params_and_buffers_to_ignore_for_model)"
)


class RefusesDistributedDataParallel(Iterable[str]):
    """Put in the attribute from which DistributedDataParallel reads the names to ignore."""

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(f"DistributedDataParallel around a module that ZeRO3 wraps: {_ADVICE}")


class Surroundings(Extension):
    """Checks what is around the model, when `DistributedDataParallel` wraps it and at forwards."""

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        self._units = units
        # Makes `DistributedDataParallel(module)` raise, also for a wrapper around the module.
        module.__dict__.setdefault(
            "_ddp_params_and_buffers_to_ignore", RefusesDistributedDataParallel()
        )

    def before_forward(self, unit: Unit, forward_pass: object) -> None:
        """Refuse a forward inside an engine that manages these parameters; cheap if none does.

        Raises:
            RuntimeError: DistributedDataParallel manages them.
            NotImplementedError: a transform of `torch.func` runs the forward.
        """
        around = DistributedDataParallel._active_ddp_module
        if around is not None:
            taken = {id(parameter) for parameter in around._module_parameters}
            if any(id(p) in taken for unit in self._units for p in unit.sharded_params):
                raise RuntimeError(
                    f"ZeRO3 inside a module that DistributedDataParallel wraps: {_ADVICE}"
                )
        if torch._C._functorch.peek_interpreter_stack() is not None:
            _refuse_transform()


def _refuse_transform() -> NoReturn:
    raise NotImplementedError(
        "torch.func transforms (vmap, grad, jvp, jacrev) around the forward of a sharded module: "
        "all-gathers cannot run inside them; use torch.autograd.grad, or transform functions "
        "inside a unit's forward"
    )
