"""Transformers on layerzero: a Trainer, and loading and saving of pretrained models.

See docs/reference/transformers.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerzero.integrations.transformers.accelerator import prepare
    from layerzero.integrations.transformers.pretrained import load_pretrained, shard
    from layerzero.integrations.transformers.pretrained_saving import save_pretrained
    from layerzero.integrations.transformers.trainer import ZeRO3Trainer

__all__ = ["ZeRO3Trainer", "load_pretrained", "prepare", "save_pretrained", "shard"]


def __getattr__(name: str) -> Any:
    # Imported on demand, because accelerator.py must work without transformers.
    if name in __all__:
        from layerzero.integrations.transformers import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
