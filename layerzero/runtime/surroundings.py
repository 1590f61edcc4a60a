"""Other engines around a sharded model, which would take pieces for whole parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_ADVICE = (
    "it would send the first rank's pieces to all ranks, and overwrite theirs; ZeRO3 reduces "
    "gradients itself: leave out DistributedDataParallel, or let it ignore the sharded parameters "
    "(its _set_params_and_buffers_to_ignore_for_model)"
)


class RefusesDistributedDataParallel(Iterable[str]):
    """Stands where DistributedDataParallel looks for the names that it is to leave alone."""

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(f"DistributedDataParallel around a module that ZeRO3 wraps: {_ADVICE}")


def install(module: nn.Module) -> None:
    """Have `DistributedDataParallel(module)` refused, and of a wrapper around it."""
    module.__dict__.setdefault(
        "_ddp_params_and_buffers_to_ignore", RefusesDistributedDataParallel()
    )


def check_surroundings(pieces: Iterable[nn.Parameter]) -> None:
    """Refuse a forward inside another engine's that has taken the pieces; cheap where none is.

    Raises:
        RuntimeError: DistributedDataParallel has them.
        NotImplementedError: a transform of `torch.func` runs the forward.
    """
    around = DistributedDataParallel._active_ddp_module
    if around is not None:
        taken = {id(parameter) for parameter in around._module_parameters}
        if any(id(piece) in taken for piece in pieces):
            raise RuntimeError(
                f"ZeRO3 inside a module that DistributedDataParallel wraps: {_ADVICE}"
            )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        _refuse_transform()


def _refuse_transform() -> NoReturn:
    raise NotImplementedError(
        "torch.func transforms (vmap, grad, jvp, jacrev) around the forward of a sharded module: "
        "gathers cannot run inside them; use torch.autograd.grad, or transform functions inside a "
        "unit's forward"
    )
