"""Removes what wrappers add to the names of modules and parameters."""

from __future__ import annotations

WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Attribute under which torch.compile's and activation checkpointing's wrappers hold the module."""


def clean_name(name: str) -> str:
    """Remove wrappers from a name: "layers.0._orig_mod.weight" becomes "layers.0.weight"."""
    if WRAPPER_NAMES.isdisjoint(parts := name.split(".")):
        return name
    return ".".join(part for part in parts if part not in WRAPPER_NAMES)
