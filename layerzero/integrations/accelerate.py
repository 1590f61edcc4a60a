"""Accelerate on layerzero: `prepare`. See docs/reference/transformers.md."""

from layerzero.integrations.transformers.accelerator import ZeRO3Accelerator, prepare

__all__ = ["ZeRO3Accelerator", "prepare"]
