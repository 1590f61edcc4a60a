"""Every rank's record on every rank, on one clock."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict
from functools import partial
from typing import Any

from layerzero.comm.exchanges import gather_bytes
from layerzero.step.root import RootState
from layerzero.step_ledger.clocks import Reading
from layerzero.step_ledger.records import Hop, Job, Record, Slice, Wait


def merge(root: RootState, record: Record, before: Reading, after: Reading) -> dict[int, Record]:
    """The records of all ranks, on the clock of the first one. Collective over each group; blocks
    the host.

    Args:
        before, after: taken on entering and on leaving; the clock is taken to drift evenly between.
    """
    own = zlib.compress(json.dumps([asdict(record), before, after]).encode(), 1)
    name = partial(root.operations.next, "ledger", "the model")
    payloads = gather_bytes(own, root.groups, name, root.device)
    records = {}
    for text, *readings in (json.loads(zlib.decompress(each)) for each in payloads):
        found = _moved(_read(text), *(Reading(*reading) for reading in readings))
        records[found.rank] = found
    return records


def _read(text: dict[str, Any]) -> Record:
    for job in text["jobs"]:
        job["hops"] = [Hop(**{**hop, "ranks": tuple(hop["ranks"])}) for hop in job["hops"]]
    for name, kind in (("jobs", Job), ("waits", Wait), ("slices", Slice)):
        text[name] = [kind(**each) for each in text[name]]
    return Record(**text)


def _moved(record: Record, first: Reading, last: Reading) -> Record:
    """The record on the clock of the first rank."""
    elapsed = last.at - first.at
    slope = (last.offset - first.offset) / elapsed if elapsed > 0 else 0.0

    def moved(seconds: float) -> float:
        return seconds - (first.offset + slope * (seconds - first.at))

    record.resolve(moved, moved)
    record.clock_error = max(first.error, last.error)
    return record
