"""`ZeRO3(verify=...)`: bytes that are checked. docs/howto/verify.md says what is covered."""

from __future__ import annotations

import functools
from collections.abc import Callable

from layerzero.config import Verify
from layerzero.step.context import RuntimeContext

__all__ = ["context_for"]

_SAMPLED_EVERY = 8


def context_for(verify: Verify | None) -> Callable[..., RuntimeContext]:
    """What makes the `RuntimeContext` of a model."""
    if verify is None:
        return RuntimeContext
    from layerzero.verify.context import VerifiedContext

    return functools.partial(VerifiedContext, every=1 if verify == "always" else _SAMPLED_EVERY)
