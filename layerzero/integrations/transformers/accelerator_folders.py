"""Automatic checkpoint folders of an Accelerator: project_dir/checkpoints/checkpoint_N.

Only the first rank lists and removes folders, and sends the result to the others. Otherwise a rank
could mistake a folder that another has just begun to write for an old one.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from layerzero.checkpoint.adapters import committed_steps

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"checkpoint_(\d+)")


def folder_to_save(accelerator: Any, folder: str | os.PathLike[str] | None) -> Path:
    """The folder for `save_state`. Collective with `automatic_checkpoint_naming`.

    Raises:
        ValueError: no folder and no automatic naming, or the next name exists.
    """
    if not is_automatic(accelerator):
        if folder is None:
            raise ValueError(
                "save_state: expected a folder, or a ProjectConfiguration(project_dir, "
                "automatic_checkpoint_naming=True), which names folders"
            )
        return Path(folder)

    def look() -> str:
        path = _root(accelerator) / f"checkpoint_{accelerator.save_iteration}"
        if path.exists():
            raise ValueError(
                f"{path}: exists already; set accelerator.project_configuration.iteration to the "
                "number of the next checkpoint"
            )
        return str(path)

    return Path(_on_first(look))


def folder_to_load(accelerator: Any, folder: str | os.PathLike[str] | None) -> Path:
    """The folder for `load_state`; with automatic naming, the newest complete one. Collective.

    Raises:
        ValueError: on all ranks: there is no such folder.
    """

    def look() -> str:
        if folder is not None:
            path = Path(folder).expanduser()
            if not path.is_dir():
                raise ValueError(f"load_state: {path}: expected a folder of save_state, found none")
            return str(path)
        if not is_automatic(accelerator):
            raise ValueError(
                "load_state: expected a folder, or automatic_checkpoint_naming, whose newest "
                "checkpoint is loaded"
            )
        found = _complete(accelerator)
        if not found:
            raise ValueError(
                f"load_state: {_root(accelerator)}: expected a complete checkpoint_N, found none"
            )
        return str(found[max(found)])

    return Path(_on_first(look))


def after_save(accelerator: Any) -> None:
    """Count a complete checkpoint, and remove the oldest beyond `total_limit`. Collective."""
    if not is_automatic(accelerator):
        return
    configuration = accelerator.project_configuration
    configuration.iteration += 1
    if configuration.total_limit is not None:
        _on_first(lambda: _prune(accelerator, configuration.total_limit))


def is_automatic(accelerator: Any) -> bool:
    return bool(accelerator.project_configuration.automatic_checkpoint_naming)


def _root(accelerator: Any) -> Path:
    if accelerator.project_dir is None:
        raise ValueError("automatic_checkpoint_naming needs project_dir, got None")
    return Path(accelerator.project_dir, "checkpoints")


def _numbered(accelerator: Any) -> dict[int, Path]:
    root = _root(accelerator)
    found = (
        {} if not root.is_dir() else {path: _NAME.fullmatch(path.name) for path in root.iterdir()}
    )
    return {int(match[1]): path for path, match in found.items() if match is not None}


def _complete(accelerator: Any) -> dict[int, Path]:
    return {n: path for n, path in _numbered(accelerator).items() if committed_steps(path)}


def _prune(accelerator: Any, limit: int) -> str:
    found = _numbered(accelerator)
    for number in sorted(found)[: max(0, len(found) - max(limit, 1))]:
        _logger.info("removing %s: total_limit=%d", found[number], limit)
        shutil.rmtree(found[number])
    return ""


def _on_first(action: Callable[[], str]) -> str:
    """Run `action` on the first rank; all ranks return its result or raise its error. Collective.

    Raises:
        ValueError: on all ranks: `action` raised ValueError or OSError.
    """
    result: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = action()
        except (ValueError, OSError) as error:
            result[1] = f"{error}"
    dist.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise ValueError(result[1])
    return str(result[0])
