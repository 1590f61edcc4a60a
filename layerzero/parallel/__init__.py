"""Parallelism beside data parallelism: `ParallelManager`, stages of a pipeline.

See docs/parallelism.md.
"""

from layerzero.parallel.manager import ParallelManager
from layerzero.parallel.pipeline import ZeRO3PipelineStage, clip_grad_norm_, gather_as_scheduled

__all__ = ["ParallelManager", "ZeRO3PipelineStage", "clip_grad_norm_", "gather_as_scheduled"]
