"""Every rank's record on every rank, on one clock."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from layerzero.flat.groups import ShardGroup
from layerzero.step.operations import Operations
from layerzero.step_ledger.clocks import Offset, host_s, measure_offset, share
from layerzero.step_ledger.records import Hop, Job, Record, Slice, Wait


class ClockReading(NamedTuple):
    """Offsets of this rank's clock to the first rank of each group, at one time."""

    at: float
    offsets: tuple[Offset, ...]


def read_clocks(
    groups: Sequence[ShardGroup], operations: Operations, device: torch.device
) -> ClockReading:
    """Collective over each group; blocks the host."""
    offsets = tuple(measure_offset(group, operations, device) for group in groups)
    return ClockReading(host_s(), offsets)


class Merged(NamedTuple):
    """The records of all ranks on the clock of the first one."""

    records: dict[int, Record]
    clock_errors: dict[int, float]
    """Bound on the error of each rank's offset, in seconds."""


def merge(
    record: Record,
    before: ClockReading,
    after: ClockReading,
    groups: Sequence[ShardGroup],
    operations: Operations,
    device: torch.device,
) -> Merged:
    """Exchange records. Collective over each group; blocks the host.

    Args:
        before, after: taken on entering and on leaving; the clock is taken to drift evenly between.
    """
    own = {
        "record": asdict(record),
        "firsts": [group.ranks[0] for group in groups],
        "before": [before.at, before.offsets],
        "after": [after.at, after.offsets],
    }
    payload = zlib.compress(json.dumps(own).encode(), 1)
    shared = share(payload, groups, operations, device)
    texts = {
        each["record"]["rank"]: each for each in (json.loads(zlib.decompress(p)) for p in shared)
    }
    chains = {rank: _chain(rank, texts) for rank in texts}
    records = {}
    for rank, text in texts.items():
        records[rank] = _moved(_read(text["record"]), *chains[rank][:2])
    return Merged(records, {rank: chain[2] for rank, chain in chains.items()})


def _chain(
    rank: int, texts: Mapping[int, Any]
) -> tuple[tuple[float, float], tuple[float, float], float]:
    """(time, offset to the first rank of all) at two times, and the bound on their error."""
    points = []
    error = 0.0
    for name in ("before", "after"):
        at, offset, bound = texts[rank][name][0], 0.0, 0.0
        current = rank
        for index in range(len(texts[rank]["firsts"])):
            value, further = texts[current][name][1][index]
            offset, bound = offset + value, bound + further
            current = texts[current]["firsts"][index]
        points.append((at, offset))
        error = max(error, bound)
    return points[0], points[1], error


def _read(text: Any) -> Record:
    text = dict(text)
    text["jobs"] = [
        Job(
            **{**job, "hops": [Hop(**{**hop, "ranks": tuple(hop["ranks"])}) for hop in job["hops"]]}
        )
        for job in text["jobs"]
    ]
    text["waits"] = [Wait(**wait) for wait in text["waits"]]
    text["slices"] = [Slice(**each) for each in text["slices"]]
    text["silent"] = [(begin, end) for begin, end in text["silent"]]
    return Record(**text)


def _moved(record: Record, first: tuple[float, float], last: tuple[float, float]) -> Record:
    """The record on the clock of the first rank."""
    (t0, o0), (t1, o1) = first, last
    slope = (o1 - o0) / (t1 - t0) if t1 > t0 else 0.0

    def moved(seconds: float) -> float:
        return seconds - (o0 + slope * (seconds - t0))

    record.resolve(moved)
    for job in record.jobs:
        job.asked_on_host = moved(job.asked_on_host)
        for hop in job.hops:
            hop.called = moved(hop.called)
    for wait in record.waits:
        wait.begin_on_host = moved(wait.begin_on_host)
    record.step_ends = [moved(end) for end in record.step_ends]
    record.silent = [(moved(begin), moved(end)) for begin, end in record.silent]
    return record
