"""Helpers for Lightning's checkpoints: optimizer state by number, mmapped files, folders."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection

from layerzero.checkpoint import CheckpointError
from layerzero.checkpoint.adapters import Names, decode, open_source

FOLDER = "layerzero_folder"
"""Key for the path of the folder that has a checkpoint's tensors."""
_COPIED_NBYTES = 1 << 20
"""Tensors of an mmapped file up to this size are copied to their own memory."""


def map_file(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Load a file that `torch.save` wrote by mmap; large tensors are read when they are used."""
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    # Small tensors outside the weights may be kept for long. They are copied, because the mapping
    # becomes invalid if the file is overwritten.
    for name in checkpoint.keys() - {"state_dict"}:
        checkpoint[name] = apply_to_collection(
            checkpoint[name], torch.Tensor, lambda t: t.clone() if t.nbytes <= _COPIED_NBYTES else t
        )
    return checkpoint


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert optimizer state keyed by name to the form of `Optimizer.state_dict`: by number."""
    names = chain.from_iterable(group["params"] for group in state["param_groups"])
    return _renamed(state, {name: number for number, name in enumerate(dict.fromkeys(names))})


def named(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Names
) -> dict[str, Any]:
    """The inverse of `numbered`: matches parameters by position in the groups, as torch does."""
    saved = [group["params"] for group in state["param_groups"]]
    own = names.in_groups(optimizer)
    sizes, expected = [len(each) for each in saved], [len(each) for each in own]
    if sizes != expected:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {sizes} parameters, the configured "
            f"optimizer groups of {expected}; build the same groups as in the saved run"
        )
    return _renamed(state, dict(zip(chain(*saved), chain(*own), strict=True)))


def _renamed(state: Mapping[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    groups = state["param_groups"]
    return {
        "state": {new[old]: own for old, own in state["state"].items()},
        "param_groups": [
            {**each, "params": [new[old] for old in each["params"]]} for each in groups
        ],
    }


def open_folder(path: Path) -> dict[str, Any]:
    """Open a sharded checkpoint without its tensors, which are read after sharding."""
    extras = open_source(path, with_optimizer=False).manifest.extras
    own = dist.get_rank() if len(extras) == dist.get_world_size() else 0
    checkpoint: Any = decode(extras[own]) if extras else None
    if not isinstance(checkpoint, dict) or "loops" not in checkpoint:
        raise CheckpointError(
            f"{path}: expected a sharded checkpoint that the Trainer wrote; to load other weights, "
            "call layerzero.checkpoint.load(path, trainer.model) in on_fit_start"
        )
    if checkpoint.pop("has_optimizer"):
        checkpoint["optimizer_states"] = []
    return {**checkpoint, "state_dict": {}, FOLDER: str(path)}
