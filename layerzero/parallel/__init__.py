"""Parallelism besides data parallelism: `ParallelManager` and pipeline stages.

See docs/reference/parallelism.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from layerzero.parallel.manager import ParallelManager

if TYPE_CHECKING:
    from layerzero.parallel.pipeline import (
        ZeRO3PipelineStage,
        clip_grad_norm_,
        gather_as_scheduled,
    )

__all__ = ["ParallelManager", "ZeRO3PipelineStage", "clip_grad_norm_", "gather_as_scheduled"]


def __getattr__(name: str) -> Any:
    # Imported on demand: torch.distributed.pipelining loads much of torch that nothing else needs.
    if name in __all__:
        from layerzero.parallel import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
