"""Parallelism on a mesh of ranks: `ParallelManager`. See docs/parallelism.md."""

from layerzero.parallel.manager import ParallelManager

__all__ = ["ParallelManager"]
