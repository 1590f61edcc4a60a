"""Lightning's Trainer on layerzero: `ZeRO3Strategy`. See docs/reference/lightning.md."""

from layerzero.integrations.lightning.strategy import ZeRO3Strategy

__all__ = ["ZeRO3Strategy"]
