"""The errors that are layerzero's own. Wrong arguments and calls raise Python's."""

from __future__ import annotations

from layerzero.state_dict.errors import CheckpointError
from layerzero.verify.verifier import CorruptionError
from layerzero.watch.diagnosis import CollectiveError

__all__ = ["CheckpointError", "CollectiveError", "CorruptionError"]
