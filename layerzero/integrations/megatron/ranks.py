"""Megatron's process groups.

The data- and context-parallel ranks, which own shards, and the tensor- and pipeline-parallel ranks
together visit each element of a model once. Parameters that tensor-parallel ranks have copies of
count only on the first of these ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

_GROUPS = ["tp", "pp", "mp", "dp_cp", "ep", "expt_dp"]
"""Names of the groups in Megatron's collections."""


@dataclass(frozen=True)
class MegatronRanks:
    """Process groups of this rank."""

    data: dist.ProcessGroup
    """Data-parallel ranks, context-parallel ones included."""
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    model: tuple[dist.ProcessGroup, ...]
    """Groups that together reach all tensor- and pipeline-parallel ranks: Megatron's model-parallel
    group, or, if a collection lacks it, the groups of both axes."""
    experts: dist.ProcessGroup | None = None
    """Expert-parallel ranks, each with experts of its own; None: every rank has all experts."""
    expert_data: dist.ProcessGroup | None = None
    """Data-parallel ranks with the same experts."""

    @classmethod
    def of(cls, collection: Any, context_parallel_size: int) -> MegatronRanks:
        """The groups of Megatron's `ProcessGroupCollection`; None: those of its global state.

        Raises:
            ValueError: the collection lacks a group.
            AssertionError: Megatron's: its global state is not initialised.
        """
        if collection is None:
            collection = ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
        found: dict[str, Any] = {name: getattr(collection, name, None) for name in _GROUPS}
        if found["dp_cp"] is None and context_parallel_size == 1:
            found["dp_cp"] = getattr(collection, "dp", None)
        if missing := [name for name in ("dp_cp", "pp", "tp") if found[name] is None]:
            raise ValueError(f"pg_collection: process groups {missing} are missing; set them")
        return cls(
            found["dp_cp"],
            tensor=found["tp"],
            pipeline=found["pp"],
            model=(found["tp"], found["pp"]) if found["mp"] is None else (found["mp"],),
            experts=found["ep"],
            expert_data=found["expt_dp"],
        )

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is counted on this one of the model-parallel ranks.

        Copies on later tensor-parallel ranks, and weights that another stage counts, are not.
        """
        if getattr(parameter, "shared", False):
            return False
        is_split = bool(getattr(parameter, "tensor_model_parallel", False))
        return is_split or dist.get_rank(self.tensor) == 0
