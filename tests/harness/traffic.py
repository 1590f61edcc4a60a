"""What a rank hands to the network, counted below the engine, at torch's own operators."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SentBytes(TorchDispatchMode):
    """Counts the bytes of what this rank gives to collectives and sends while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::") and "recv" not in name and "barrier" not in name:
            # Of (outputs, inputs, ...) the inputs; of sends and reductions the only tensors.
            given = args[1] if "allgather" in name or "alltoall" in name else args[0]
            tensors = given if isinstance(given, (list, tuple)) else [given]
            self.nbytes += sum(each.nbytes for each in tensors if isinstance(each, Tensor))
        return func(*args, **(kwargs or {}))
