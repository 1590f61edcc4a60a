"""Makes torch's `get_state_dict(full_state_dict=True)` and its relatives gather our shards.

They gather the DTensors and ShardedTensors of a `state_dict()`, and pass on any other tensor.
`patch_torch` inserts a step before that: docs/internals/decisions/0019-torch-gathers-our-shards.md.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_PATCHED = "_gathers_layerzero_shards"


def patch_torch() -> None:
    """Replace torch's helper, unless it was replaced before."""
    from torch.distributed import _state_dict_utils  # Not at import: it loads many modules.

    original = _state_dict_utils._gather_state_dict
    if not hasattr(original, _PATCHED):

        @functools.wraps(original)
        def gather_state_dict(state_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
            from layerzero.state_dict.state_dicts import gather_shards

            chosen = {k: options[k] for k in ("cpu_offload", "ranks_only") if k in options}
            return original(gather_shards(state_dict, **chosen), **options)

        setattr(gather_state_dict, _PATCHED, True)
        _state_dict_utils._gather_state_dict = gather_state_dict
    user = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if user is not None:  # Otherwise it imports the new one from the module above.
        user._gather_state_dict = _state_dict_utils._gather_state_dict  # type: ignore[attr-defined]
