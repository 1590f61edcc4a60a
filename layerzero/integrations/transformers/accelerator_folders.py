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


def folder_to_save(accelerator: Any, folder: str | os.PathLike[str] | None) -> Path:
    """The folder for `save_state`. Collective with `automatic_checkpoint_naming`.

    Raises:
        ValueError: no folder and no automatic naming, or the next name exists.
    """
    if folder is not None and not is_automatic(accelerator):
        return Path(folder)

    def find() -> Path:
        if not is_automatic(accelerator):
            raise ValueError(
                "expected a folder, or a ProjectConfiguration(project_dir, "
                "automatic_checkpoint_naming=True), which names folders"
            )
        path = _root(accelerator) / f"checkpoint_{accelerator.save_iteration}"
        if path.exists():
            raise ValueError(
                f"{path}: exists already; set accelerator.project_configuration.iteration to the "
                "number of the next checkpoint"
            )
        return path

    return Path(on_first_rank(find, "save_state", ValueError))


def folder_to_load(accelerator: Any, folder: str | os.PathLike[str] | None) -> Path:
    """The folder for `load_state`; with automatic naming, the newest complete one. Collective.

    Raises:
        ValueError: on all ranks: there is no such folder.
    """

    def find() -> Path:
        if folder is not None:
            path = Path(folder).expanduser()
            if not path.is_dir():
                raise ValueError(f"{path}: expected a folder of save_state, found none")
            return path
        if not is_automatic(accelerator):
            raise ValueError(
                "expected a folder, or automatic_checkpoint_naming, whose newest "
                "checkpoint is loaded"
            )
        found = [path for path in _in_order(accelerator) if committed_steps(path)]
        if not found:
            raise ValueError(f"{_root(accelerator)}: expected a complete checkpoint_N, found none")
        return found[-1]

    return Path(on_first_rank(find, "load_state", ValueError))


def after_save(accelerator: Any) -> None:
    """Count a complete checkpoint, and remove the oldest beyond `total_limit`. Collective."""
    if not is_automatic(accelerator):
        return
    configuration = accelerator.project_configuration
    configuration.iteration += 1
    if configuration.total_limit is not None:
        on_first_rank(
            lambda: _prune(accelerator, configuration.total_limit), "save_state", ValueError
        )


def is_automatic(accelerator: Any) -> bool:
    return bool(accelerator.project_configuration.automatic_checkpoint_naming)


def _root(accelerator: Any) -> Path:
    if accelerator.project_dir is None:
        raise ValueError("automatic_checkpoint_naming needs project_dir, got None")
    return Path(accelerator.project_dir, "checkpoints")


def _in_order(accelerator: Any) -> list[Path]:
    """The folders of checkpoints, complete or not, oldest first."""
    found = {
        int(match[1]): path
        for path in _root(accelerator).glob("checkpoint_*")
        if (match := _NAME.fullmatch(path.name))
    }
    return [found[number] for number in sorted(found)]


def _prune(accelerator: Any, limit: int) -> None:
    for path in _in_order(accelerator)[: -max(limit, 1)]:
        _logger.info("removing %s: total_limit=%d", path, limit)
        shutil.rmtree(path)
