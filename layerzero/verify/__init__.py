"""`ZeRO3(verify=...)`: bytes that are checked. docs/howto/verify.md says what is covered."""

from __future__ import annotations

from layerzero.config import Verify
from layerzero.step.root import RootState

__all__ = ["install"]

_SAMPLED_EVERY = 8


def install(root: RootState, verify: Verify) -> None:
    """Check the bytes of a model from now on. Before its first pass."""
    from layerzero.verify.verifier import Verifier

    verifier = Verifier(root, every=1 if verify == "always" else _SAMPLED_EVERY)
    root.extensions.add(verifier)
    root.context.transport = verifier
