"""Lightning's checkpoints: an optimizer's state by number, files read in place, folders opened."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn

from layerzero.checkpoint import CheckpointError
from layerzero.checkpoint.adapters import LATEST, Names, decode, name_in_group, open_source

FOLDER = "layerzero_folder"
"""Key of a checkpoint whose tensors are in a folder: its path."""
_COPIED_NBYTES = 1 << 20
"""Tensors of a mapped file that are at most this large get memory of their own."""


def plain_state_dict(model: nn.Module) -> dict[str, Any]:
    """As any strategy has it, of a module that was connected and is not set up.

    Raises:
        RuntimeError: it has parameters or buffers without storage.
    """
    state: dict[str, Any] = model.state_dict()
    unmade = next((n for n, value in state.items() if getattr(value, "is_meta", False)), None)
    if unmade is not None:
        raise RuntimeError(
            f"ZeRO3Strategy: {unmade!r} has no storage, so there is nothing to save; it gets "
            "values when the model is sharded: save after fit, validate, test or predict began"
        )
    return state


def is_mappable(path: Path) -> bool:
    """A local file in torch's present format."""
    return path.is_file() and zipfile.is_zipfile(path)


def map_file(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read a file that `torch.save` wrote; large tensors stay in it until they are used."""
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    # Who replaces the file must not pull memory from under what is kept of it.
    for name in checkpoint.keys() - {"state_dict"}:
        checkpoint[name] = apply_to_collection(checkpoint[name], torch.Tensor, _own_if_small)
    return checkpoint


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by name as `Optimizer.state_dict` has it: by number."""
    numbers: dict[str, int] = {}
    for group in state["param_groups"]:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
    return {
        "state": {numbers[name]: own for name, own in state["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def named(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Names
) -> dict[str, Any]:
    """The opposite, by the places of parameters in the groups, as torch itself loads it."""
    saved = [group["params"] for group in state["param_groups"]]
    own = [
        [name_in_group(names, parameter, number) for parameter in group["params"]]
        for number, group in enumerate(optimizer.param_groups)
    ]
    if [len(each) for each in saved] != [len(each) for each in own]:
        raise ValueError(
            "the checkpoint's optimizer has groups of "
            f"{[len(each) for each in saved]} parameters, the configured one of "
            f"{[len(each) for each in own]}; build the groups as they were"
        )
    name_of = {
        number: name
        for numbers, group in zip(saved, own, strict=True)
        for number, name in zip(numbers, group, strict=True)
    }
    groups = [
        {**group, "params": names} for group, names in zip(state["param_groups"], own, strict=True)
    ]
    by_name = {name_of[number]: each for number, each in state["state"].items()}
    return {"state": by_name, "param_groups": groups}


def _own_if_small(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.nbytes <= _COPIED_NBYTES else tensor


def local_path(path: str | Path) -> Path:
    if "://" in str(path):
        raise ValueError(
            f"{path}: sharded checkpoints are folders of a file system that all ranks share; use "
            "state_dict_type='full'"
        )
    return Path(path)


def make_way_for_file(path: Path) -> None:
    """A folder of an earlier, sharded checkpoint of the same name goes."""
    if not path.is_dir():
        return
    if not (path / LATEST).is_file():
        raise IsADirectoryError(f"{path} is a folder, and no checkpoint")
    shutil.rmtree(path)


def make_way_for_folder(path: Path) -> None:
    """A file of an earlier, full checkpoint of the same name goes."""
    if path.is_file():
        path.unlink()


def open_folder(path: Path) -> dict[str, Any]:
    """All but the tensors: these are read once the model is sharded."""
    manifest = open_source(path, with_optimizer=False).manifest
    if manifest is None or not manifest.extras:
        raise CheckpointError(
            f"{path}: expected a sharded checkpoint that the Trainer wrote; to load other weights, "
            "call layerzero.checkpoint.load(path, trainer.model) in on_fit_start"
        )
    extras = manifest.extras
    own = dist.get_rank() if len(extras) == dist.get_world_size() else 0
    checkpoint: dict[str, Any] = decode(extras[own])
    if not isinstance(checkpoint, dict) or "loops" not in checkpoint:
        raise CheckpointError(
            f"{path}: layerzero.checkpoint.save wrote it, and not the Trainer; load it with "
            "layerzero.checkpoint.load(path, trainer.model) in on_fit_start"
        )
    if checkpoint.pop("has_optimizer"):
        checkpoint["optimizer_states"] = []
    return {**checkpoint, "state_dict": {}, FOLDER: str(path)}
