"""Automatic checkpoint folders of an Accelerator: project_dir/checkpoints/checkpoint_N.

Only the first rank lists and removes folders, and sends the result to the others. Otherwise a rank
could mistake a folder that another has just begun to write for an old one.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from layerzero.checkpoint.adapters import committed_steps
from layerzero.integrations.shared import on_first_rank

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"checkpoint_(\d+)")
_EXPECTED = (
    "expected a folder, or a ProjectConfiguration(project_dir, automatic_checkpoint_naming=True)"
)


def folder_to_save(accelerator: Any, folder: str | os.PathLike[str] | None) -> Path:
    """The folder for `save_state`. Collective with `automatic_checkpoint_naming`.

    Raises:
        ValueError: no folder and no automatic naming, or the next name exists.
    """
    if not is_automatic(accelerator):
        if folder is None:
            raise ValueError(f"save_state: {_EXPECTED}, which names folders")
        return Path(folder)
    path = _root(accelerator) / f"checkpoint_{accelerator.save_iteration}"
    if on_first_rank(path.exists, "save_state"):
        raise ValueError(
            f"save_state: {path}: exists already; set accelerator.project_configuration.iteration "
            "to the number of the next checkpoint"
        )
    return path


def folder_to_load(accelerator: Any, folder: str | os.PathLike[str] | None) -> Path:
    """The folder for `load_state`; with automatic naming, the newest complete one. Collective.

    Raises:
        ValueError: on all ranks: there is no such folder.
    """
    if folder is not None:
        path = Path(folder).expanduser()
        if not on_first_rank(path.is_dir, "load_state"):
            raise ValueError(f"load_state: {path}: expected a folder of save_state, found none")
        return path
    if not is_automatic(accelerator):
        raise ValueError(f"load_state: {_EXPECTED}, whose newest checkpoint is loaded")
    root = _root(accelerator)
    complete = on_first_rank(lambda: [*filter(committed_steps, _in_order(root))], "load_state")
    if not complete:
        raise ValueError(f"load_state: {root}: expected a complete checkpoint_N, found none")
    return Path(complete[-1])


def after_save(accelerator: Any) -> None:
    """Count a complete checkpoint, and remove the oldest beyond `total_limit`. Collective."""
    configuration = accelerator.project_configuration
    if not is_automatic(accelerator):
        return
    configuration.iteration += 1
    limit, root = configuration.total_limit, _root(accelerator)
    if limit is not None:
        on_first_rank(lambda: _prune(root, limit), "save_state")


def is_automatic(accelerator: Any) -> bool:
    return bool(accelerator.project_configuration.automatic_checkpoint_naming)


def _root(accelerator: Any) -> Path:
    if accelerator.project_dir is None:
        raise ValueError("automatic_checkpoint_naming needs project_dir, got None")
    return Path(accelerator.project_dir, "checkpoints")


def _in_order(root: Path) -> list[Path]:
    """The folders of checkpoints, complete or not, oldest first."""
    found = {
        int(match[1]): path
        for path in root.glob("checkpoint_*")
        if (match := _NAME.fullmatch(path.name))
    }
    return [found[number] for number in sorted(found)]


def _prune(root: Path, limit: int) -> None:
    for path in _in_order(root)[: -max(limit, 1)]:
        _logger.info("removing %s: total_limit=%d", path, limit)
        shutil.rmtree(path)
