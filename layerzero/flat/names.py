"""Looks through wrappers: at the modules inside them, and past what they add to names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Attribute under which torch.compile's and activation checkpointing's wrappers hold the module."""


def clean_name(name: str) -> str:
    """Remove wrappers from a name: "layers.0._orig_mod.weight" becomes "layers.0.weight"."""
    if WRAPPER_NAMES.isdisjoint(parts := name.split(".")):
        return name
    return ".".join(part for part in parts if part not in WRAPPER_NAMES)


def and_wrapped(module: nn.Module) -> Iterator[nn.Module]:
    """The module and, if it is a wrapper, the modules that it wraps; outermost first."""
    yield module
    for name, child in module._modules.items():
        if name in WRAPPER_NAMES and child is not None:
            yield from and_wrapped(child)
