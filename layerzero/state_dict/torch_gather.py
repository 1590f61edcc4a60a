"""Makes torch's `get_state_dict(full_state_dict=True)` and its relatives gather our shards.

They gather the DTensors and ShardedTensors of a `state_dict()`, and pass on any other tensor.
`patch_torch` inserts a step before that: docs/internals/decisions/0019-torch-gathers-our-shards.md.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

_PATCHED = "_gathers_layerzero_shards"


def patch_torch() -> None:
    """Replace torch's helper, unless it was replaced before."""
    from torch.distributed import _state_dict_utils  # Not at import: it loads many modules.

    original = _state_dict_utils._gather_state_dict
    if not hasattr(original, _PATCHED):
        _state_dict_utils._gather_state_dict = _patched(original)
    user = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if user is not None:  # Otherwise it imports the new one from the module above.
        user._gather_state_dict = _state_dict_utils._gather_state_dict  # type: ignore[attr-defined]


def _patched(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def gather_state_dict(state_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
        from layerzero.state_dict.whole import gather_shards

        ours = gather_shards(
            state_dict,
            cpu_offload=options.get("cpu_offload", False),
            ranks_only=options.get("ranks_only", ()),
        )
        return original(ours, **options)

    setattr(gather_state_dict, _PATCHED, True)
    return gather_state_dict
