"""Ledger: where the steps of a block of code went. See docs/howto/ledger.md."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from layerzero.comm.exchanges import gather_bytes
from layerzero.flat.groups import own_rank
from layerzero.notices import columns
from layerzero.step.root import RootState, root_of
from layerzero.step.unit import get_unit
from layerzero.step_ledger.figures import Explained, RankRow, UnitRow
from layerzero.step_ledger.recorder import Recorder
from layerzero.step_ledger.records import Hop, Job, Record, Slice, Wait
from layerzero.step_ledger.trace import draw, write_trace
from layerzero.wrapping.units import ordered_units


class Ledger:
    """Where the steps of a block went: the result of `layerzero.ledger`.

    Complete once the block has ended; before, and if the block raised, its attributes raise
    RuntimeError. All ranks' records are in it, on the clock of the first rank.

    On the CPU every figure is measured by the host: a wait is time that the host spent in it, and a
    gather has arrived when compute has waited for it, for gloo tells nobody else. On a device with
    streams, events on the lanes and on the compute stream are timed. Not measured there are how
    long a collective waited inside the backend for another of its group (it is taken from when that
    one ended), kernels that run slower beside a collective, and what the host does between two
    events.
    """

    rank: int
    """Global rank of this process."""

    def __init__(self) -> None:
        self._units: list[tuple[str, str]] = []
        """Label and FQN of each, in the order of `units`."""
        self._explained: Explained | None = None
        self.rank = own_rank()

    @property
    def _all(self) -> Explained:
        if self._explained is None:
            raise RuntimeError("ledger: it has figures once its block has ended without an error")
        return self._explained

    @property
    def num_steps(self) -> int:
        """Steps in the block: of the optimizer or, if these are fewer or there are none, backward
        passes that reduced gradients; in a block without backward, forwards."""
        return self._all.records[self.rank].num_steps

    @property
    def step_ms(self) -> float:
        """The block's milliseconds on this rank divided by its steps; 0 without steps."""
        record = self._all.records[self.rank]
        return (record.end - record.begin) * record.ms_per_step if record.num_steps else 0.0

    @property
    def units(self) -> list[UnitRow]:
        """This rank's units, one row for each of `layerzero.units(model)`, in that order."""
        explained = self._all
        return [explained.unit_row(self.rank, *names) for names in self._units]

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds of this rank's step: compute of forward and backward, what is between
        passes (the optimizer, data), and what was exposed. They add up to `step_ms`."""
        return self._all.parts(self.rank)

    @property
    def reasons(self) -> dict[str, float]:
        """Why compute stood still: milliseconds of a step by reason, the mean of all ranks."""
        return self._all.reasons()

    @property
    def ranks(self) -> list[RankRow]:
        """One row for each rank."""
        return self._all.rank_rows()

    def __str__(self) -> str:
        if self._explained is None:
            return "Ledger of a block that has not ended"
        rows, ranks = self.units, self.ranks
        lines = [
            f"rank {self.rank} of {len(ranks)}, mean of {self.num_steps} "
            f"step{'s' * (self.num_steps != 1)}: {self.step_ms:.2f} ms, of which "
            f"{sum(map(_exposed, rows)):.2f} ms are exposed communication",
            "  ".join(f"{name} {ms:.2f}" for name, ms in self.parts.items()),
            "",
            *columns([_UNITS, *map(_unit_row, rows)], (0, len(_UNITS) - 1)),
            "",
            *columns([_RANKS, *map(_rank_row, ranks)], (0,)),
        ]
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write all ranks' timelines as JSON, which <https://ui.perfetto.dev> opens.

        One process for each rank, one track for each lane. Not collective: any rank can write all.
        """
        write_trace(self._all, path, {"step_ms": self.step_ms, "num_steps": self.num_steps})

    def plot(self, path: str | Path) -> None:
        """Draw this rank's step of median length. Not collective.

        Raises:
            ImportError: matplotlib is not installed (`pip install 'layerzero[plots]'`).
            RuntimeError: no step ran inside the block.
        """
        draw(self._all, self.rank, path)


_UNITS = ("unit", "gather ms", "exposed", "MB", "reduce ms", "exposed", "MB", "why")
_RANKS = ("rank", "step ms", "compute", "exposed", "others waited for it", "clock error ms")
_SMALL = 0.005
"""Milliseconds below which a reason is not printed."""


def _unit_row(row: UnitRow) -> tuple[str, ...]:
    gather = row.gather_ms, row.exposed_gather_ms, row.gather_bytes * 1e-6
    reduction = row.reduce_ms, row.exposed_reduce_ms, row.reduce_bytes * 1e-6
    worst_first = sorted(row.reasons.items(), key=lambda item: -item[1])
    why = ", ".join(f"{name} {ms:.2f}" for name, ms in worst_first if ms >= _SMALL)
    return row.fqn or "(root)", *(f"{value:.2f}" for value in (*gather, *reduction)), why


def _rank_row(row: RankRow) -> tuple[str, ...]:
    numbers = row.step_ms, row.compute_ms, _exposed(row), row.waited_for_ms
    return str(row.rank), *(f"{value:.2f}" for value in numbers), f"{row.clock_error_ms:.3f}"


def _exposed(row: UnitRow | RankRow) -> float:
    return row.exposed_gather_ms + row.exposed_reduce_ms


@contextmanager
def ledger(model: nn.Module) -> Iterator[Ledger]:
    """Record where the steps inside the block go, on every rank.

    Collective over the model's data-parallel ranks at entry and exit, where it blocks the host; all
    of them must run the same steps inside. Run two steps before: the first one records the order of
    units and prefetches nothing. If the block raises, ranks exchange nothing.

    Args:
        model: a ZeRO3 module, or any module that is a unit: then `units` has the rows of the units
            inside it.

    Raises:
        ValueError: `model` is not wrapped.
        RuntimeError: entered or left inside forward or backward, inside `layerzero.join`, or while
            another ledger of the same model is open; or the model was wrapped again inside.
        CollectiveError: a rank did not take part within the timeout.
    """
    unit = get_unit(model)
    if unit is None:
        raise ValueError(f"ledger: expected a ZeRO3 module, got {type(model).__name__}")
    root = root_of(unit)
    root.check_between_steps("ledger: entered inside forward or backward; enter it around the step")
    if root.extensions.of(Recorder):
        raise RuntimeError("ledger: another ledger of this model is open; use that one")
    if root.join is not None:
        raise RuntimeError("ledger: entered inside layerzero.join; enter it around the join")
    result = Ledger()
    recorder = Recorder(root)
    try:
        yield result
        root.check_between_steps("ledger: left inside forward or backward; leave it after the step")
        recorder.end()
    finally:
        recorder.leave()
    if root_of(unit) is not root or get_unit(model) is not unit:
        raise RuntimeError(
            "ledger: the model was wrapped again inside the block; use one ledger for each"
        )
    result._units = [(unit.label, unit.fqn) for unit in ordered_units(model)]
    result._explained = Explained(_of_all_ranks(root, recorder.record))


def _of_all_ranks(root: RootState, record: Record) -> dict[int, Record]:
    """The records of all ranks. Collective over each group; blocks the host."""
    own = zlib.compress(json.dumps(asdict(record)).encode(), 1)
    name = partial(root.operations.next, "ledger", "the model")
    payloads = gather_bytes(own, root.groups, name, root.device)
    records = (_read(json.loads(zlib.decompress(each))) for each in payloads)
    return {each.rank: each for each in records}


def _read(text: dict[str, Any]) -> Record:
    for job in text["jobs"]:
        job["hops"] = [Hop(**{**hop, "ranks": tuple(hop["ranks"])}) for hop in job["hops"]]
    for name, kind in (("jobs", Job), ("waits", Wait), ("slices", Slice)):
        text[name] = [kind(**each) for each in text[name]]
    return Record(**text)
