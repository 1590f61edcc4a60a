"""What transformers reads from positions: whether rows of a batch hold several packed sequences.

It looks at values, and takes tensors without values for packed ones, which need an explicit mask.
Positions that the model makes itself are those of one sequence a row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_MODULE, _NAME = "transformers.masking_utils", "find_packed_sequence_indices"


@contextmanager
def one_sequence_a_row(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Let transformers find no packed sequences inside, unless the batch has positions."""
    module = sys.modules.get(_MODULE)
    if not hasattr(module, _NAME) or "position_ids" in kwargs:
        yield
        return
    found = getattr(module, _NAME)
    setattr(module, _NAME, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(module, _NAME, found)
