"""RankLocal: optimizer state of one rank that does not have the shape of a sharded parameter."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch


class RankLocal(torch.Tensor):
    """A plain tensor that `torch.distributed.checkpoint` must not treat as equal on all ranks.

    It differs between ranks, and there is no rule to reshard it for other ranks. It can be used and
    copied like any tensor, and its rank may torch.save it.
    """

    what: str = "a tensor of this rank only"

    def plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rank_local, (self.plain(), self.what)

    def __deepcopy__(self, memo: dict[int, Any]) -> RankLocal:
        return rank_local(copy.deepcopy(self.plain(), memo), self.what)

    def refuse(self, *args: object) -> NoReturn:
        raise NotImplementedError(
            f"{self.what}: this rank alone has this tensor of shape {tuple(self.shape)}, which "
            "cannot be resharded. With a WholeTensorOptimizer use layerzero.checkpoint.save, or "
            "layerzero.checkpoint.get_optimizer_state_dict(full=True); with another, torch.save "
            "each rank's state separately"
        )

    # What torch.distributed.checkpoint calls.
    __create_write_items__ = __create_chunk_list__ = __get_tensor_shard__ = refuse


def rank_local(value: torch.Tensor, what: str) -> RankLocal:
    """A view of `value`. `what` names it in the error."""
    marked = value.detach().as_subclass(RankLocal)
    marked.what = what
    return marked


# A rank may torch.save its own state dict, and load it with weights_only.
torch.serialization.add_safe_globals([rank_local])
