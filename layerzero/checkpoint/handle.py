"""SaveHandle: a save that may go on in the background; and when a model may be saved at all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from torch import nn

from layerzero.checkpoint.progress import ProgressReport
from layerzero.runtime.root import RootState
from layerzero.runtime.states import TrainingState
from layerzero.runtime.unit import get_unit

_logger = logging.getLogger(__name__)


class SaveHandle:
    """A save, done or under way."""

    path: Path
    """The checkpoint's folder, once it is committed."""
    step: int

    def __init__(self, path: Path, step: int, progress: ProgressReport) -> None:
        self.path = path
        self.step = step
        self._progress = progress
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it is committed, or has failed. Not collective; does not block."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes this rank has written, and has to write."""
        return self._progress.done_nbytes, self._progress.total_nbytes

    def wait(self) -> Path:
        """Return the folder once it is committed. Blocks; not collective, and any rank may call.

        Raises:
            CheckpointError: it failed; the previous checkpoint is what it was.
            CollectiveError: a rank died, or did not come.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            _logger.error("the save of %s in the background failed: %s", self.path, error)

    def start(self, work: Callable[[], None]) -> None:
        """Do the work in a thread."""
        # Not a daemon: a process that ends in good order finishes what it saves.
        self._thread = threading.Thread(target=self._run, args=(work,), name="layerzero-save")
        self._thread.start()


def refuse_experts(state: RootState, what: str) -> None:
    """Where the first rank has, or gets, everything: it knows no experts of other names.

    Raises:
        NotImplementedError: ranks have experts of different names.
    """
    for unit in state.units:
        experts = [h for h in unit.handles if h.placement.data_parallel is not None]
        if any(split is None for handle in experts for split in handle.splits):
            raise NotImplementedError(
                f"{what}: ranks have different experts ({unit.label} is on some of them); use "
                "state dicts of all ranks, or layerzero.checkpoint.save and load"
            )


def root_state_of(model: nn.Module, verb: str) -> RootState:
    """The root state of a model that is between steps: of the part with the most ranks.

    Raises:
        ValueError: nothing in it is wrapped, or parts are on ranks that no part has all of.
        RuntimeError: it is in backward, or was changed since it was wrapped.
    """
    return root_states_of(model, verb)[0]


def root_states_of(model: nn.Module, verb: str) -> list[RootState]:
    """As `root_state_of`, of every part that was wrapped by itself."""
    units = (get_unit(module) for module in model.modules())
    states = list({id(unit.root): unit.root for unit in units if unit is not None}.values())
    if not states:
        raise ValueError(
            f"{verb}: expected a ZeRO3 module, got {type(model).__name__}, which has none inside "
            "either; wrap the model first"
        )
    states.sort(key=lambda state: -len(_ranks_of(state)))
    for state in states:
        if not _ranks_of(state) <= _ranks_of(states[0]):
            raise ValueError(
                f"{verb}: {states[0].units[0].label} is on the ranks "
                f"{sorted(_ranks_of(states[0]))}, and another part of the "
                f"{type(model).__name__} on {sorted(_ranks_of(state))}; expected one part on all "
                "of them: give each part by itself"
            )
        state.clear_abandoned()
        if state.in_backward:
            raise RuntimeError(f"{verb}: expected a model between steps, but it is in backward")
        summoned = TrainingState.SUMMON_FULL_PARAMS
        if not any(unit.training_state is summoned for unit in state.units):
            state.structure.check(verb)
    return states


def _ranks_of(state: RootState) -> set[int]:
    handles = (handle for unit in state.units for handle in unit.handles)
    return {rank for handle in handles for rank in handle.placement.members}
