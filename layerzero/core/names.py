"""Names of modules and parameters, without what wrappers put into them."""

from __future__ import annotations

WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""What a wrapper of torch.compile, or of activation checkpointing, calls the module inside it."""


def clean_name(name: str) -> str:
    """The name without wrappers: "layers.0.weight" for "layers.0._orig_mod.weight"."""
    if WRAPPER_NAMES.isdisjoint(parts := name.split(".")):
        return name
    return ".".join(part for part in parts if part not in WRAPPER_NAMES)
