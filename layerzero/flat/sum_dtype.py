"""The dtype in which values are summed."""

from __future__ import annotations

import torch


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """float32, or wider if one of `dtypes` is."""
    widest = torch.float32
    for dtype in dtypes:
        # torch raises for float8, which is narrower.
        if dtype.itemsize > 1:
            widest = torch.promote_types(widest, dtype)
    return widest
