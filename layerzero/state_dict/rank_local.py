"""RankLocal: optimizer state that is of one rank's pieces together, and belongs to no parameter."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class RankLocal(torch.Tensor):
    """An ordinary tensor that `torch.distributed.checkpoint` must not take for the same on all.

    Every rank has another one, and nobody knows how they would be cut for other ranks. It can be
    used and copied as any tensor, and its rank may torch.save it.
    """

    what: str = "a tensor of one rank's own"

    def plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rank_local, (self.plain(), self.what)

    def refuse(self) -> NoReturn:
        raise NotImplementedError(
            f"{self.what}: shape {tuple(self.shape)}, neither that of this rank's piece nor one "
            "number, so that it fits these ranks alone. Use an optimizer that works element-wise, "
            "or torch.save of every rank's own state"
        )

    # What torch.distributed.checkpoint calls ------------------------------------------------

    def __create_write_items__(self, fqn: str, object: object) -> NoReturn:
        self.refuse()

    def __create_chunk_list__(self) -> NoReturn:
        self.refuse()

    def __get_tensor_shard__(self, index: object) -> NoReturn:
        self.refuse()


def rank_local(value: torch.Tensor, what: str) -> RankLocal:
    """A view of `value`. `what`: of the error."""
    marked = value.detach().as_subclass(RankLocal)
    marked.what = what
    return marked


# A rank may torch.save its own state dict, and load it with weights_only.
torch.serialization.add_safe_globals(
    # The second name is that of files of version 0.1.
    [rank_local, (rank_local, "layerzero.checkpoint.rank_local.rank_local")]
)
