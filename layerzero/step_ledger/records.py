"""What a ledger keeps of a step, in seconds on one rank's clock, and how it travels between ranks.

Job   one gather or reduction of one unit, from the call that asks for it
Hop   one collective of a job: a job has several with an outer axis, or several flat parameters
Wait  compute stood still until a job let it go on
Slice forward or backward of a unit on the compute lane
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Stamp = Any
"""A place in time: seconds on the host's clock, or an event of a device until it is resolved."""
JobKind = Literal["gather", "reduction"]
Phase = Literal["forward", "backward", "between"]

ISSUED_LATE = "issued late"
LIMITER = "limiter"
PREVIOUS = "previous reduction"
HOST_BOUND = "host-bound"
PEER_LATE = "peer late"
TRANSFER = "transfer"
REASONS = (ISSUED_LATE, LIMITER, PREVIOUS, HOST_BOUND, PEER_LATE, TRANSFER)


@dataclass(slots=True)
class Hop:
    number: int
    """Number of the operation in the model: the same on every rank of the group."""
    verb: str
    ranks: tuple[int, ...]
    """Global ranks of its group."""
    nbytes: int = 0
    """Bytes of the whole tensor on one rank, of which (size - 1) / size travel."""
    called: float = 0.0
    """When the host issued it."""
    issued: Stamp = 0.0
    """When its lane came to it; on the CPU, `called`."""
    arrived: Stamp = None
    """When its data had arrived, as far as something waited for it; None: nothing did inside the
    block."""
    done: Stamp = None
    """When its result was ready: a reduction on gloo sums what arrived."""


@dataclass(slots=True)
class Job:
    kind: JobKind
    unit: str
    """Label of the unit."""
    asked: Stamp
    cause: str
    """Reason of a wait for it that nothing else explains: one of `REASONS`."""
    hops: list[Hop] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffers; the hop along the outer axis carries parts of them."""
        whole = [hop for hop in self.hops if not hop.verb.startswith("outer")]
        return sum(hop.nbytes for hop in whole or self.hops)

    @property
    def end(self) -> float:
        """When its result was ready; only of a job with collectives."""
        return float(max(hop.done for hop in self.hops))


@dataclass(slots=True)
class Wait:
    job: int
    """Index of the job that it counts for."""
    blocker: int
    """Index of the job that was waited for: another one, if a reduction waits for the one before
    it."""
    begin: Stamp
    end: Stamp


@dataclass(slots=True)
class Slice:
    """Forward or backward of a unit on the compute lane, the waits inside it included."""

    phase: Phase
    unit: str
    """Label of the unit; "" for the pass of the whole model."""
    begin: Stamp
    end: Stamp


@dataclass(slots=True)
class Record:
    rank: int
    begin: Stamp
    end: Stamp
    jobs: list[Job] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    num_forwards: int = 0
    num_backwards: int = 0
    """Backward passes that reduced gradients."""
    num_optimizer_steps: int = 0
    clock_error: float = 0.0
    """Bound on the error of its clock's offset to the first rank's, in seconds."""

    @property
    def num_steps(self) -> int:
        """Steps in the block; see `Ledger.num_steps`."""
        if not self.num_backwards:
            return self.num_forwards
        return min(self.num_backwards, self.num_optimizer_steps or self.num_backwards)

    @property
    def ms_per_step(self) -> float:
        """Milliseconds of a step for each second of the block."""
        return 1e3 / max(self.num_steps, 1)

    def resolve(self, seconds: Callable[[Stamp], float], offset: float) -> None:
        """Replace stamps by `seconds`, and subtract `offset` from all times. Forgets collectives
        that never arrived."""

        def moved(stamp: Stamp) -> float:
            return seconds(stamp) - offset

        for job in self.jobs:
            job.asked = moved(job.asked)
            job.hops = [hop for hop in job.hops if hop.arrived is not None]
            for hop in job.hops:
                hop.called, hop.issued = hop.called - offset, moved(hop.issued)
                hop.arrived = moved(hop.arrived)
                hop.done = hop.arrived if hop.done is None else moved(hop.done)
        spans: list[Any] = [self, *self.waits, *self.slices]
        for span in spans:
            span.begin, span.end = moved(span.begin), moved(span.end)
